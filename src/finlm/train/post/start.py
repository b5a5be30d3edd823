"""Load what a stage after pretraining starts with: model, adapters, heads that compare answers, tokenizer, reference.

The heads need no mask: rows are padded on their right, where no token that counts looks, and flash attention takes
none.

QLoRA (arXiv 2305.14314) with torchao's NF4: blocks of 64 weights share a scale, which is itself kept in 8 bits. A
matrix is unpacked when it multiplies and again in the backward pass. DeepSpeed neither casts, partitions nor saves it:
a checkpoint holds the adapters, and the matrices come from model.init_from again.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, PreTrainedConfig

from finlm.base import runs
from finlm.plan.plan import Plan
from finlm.recipe import shape, weights
from finlm.recipe.models import traits
from finlm.recipe.schema import Model, Recipe
from finlm.recipe.settings import config_of
from finlm.recipe.shape import is_quantized
from finlm.rows.shards import IGNORED, Shards
from finlm.train.entry import Rank
from finlm.train.model import causal_lm, kernels
from finlm.train.model.causal_lm import model_config
from finlm.train.model.kernels import Head, shape_logits, slices

BLOCK = 64  # weights that share a scale of NF4
SCALES = 256  # scales that share a factor, at most


def run_tokenizer(shards: Shards, add_bos: bool, sequence_length: int) -> Any:
    """Return the tokenizer of a run's data, with `sequence_length` as model_max_length.

    With the shards' directory tokenizer/ it is dialogue_tokenizer() and their chat template, if any; else
    piece_tokenizer() of their tokenizer.model, which takes `add_bos`.
    """
    template = shards.directory / "chat_template.jinja"
    if not (shards.directory / "tokenizer").is_dir():
        return piece_tokenizer(shards.tokenizer, add_bos, sequence_length)
    tokenizer = dialogue_tokenizer(shards)
    if template.is_file():
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    tokenizer.model_max_length = sequence_length
    return tokenizer


def dialogue_tokenizer(shards: Shards) -> Any:
    """Return the tokenizer in the shards' directory tokenizer/, with the shards' bos and eos, None for an id of -1."""
    directory = shards.directory / "tokenizer"
    # Else tokenizer.json as it stands. AutoTokenizer drops its normalizer (transformers 5): with Llama-2's files every
    # message would begin with another token.
    if shards.manifest["encoder"] == "sentencepiece":
        tokenizer = transformers.LlamaTokenizer.from_pretrained(directory, legacy=False)
    else:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    for name, number in (("bos_token", shards.bos_id), ("eos_token", shards.eos_id)):  # what templates wrote
        text = tokenizer.convert_ids_to_tokens(number) if number >= 0 else None
        if getattr(tokenizer, name) != text:
            setattr(tokenizer, name, text)
    return tokenizer


def piece_tokenizer(model_file: Path, add_bos: bool, sequence_length: int) -> Any:
    """Return transformers' tokenizer of a tokenizer.model: the same ids, no eos, `sequence_length` as longest."""
    return transformers.LlamaTokenizer.from_pretrained(
        str(model_file.parent),
        legacy=False,  # keeps spaces after control tokens
        add_bos_token=add_bos,
        add_eos_token=False,
        model_max_length=sequence_length,
        clean_up_tokenization_spaces=False,
    )


def padding_id(shards: Shards) -> int:
    """Return the first of the ids of padding, <unk> and <s> that exists and ends no turn or text, else the eos id."""
    # A reward is read at the last token that is not padding: with </s> as padding, before the end of the turn.
    tokenizer = dialogue_tokenizer(shards)
    ends = (shards.eos_id, shards.manifest["end_of_turn_id"])
    known = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    return next((number for number in known if number is not None and number not in ends), shards.eos_id)


def load_start(r: Rank[Recipe]) -> Any:
    """Load the start model onto the rank's device, in 4 bits for QLoRA, without adapters. UserError if unusable."""
    config = model_config(r.recipe, r.plan, r.shards.bos_id, r.shards.eos_id)
    model = load_model(r.recipe, r.plan, r.run.ds_config, config, r.shards.tokenizer)
    # Back to transformers' own forward, which kernels' loss has replaced: trl puts a head of its own there.
    for module in (model, model.lm_head):
        module.__dict__.pop("forward", None)
    return model.to(r.device)


def padding_tokenizer(r: Rank[Recipe]) -> Any:
    """Return the tokenizer of the run's data, with padding_id() as its padding token."""
    tokenizer = dialogue_tokenizer(r.shards)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding_id(r.shards))
    return tokenizer


def load_model(recipe: Recipe, plan: Plan, ds_config: Path, config: PreTrainedConfig, tokenizer: Path) -> Any:
    """Load the recipe's model, pack it in 4 bits if lora.quantize asks for it, swap its kernels, and return it.

    It has no adapters yet: peft adds them later. `config` is model_config(), `tokenizer` the tokenizer file of the
    shards. Raises UserError if the start's weights cannot be loaded or do not fit the recipe.
    """
    model = causal_lm.load(recipe, plan, ds_config, config, tokenizer)
    if is_quantized(recipe):
        quantize(model, plan.device)
    kernels.swap(model, plan, draws=recipe.lora is not None and recipe.lora.dropout > 0)
    return model


