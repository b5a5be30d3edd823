"""Count parameters and FLOPs of a decoder, and find what a recipe asks of its layers that they lack; without torch.

The stages after pretraining change what is trained and kept: adapters, frozen weights (in 4 bits or 16), pairs of
answers, a reference model. That is counted here too; bytes are plan/memory.py's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from finlm.base.errors import UserError
from finlm.recipe.models import refusals, traits
from finlm.recipe.models.traits import Sizes
from finlm.recipe.schema import Recipe
from finlm.recipe.settings import config_of

ROUTERS = ("gate", "router")
IN_PROJ = tuple(f"in_proj_{of}" for of in ("qkvz", "ba", "qkv", "z", "b", "a"))  # of linear attention
# A layer that does the work of several of Llama's, whose adapters it gets.
STANDS_FOR = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    **dict.fromkeys(("q_a_proj", "q_b_proj"), ("q_proj",)),
    **dict.fromkeys(("kv_a_proj_with_mqa", "kv_b_proj"), ("k_proj", "v_proj")),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "c_fc": ("up_proj", "gate_proj"),
    "c_proj": ("down_proj",),
    **dict.fromkeys(("in_proj_qkv", "in_proj_qkvz"), ("q_proj", "k_proj", "v_proj")),
    "in_proj_z": ("q_proj",),  # the gate of the output, which q_proj of the other layers makes too
    "out_proj": ("o_proj",),
}
VOCAB_MULTIPLE = 128  # 39,438 rows instead of 39,552 cost 9 % of XuanYuan-6B's micro-step on one H200


@dataclass(frozen=True, kw_only=True)
class ModelShape(traits.LayerSizes):
    """Sizes of one decoder; a Llama's where head_size, layer and outer are not given."""

    hidden: int
    layers: int
    vocab: int
    tied: bool
    outer: int | None = None  # parameters beside layers, embedding and head
    dense: int = 0  # layers that have no experts, in a model of experts
    linear: int = 0  # layers of linear attention, beside layers with attention
    keeps_scores: bool = False  # attention's T x T scores stay for the backward pass: they have a soft cap

    @functools.cached_property
    def kinds(self) -> list[tuple[int, ModelShape]]:
        """The kinds of layers: for each (number of layers, shape as if all layers were of this kind).

        One kind if all are alike; else layers without experts, or with linear attention, come first.
        """
        if self.linear:
            mixing = dataclasses.replace(self, linear=0, linear_layer=(), layer=self.linear_layer)
            full = dataclasses.replace(self, linear=0, linear_layer=(), delta=None)
            return [(self.linear, mixing), (self.layers - self.linear, full)]
        if not self.dense:
            return [(self.layers, self)]
        dense = dataclasses.replace(
            self,
            dense=0,
            dense_layer=(),
            dense_ffn=0,
            layer=self.dense_layer,
            ffn=self.dense_ffn,
            experts=(0, 0),
            router_bytes=0,
        )
        return [(self.dense, dense), (self.layers - self.dense, dataclasses.replace(self, dense=0))]

    @property
    def is_linear(self) -> bool:
        """Whether all layers have linear attention; for a shape from `kinds`."""
        return self.delta is not None and not self.linear

    @property
    def padded_vocab(self) -> int:
        """Rows of embedding and head on a GPU: the vocabulary rounded up to a multiple of 128, for fast products."""
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def q_width(self) -> int:
        """Width of a token's queries: heads times head size."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Width of a token's keys, as of its values: key-value heads times head size."""
        return self.q_width // self.heads * self.kv_heads

    @property
    def value_size(self) -> int:
        """Size of a head's values."""
        return self.latent.value_size if self.latent else self.q_width // self.heads

    @property
    def output_width(self) -> int:
        """Width of attention's output of a token, which o_proj reads."""
        return self.heads * self.value_size

    @property
    def cached_width(self) -> int:
        """Elements that generation caches per token and layer: keys and values, or the latents they are made from."""
        return self.latent.cached + self.latent.rotated if self.latent else 2 * self.kv_width

    @property
    def pads_values(self) -> bool:
        """Whether a head's values are padded to the size of its keys, because most kernels need equal sizes."""
        return self.value_size != self.q_width // self.heads

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the input embedding."""
        return self.vocab * self.hidden

    @property
    def tensors(self) -> tuple[tuple[str, Sizes], ...]:
        """(name, sizes) of a decoder layer's tensors in the model's order; a Llama layer's if `layer` is empty."""
        if self.layer:
            return self.layer
        h, q, kv, ffn = self.hidden, self.q_width, self.kv_width, self.ffn
        attention = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
        block = {"gate_proj": (ffn, h), "up_proj": (ffn, h), "down_proj": (h, ffn)}
        named = {f"{name}.weight": sizes for name, sizes in (attention | block).items()}
        return (*named.items(), ("input_layernorm.weight", (h,)), ("post_attention_layernorm.weight", (h,)))

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of every linear layer of a decoder layer but routers, by the last part of its name."""
        return {
            short: (sizes[1], sizes[0])
            for name, sizes in (*self.tensors, *self.linear_layer)
            if len(sizes) == 2 and (short := name.removesuffix(".weight").rpartition(".")[2]) not in ROUTERS
        }

    @property
    def adaptable(self) -> dict[str, tuple[int, int]]:
        """{name: (inputs, outputs)} of the linear layers of a decoder layer that adapters may go on.

        In a model of experts these are attention's only, and of those none that has a name of the experts' block: peft
        would match it to the experts' own tensors.
        """
        tensors = *self.tensors, *self.linear_layer
        within = {name.partition("attn.")[2].removesuffix(".weight") for name, _ in tensors}
        within -= {name.rpartition(".")[0].rpartition(".")[2] for name, _ in tensors if "attn." not in name}
        return {name: sides for name, sides in self.matrices.items() if not self.experts[0] or name in within}

    def count_matrices(self, names: Collection[str]) -> int:
        """Return how many linear layers with one of these names all decoder layers have; kinds of layers differ."""
        return sum(layers * len(kind.matrices.keys() & set(names)) for layers, kind in self.kinds)

    @property
    def norms(self) -> int:
        """Number of norms as wide as the hidden states in a layer, outside of attention."""
        return sum(
            "norm" in name and sizes == (self.hidden,) and "bias" not in name and "attn." not in name
            for name, sizes in self.tensors
        ) + self.bare_norms.count(self.hidden)

    @property
    def inner_normed(self) -> int:
        """Elements of a token's queries, keys and latents that pass through norms inside a layer's attention."""
        if self.is_linear:  # DeltaNet.kept_bytes counts its norm
            return 0
        elements = sum(width for width in self.bare_norms if width != self.hidden)
        for name, sizes in self.tensors:
            if "norm" in name and "attn." in name and "bias" not in name:
                module = name.partition("attn.")[2]
                is_a_head = (
                    sizes[0] == self.head_size
                    and not self.latent
                    and not any(part.isdigit() for part in module.split("."))
                )
                elements += (self.q_width if module[0] == "q" else self.kv_width) if is_a_head else sizes[0]
        return elements

    @property
    def is_parallel(self) -> bool:
        """Whether attention and the feed-forward block read the same norm."""
        return self.norms == 1

    @property
    def has_sinks(self) -> bool:
        """Whether the softmax of a head's scores has a further column, a learnt logit whose value is 0."""
        return any(name == traits.SINKS for name, _ in self.tensors)

    @property
    def gates_attention(self) -> bool:
        """Whether attention's output is multiplied by the sigmoid of another product of its input."""
        gate, both = "self_attn.gate_proj.weight", ("self_attn.q_proj.weight", (2 * self.q_width, self.hidden))
        return any(name == gate or (name, sizes) == both for name, sizes in self.tensors)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward block multiplies two products (as SwiGLU does), or has experts, which do."""
        return bool({"gate_proj", "gate_up_proj"} & self.matrices.keys()) or self.experts[0] > 0

    @property
    def is_lean(self) -> bool:
        """Whether the feed-forward block is Llama's; train/model/kernels.py then keeps only gate and up."""
        return {"gate_proj", "up_proj", "down_proj"} <= self.matrices.keys() and not self.experts[0]

    @property
    def left_to_transformers(self) -> list[str]:
        """Sentences about the modules that finlm replaces in other models and leaves to transformers in this one."""
        sentences = []
        if self.keeps_scores:
            sentences.append("attention is transformers' own, which keeps every score: no kernel here has its soft cap")
        if not self.is_lean:
            sentences.append(
                "the feed-forward block is transformers' own, and keeps what it multiplies: it is not Llama's"
            )
        return sentences

    @functools.cached_property
    def layer_sizes(self) -> list[int]:
        """Number of elements of each tensor of a decoder layer, in the model's order."""
        return [math.prod(sizes) for _, sizes in self.tensors]

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Number of parameters of one decoder layer."""
        return sum(self.layer_sizes)

    @functools.cached_property
    def layer_matrices(self) -> int:
        """Number of parameters of one layer's matrices, experts' too and convolutions' not."""
        return sum(math.prod(sizes) for name, sizes in self.tensors if len(sizes) > 1 and "conv" not in name)

    @property
    def active_matrices(self) -> float:
        """Number of matrix parameters of a layer that multiply a token, on average; idle experts do not count."""
        if self.dense or self.linear:
            return sum(layers * kind.active_matrices for layers, kind in self.kinds) / self.layers
        idle = sum(math.prod(sizes) for name, sizes in self.tensors if len(sizes) > 2 and "conv" not in name)
        all_, active = self.experts
        return self.layer_matrices - (idle * (all_ - active) // all_ if all_ else 0)

    @property
    def beside(self) -> int:
        """Number of parameters outside of layers, embedding and head: the last norm."""
        return self.hidden if self.outer is None else self.outer

    @property
    def sizes(self) -> list[int]:
        """Number of elements of every parameter in the model's order: embedding, layers, norm, head."""
        embedding = [self.embedding_parameters]
        last = [self.beside] if self.beside else []
        within = [size for layers, kind in self.kinds for size in kind.layer_sizes * layers]
        return [*embedding, *within, *last, *([] if self.tied else embedding)]

    @functools.cached_property
    def matrix_parameters(self) -> int:
        """Number of parameters of all layers' matrices, which LoRA freezes and QLoRA keeps in 4 bits."""
        return sum(layers * kind.layer_matrices for layers, kind in self.kinds)

    @functools.cached_property
    def parameters(self) -> int:
        """Number of all parameters."""
        head = 0 if self.tied else self.embedding_parameters
        within = sum(layers * kind.layer_parameters for layers, kind in self.kinds)
        return self.embedding_parameters + head + within + self.beside

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token passes through; idle experts do not count."""
        return self.parameters - self.matrix_parameters + round(self.layers * self.active_matrices)

    def attended(self, sequence: int) -> float:
        """Return how many of `sequence` tokens a query meets, in the mean over all layers and without causality.

        A sliding window counts twice: causality halves full attention and not a window. Linear attention meets none.
        """
        seen = sum(min(sequence, 2 * window) for window in self.windows)
        return (seen + sequence * (self.layers - len(self.windows) - self.linear)) / self.layers

    def flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs of a training step per token (PaLM, appendix B) in rows of `sequence` tokens.

        A layer of linear attention counts 3 times DeltaNet.flops in place of attention's products.
        """
        # A tied head multiplies too, so only the embedding look-up is left out.
        matmul = self.active_parameters - (0 if self.tied else self.embedding_parameters)
        attention = 6.0 * self.layers * (self.q_width + self.output_width) * self.attended(sequence)
        return 6.0 * matmul + attention + 3 * self.linear * (self.delta.flops if self.delta else 0)


def problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, sentence) for what a recipe asks and its model's layers lack. UserError for an unfit type."""
    model, config = recipe.model, config_of(recipe.model)
    refusals.check_admitted(config)
    shape = of_config(config, 1)
    if model.hidden_size % model.heads and shape.head_size == model.hidden_size // model.heads:
        yield "model.heads", f"{model.heads} heads do not divide hidden_size {model.hidden_size}"
    elif shape.head_size % 2:
        yield "model.heads", f"head size {shape.head_size} is odd; RoPE rotates pairs"
    if (shape.has_sinks or shape.linear) and recipe.sft is not None and recipe.sft.hide_eos:
        kind = "attention with sinks takes none here" if shape.has_sinks else "the state of linear attention knows none"
        yield "sft.hide_eos", f"tokens are hidden by a mask, and {kind}"
    if shape.linear == shape.layers:  # transformers' generation counts the tokens of a cache by its keys
        yield "model.layers", "all layers have linear attention, and generated text needs a layer of full attention"
    if shape.linear and recipe.grpo is not None and recipe.grpo.engine != "transformers":
        yield "grpo.engine", f"{recipe.grpo.engine} was not tried with layers of linear attention: leave it out"
    if recipe.stage == "reward" and not traits.record_of(config).rewards:
        yield "stage", f"transformers has no reward model of type {config['model_type']}"
    if recipe.lora is None:
        return
    named = {part for name in shape.adaptable for part in (name, *STANDS_FOR.get(name, ()))}
    if lost := [name for name in recipe.lora.targets if name not in named]:
        yield "lora.targets", f"the model's layers have no {', '.join(lost)}, but {', '.join(shape.adaptable)}"
    if is_quantized(recipe) and shape.experts[0]:
        yield "lora.quantize", "nf4 packs linear layers, and the experts of this model are none; use none"