def lora_config(recipe: Recipe) -> Any:
    """Return peft's LoraConfig, None without lora: in the recipe. Raises UserError for an unknown model type."""
    if recipe.lora is None:
        return None
    from peft import LoraConfig

    settings = recipe.lora
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(shape.adapted(recipe, shape.of_config(config_of(recipe.model), 1))),
        task_type="CAUSAL_LM",
    )


def merge_adapters(weights: dict[str, torch.Tensor], recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the weights by the plain model's names, with alpha / rank * B A of each adapter added in fp32.

    `weights` has peft's names and stays as it is. Dtypes stay. The recipe must have lora:. Raises RuntimeError when an
    adapter belongs to no weight.
    """
    assert recipe.lora is not None
    scale = recipe.lora.alpha / recipe.lora.rank
    merged, added = {}, set[str]()
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        module, _, kind = name.rpartition(".")  # weight, bias, or a parameter of several experts
        stem = module.removesuffix(".base_layer")
        names = [f"{stem}.lora_{which}.default.weight" for which in "AB"]
        if kind == "weight" and all(part in weights for part in names):
            down, up = (weights[part].float() for part in names)
            weight = (weight.float() + scale * (up @ down)).to(weight.dtype)
            added.update(names)
        merged[f"{stem.removeprefix('base_model.model.')}.{kind}"] = weight
    if lost := sorted(name for name in weights if ".lora_" in name and name not in added):
        raise RuntimeError(f"{len(lost)} trained adapters belong to no weight: {', '.join(lost[:3])}")
    return merged


class Nf4Linear(torch.nn.Linear):
    """A frozen linear layer whose matrix is kept in 4 bits (NF4); peft puts adapters on it as on any other."""

    def __init__(self, matrix: torch.Tensor, bias: torch.nn.Parameter | None = None) -> None:
        """Pack `matrix` [outputs, inputs] in 4 bits; products are in its dtype. `bias` must be on its device."""
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = matrix.shape
        self.bias = bias  # type: ignore[assignment]
        # An attribute, not a parameter, so DeepSpeed leaves it alone.
        self.weight = pack_nf4(matrix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [..., outputs] for x [..., inputs]."""
        product: torch.Tensor = _nf4().linear_nf4(x, self.weight)
        return product if self.bias is None else product + self.bias


def _nf4() -> Any:
    """Return torchao's module of NF4. Not imported with this module: it takes a second that only 4 bits need."""
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor  # type: ignore[import-untyped]

    return nf4_tensor


def pack_nf4(matrix: torch.Tensor) -> Any:
    """Return the matrix as torchao's NF4Tensor on its device. Its number of elements must be a multiple of 64."""
    blocks = matrix.numel() // BLOCK
    return _nf4().to_nf4(matrix.detach().contiguous(), BLOCK, math.gcd(blocks, SCALES))


def quantize(model: Any, device: str) -> None:
    """Replace every linear layer of the decoder in place by an Nf4Linear on `device`, layer after layer."""
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, torch.nn.Linear):
                parent, _, child = name.rpartition(".")
                bias = None if module.bias is None else torch.nn.Parameter(module.bias.detach().to(device))
                setattr(layer.get_submodule(parent), child, Nf4Linear(module.weight.to(device), bias))