def of(recipe: Recipe, vocab_size: int | None = None) -> ModelShape:
    """Return the shape of a recipe's model; `vocab_size` fills in `auto`, else the recipe's tokenizer size does.

    Raises UserError for a model type that is not admitted, or an unknown vocabulary.
    """
    model = recipe.model
    vocab = model.vocab_size if model.vocab_size != "auto" else vocab_size or recipe.tokenizer.pieces
    if vocab is None:
        raise UserError(
            "model.vocab_size is auto and the tokenizer is a file that is not read before `prepare`",
            fix="write model.vocab_size, or run `finlm prepare` first",
        )
    return of_config(config_of(model), vocab)


def of_config(config: traits.Config, vocab: int, row: traits.TypeRecord | None = None) -> ModelShape:
    """Return the shape of the model of a complete config.json, with `vocab` rows of embedding and head.

    `row` is the record of its model type; None looks it up. Raises UserError for an unknown type.
    """
    read = traits.read(config, row)
    shared = {field.name: getattr(read, field.name) for field in dataclasses.fields(traits.LayerSizes)}
    return ModelShape(
        **shared,
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        vocab=vocab,
        tied=bool(config["tie_word_embeddings"]),
        outer=read.outer,
        dense=len(read.dense),
        linear=len(read.linear),
        keeps_scores=read.score_cap is not None,
    )


NF4_BYTES = 0.5 + 1 / 64 + 4 / 64 / 256  # a weight in 4 bits; an 8-bit scale for 64, and a factor for 256 of those


def layout(recipe: Recipe, shape: ModelShape) -> dict[str, Any]:
    """Return the keyword arguments of memory.Layout that follow from the recipe's stage and adapters.

    DPO needs no second model: the reference's log-probabilities are computed before training starts.
    """
    grpo = recipe.grpo
    fields: dict[str, Any] = {
        "sequences": recipe.sequences_per_row,
        "has_documents": recipe.data.document_masks,
        # With adapters the reference is the model without them.
        "has_reference": grpo is not None and grpo.beta > 0 and recipe.lora is None,
        "has_judge": grpo is not None and any(term.rule == "model" for term in grpo.reward),
        "has_vocabulary_head": recipe.stage != "reward",
    }
    if grpo is not None:
        fields |= {
            "answer_tokens": grpo.max_new_tokens,
            "answers_a_prompt": grpo.generations,
            "updates": grpo.iterations,
        }
        # The reward model, the reference, the model itself where it will have moved on by the last update; its values.
        fields["scorings"] = fields["has_judge"] + (grpo.beta > 0) + (grpo.iterations > 1) + (grpo.form == "ppo")
    if recipe.lora is not None:
        fields["trainable"] = adapter_parameters(recipe, shape)
        fields |= {
            "adapted": tuple(adapted(recipe, shape)),
            "rank": recipe.lora.rank,
            "has_dropout": has_dropout(recipe),
        }
        if is_quantized(recipe):
            matrices = shape.matrix_parameters
            fields["weight_bytes"] = (NF4_BYTES * matrices + 2 * (shape.parameters - matrices)) / shape.parameters
    return fields