def load_matrices(recipe: Recipe, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Load init_from, pack the linear weights of its decoder as quantize does, and return {name: unpacked matrix}.

    The matrices are on the CPU in `dtype`. Raises UserError when model.init_from is gone, damaged or lacks weights.
    """
    runs.prove_model(Path(str(recipe.model.init_from)))
    # The adapters were trained on unpacked matrices. A GPU may round a scale between two values the other way.
    base = causal_lm.load_weights(
        AutoModelForCausalLM,
        recipe.model.init_from,
        "put the model of model.init_from back: under lora.quantize a checkpoint holds the adapters only",
        config=causal_lm.start_config(str(recipe.model.init_from), recipe.model.revision),
        revision=recipe.model.revision,
        dtype=dtype,
        use_safetensors=True,
    )
    return {
        f"{prefix}.weight": pack_nf4(module.weight).get_original_weight()
        for prefix, module in base.named_modules()
        if prefix.startswith("model.layers.") and isinstance(module, torch.nn.Linear)
    }


class RewardHead(torch.nn.Linear):
    """A reward model's head, whose rewards are fp32: in bf16, with 8 bits, two answers would often get the same."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rewards, fp32 [..., 1], of `hidden` [..., hidden_size]; computed in fp32."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float())


def swap_head(model: Any, vocab_size: int) -> None:
    """Make model(...).log_probs those of the labels, as trl's own head gives them; call it after trl has set its head.

    Replaces the forward of `model` and of its lm_head in place. Raises UserError if the user's file of model types is
    damaged.
    """
    # trl's head is slow on CPUs: it scores every position, prompts too, in slices of 32,768 tokens, ten times the work.
    model.lm_head.forward = partial(_head_log_probs, model.lm_head, vocab_size, traits.head_of(model.config.to_dict()))
    model.forward = partial(_forward_log_probs, model)


def _forward_log_probs(model: Any, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> SimpleNamespace:
    """Run the model on rows padded on the right; return fields as trl's head: log_probs, entropy, mean_logits, is_top1.

    `input_ids` and `labels` are [batch, sequence]; log_probs are fp32 [batch, sequence - 1], 0 at ignored labels, and
    the other fields 0.
    """
    hidden = model.model(input_ids, position_ids=kernels.plain_positions(input_ids), use_cache=False).last_hidden_state
    log_probs: torch.Tensor = model.lm_head(hidden[:, :-1], labels[:, 1:])  # a module's call: ZeRO-3 gathers its weight
    # Only metrics that finlm drops read the other fields.
    nothing = torch.zeros_like(log_probs)
    return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def _head_log_probs(
    head: torch.nn.Linear, vocab_size: int, form: kernels.Form, hidden: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return each label's log-probability, fp32 [batch, sequence], 0 at IGNORED; takes the place of head.forward.

    `hidden` is [batch, sequence, hidden], at the position whose next token the label is. Rows of head.weight from
    vocab_size on are padding. Raises ValueError when no label counts.
    """
    counted = labels != IGNORED  # only these positions are multiplied: of a pair's tokens the answers
    log_probs = LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden[counted], head.weight, labels[counted], (vocab_size, form)
    )
    whole: torch.Tensor = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
    return whole.masked_scatter(counted, log_probs)


class LinearLogProbs(torch.autograd.Function):
    """log softmax(hidden @ weight.T)[label] of each token; the logits are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
        """Return fp32 log-probabilities [tokens] of hidden [tokens, hidden], weight [rows, hidden], labels [tokens].

        `head` is (vocab_size, form of the logits): rows of weight from vocab_size on are padding.
        """
        vocab_size, form = head
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for start, stop in slices(len(hidden), len(weight) * hidden.element_size(), hidden.device.type):
            scores, _ = shape_logits((hidden[start:stop] @ weight[:vocab_size].T).float(), form)
            picked = scores.gather(1, labels[start:stop, None])[:, 0]
            log_probs[start:stop] = picked - scores.logsumexp(dim=1)
        ctx.save_for_backward(hidden, weight, labels)
        ctx.head = head
        return log_probs

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden and weight (None if frozen): one-hot minus softmax, times upstream."""
        hidden, weight, labels = ctx.saved_tensors
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
        vocab_size, form = ctx.head
        rows = weight[:vocab_size]
        for start, stop in slices(len(hidden), len(weight) * hidden.element_size(), hidden.device.type):
            part = hidden[start:stop]
            scores, slope = shape_logits((part @ rows.T).float(), form)
            gradient = scores.softmax(dim=1).neg_()
            gradient.scatter_add_(1, labels[start:stop, None], torch.ones_like(gradient[:, :1]))
            gradient = gradient.mul_(upstream[0][start:stop, None])
            gradient = (gradient if slope is None else gradient * slope).to(hidden.dtype)
            hidden_grad[start:stop] = gradient @ rows
            weight_grad[:vocab_size].addmm_(gradient.T, part)
        return hidden_grad, weight_grad if ctx.needs_input_grad[1] else None, None, None


def forward_without_mask(model: Any, input_ids: torch.Tensor, **_: Any) -> Any:
    """Return what the class's own forward gives for `input_ids`, padded on the right, without mask and cache."""
    position_ids = kernels.plain_positions(input_ids)
    return type(model).forward(model, input_ids=input_ids, position_ids=position_ids, use_cache=False)


def score_answers_alone() -> None:
    """Patch trl, for the process, so that its head skips the tokens of prompts on CPUs too."""
    from trl.trainer import utils as trl_utils

    # It decides nothing else on CPUs (trl 1.16).
    trl_utils._use_triton = lambda device: True


def refer_to_text(model: Model) -> None:
    """Patch trl, for the process, to load only the text decoder as the reference, where it would load the whole start.

    Does nothing if the start reads nothing but text. Raises UserError for a damaged config.json of the start.
    """
    from trl.trainer import grpo_trainer  # takes seconds, and only GRPO needs it

    if any(weights.text_alone(model)):
        config = causal_lm.start_config(str(model.init_from), model.revision)
        how: dict[str, Any] = {"kind": causal_lm.causal_class(config), "config": config}
        how["fix"] = "put the model of model.init_from back"
        grpo_trainer.create_model_from_path = lambda path, **given: causal_lm.load_weights(source=path, **how, **given)


def start_path(model: Model) -> str:
    """Return the start's directory, for a Hub id that of its revision in the cache; LocalEntryNotFoundError without."""
    source = str(model.init_from)
    if Path(source).is_dir():
        return source
    # trl would take the newest revision. The start has just been loaded, so the cache has it.
    return snapshot_download(source, revision=model.revision, local_files_only=True)