def has_dropout(recipe: Recipe) -> bool:
    """Return whether adapters drop inputs; trl's DPO switches all dropout off (disable_dropout)."""
    return recipe.lora is not None and recipe.lora.dropout > 0 and recipe.stage != "dpo"


def is_quantized(recipe: Recipe) -> bool:
    """Return whether frozen weights are kept in 4 bits (lora.quantize: nf4), which DeepSpeed does not partition."""
    return recipe.lora is not None and recipe.lora.quantize == "nf4"


def frozen_parameters(shape: ModelShape, has_adapters: bool, quantized: bool) -> int:
    """Return how many frozen parameters a checkpoint holds: 0 without adapters; `quantized` matrices are not saved."""
    return has_adapters * (shape.parameters - quantized * shape.matrix_parameters)


def adapter_parameters(recipe: Recipe, shape: ModelShape) -> int:
    """Return the parameters of all adapters: rank x (inputs + outputs) a layer (arXiv 2106.09685); 0 without lora."""
    if recipe.lora is None:
        return 0
    names = adapted(recipe, shape)
    of_layers = (layers * sum(kind.matrices[n]) for layers, kind in shape.kinds for n in names if n in kind.matrices)
    return recipe.lora.rank * sum(of_layers)


def adapted(recipe: Recipe, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return {name: (inputs, outputs)} of a decoder layer's linear layers that get an adapter; empty without lora."""
    targets = recipe.lora.targets if recipe.lora else ()
    return {
        name: sides
        for name, sides in shape.adaptable.items()
        if name in targets or any(part in targets for part in STANDS_FOR.get(name, ()))
    }
