"""Open any model to be examined, talked to or exported: a checkpoint, a run, an export, a Hugging Face directory.

A run stands for its export, which is proved equal to its last checkpoint, and before there is an export for its newest
checkpoint. On CPUs without bf16 instructions half precisions are computed in fp32, ten times faster there. A GGUF file
of the llama architecture is first converted to a model directory with weights in bf16 (`finlm import-gguf`).

Names of the Hugging Face Hub are not accepted, and no code of a model directory is executed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedConfig,
)
from transformers.initialization import no_init_weights

from finlm.base import checkpoints, files, runs
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, run_of
from finlm.base.runs import complete_checkpoint, newest_checkpoint, run_of_checkpoint
from finlm.plan.plan import Plan
from finlm.recipe import parents
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import is_quantized
from finlm.rows.shards import Shards
from finlm.train.model.causal_lm import (
    DTYPES,
    VOCABULARY,
    causal_class,
    load_weights,
    model_config,
    plain_attention,
    start_config,
)
from finlm.train.post import start
from finlm.train.post.start import padding_id
from finlm.train.zero import storage

transformers.utils.logging.disable_progress_bar()  # files of a second; a bar each would bury what the user reads
_SAMPLES, _SAMPLE_BYTES = 64, 65_536  # of each weight file, for the fingerprint


@dataclass(frozen=True)
class Opened:
    """A model on its device, with its tokenizer of transformers. `run` and `step` are None outside of a run."""

    model: Any
    tokenizer: Any
    name: str  # for people
    fingerprint: str  # of weights, tokenizer and precision
    context: int  # tokens
    eos_ids: tuple[int, ...]  # any of them ends an answer
    run: RunDir | None
    step: int | None

    @property
    def device(self) -> torch.device:
        """The device of the model, where inputs must be."""
        return torch.device(self.model.device)


def open_model(path: Path) -> Opened:
    """Open the model of a checkpoint, run, export or Hugging Face directory, on a GPU if any, in evaluation mode.

    For a run, opens its export if there is one, else its newest checkpoint. Compares hashes where finlm wrote them.
    Raises UserError when there is no model, when it is damaged or cannot be loaded, or is a reward model; RuntimeError
    when a checkpoint's weights do not fit the model.
    """
    run = run_of(path)
    if (path / "plan.json").is_file():
        newest = RunDir(path)
        path = newest.export if (newest.export / "config.json").is_file() else newest_checkpoint(newest)
    if path.parent.name == "checkpoints":
        return _open_checkpoint(path)
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} holds no model",
            evidence="no config.json in it" if path.is_dir() else "no such directory",
            fix="give runs/<run>, runs/<run>/checkpoints/step-N, or a model directory in Hugging Face format",
        )
    return _open_directory(path, run)


def generate(opened: Opened, rows: Sequence[Sequence[int]], max_tokens: int, **settings: Any) -> list[list[int]]:
    """Return the ids that the model writes after each row of ids, at most `max_tokens`, by greedy decoding.

    `settings` are further arguments of transformers' generate(). Answers may have padding behind their end token.
    Raises ValueError without rows.
    """
    # Padded on the left, so that every answer begins in the same column.
    width, pad = max(map(len, rows)), next(iter(opened.eos_ids), 0)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=opened.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=opened.device)
    plain = dict.fromkeys(("temperature", "top_p", "top_k"))  # else those of the model's generation_config.json
    ends = {"eos_token_id": list(opened.eos_ids) or None, "pad_token_id": pad}
    with torch.inference_mode():
        out = opened.model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, **plain, **ends, **settings
        )
    written: list[list[int]] = out[:, width:].tolist()
    return written


def _open_checkpoint(path: Path) -> Opened:
    """Open a run's checkpoint. UserError for a reward model or a damaged one, RuntimeError if weights do not fit."""
    loaded = load_trained(path)
    if loaded.recipe.stage == "reward":
        raise _reward_model_error(path)
    length = loaded.model.config.max_position_embeddings
    tokenizer = start.run_tokenizer(loaded.shards, loaded.recipe.tokenizer.add_bos, length)
    manifest = files.read_json(path / "manifest.json")
    name, fingerprint = f"{loaded.run.path.name}/{path.name}", [manifest, str(loaded.model.dtype)]
    return _make_opened(loaded.model, tokenizer, name, fingerprint, loaded.run, int(manifest["step"]))


def _reward_model_error(path: Path) -> UserError:
    """Return, without raising it, the UserError for the reward model at `path` that is asked for text."""
    return UserError(
        f"{path} is a reward model: it says how good a text is, and writes none",
        fix="give the model that it started from, or one that was trained with its rewards",
    )


def _open_directory(path: Path, run: RunDir | None) -> Opened:
    """Open a Hugging Face directory. Raises UserError when it is damaged, cannot be loaded or is a reward model.

    With `run`, the directory is its export, and the step is that of the run's newest checkpoint.
    """
    fix = "give a complete directory: config.json, safetensors and the tokenizer's files"
    runs.prove_model(path)
    try:
        if parents.is_reward_model(files.read_json(path / "config.json")):  # as a writer, its head would be random
            raise _reward_model_error(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        config = start_config(path)
        given: dict[str, Any] = {"config": config, "dtype": "auto", "attn_implementation": plain_attention(config)}
        model = load_weights(AutoModelForCausalLM, path, fix, **given)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise UserError(
            f"transformers cannot load {path}", evidence=" ".join(str(error).split())[:300], fix=fix
        ) from None
    name = f"{run.path.name}/{path.name}" if run else path.resolve().name
    step = max((step for step, _ in run.complete_checkpoints()), default=None) if run else None
    fingerprint = [_fingerprint(path), str(model.dtype)]
    return _make_opened(model, tokenizer, name, fingerprint, run, step)


def _make_opened(
    model: Any, tokenizer: Any, name: str, identity: list[Any], run: RunDir | None, step: int | None
) -> Opened:
    """Move the model to a GPU if any, in evaluation mode; return its Opened, with a hash of `identity`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    slow_halves = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    model = model.to(device, torch.float32 if slow_halves else model.dtype).eval()
    context = int(getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length)
    listed = model.generation_config.eos_token_id
    ids = (*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id)
    ends = tuple(dict.fromkeys(number for number in ids if number is not None and number >= 0))
    return Opened(model, tokenizer, name, files.sha256_json(identity), context, ends, run, step)


def _fingerprint(path: Path) -> str:
    """Return the sha256 of a model directory's weights (large ones: samples), configuration and tokenizer files."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        is_read = file.suffix in (".json", ".safetensors", ".bin", ".model", ".jinja")
        if not file.is_file() or not is_read or file.name == checkpoints.MODEL_MANIFEST:
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        is_large = size > _SAMPLES * _SAMPLE_BYTES
        with file.open("rb") as opened:
            for number in range(_SAMPLES if is_large else 1):
                opened.seek(number * (size // _SAMPLES))
                digest.update(os.read(opened.fileno(), _SAMPLE_BYTES if is_large else size))
    return digest.hexdigest()


@dataclass(frozen=True)
class Trained:
    """A checkpoint's model, with the run, recipe, plan and shards that it was made from."""

    run: RunDir
    recipe: Recipe
    plan: Plan
    shards: Shards
    model: Any
    checkpoint: Path


def load_trained(checkpoint: Path) -> Trained:
    """Load a checkpoint, or the newest of a run, on the CPU; return its model with run, recipe, plan and shards.

    The model is in evaluation mode, a sequence classifier for reward runs, with adapters merged, in the run's
    precision. Compares the files' hashes. Raises UserError when the checkpoint is incomplete or damaged, or the
    model.init_from of lora.quantize is gone; RuntimeError when the weights do not fit the model.
    """
    checkpoint = complete_checkpoint(checkpoint)
    run = run_of_checkpoint(checkpoint)
    plan, recipe = Plan.read(run.plan), recipes.load(run.recipe).recipe
    shards = Shards(run.shards)
    config = _saved_config(checkpoint, plan) or model_config(recipe, plan, shards.bos_id, shards.eos_id)
    config.use_cache = True  # off in training, needed to generate
    kind = causal_class(config)
    if recipe.stage == "reward":
        kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        config.num_labels, config.pad_token_id = 1, padding_id(shards)
    with no_init_weights():  # drawing weights that are read next takes minutes of one core for 6B
        model = kind._from_config(config, attn_implementation=plain_attention(config), dtype=DTYPES[plan.precision])
    # The fp32 master copy where ZeRO keeps it: what the last step left, not a second rounding of it.
    weights = read_weights(checkpoint, plan)
    if recipe.lora is not None:
        if is_quantized(recipe):
            matrices = start.load_matrices(recipe, DTYPES[plan.precision])
            weights |= {f"base_model.model.{name}": matrix for name, matrix in matrices.items()}
        weights = start.merge_adapters(weights, recipe)
    weights.pop("value_head.weight", None)  # of grpo.form: ppo; it judges, and writes nothing
    for name in VOCABULARY:  # without the rows that padded it
        if name in weights:
            weights[name] = weights[name][: plan.vocab_size]
    has_own_head = not recipe.model.tie_embeddings or recipe.stage == "reward"
    if not has_own_head:
        weights.pop("lm_head.weight", None)
    _match_buffers(model, weights)
    missing, unknown = model.load_state_dict(weights, strict=False)
    if missing != ([] if has_own_head else ["lm_head.weight"]) or unknown:
        raise RuntimeError(f"{checkpoint} is not of this model: without {missing}, with {unknown}")
    model.tie_weights()
    if recipe.stage != "reward":
        # An assistant ends its turn with the template's token, a base model a document with its own.
        known = dict.fromkeys((shards.manifest.get("end_of_turn_id", shards.eos_id), shards.eos_id))
        ends = [number for number in known if number >= 0]  # -1: a tokenizer without an end
        model.generation_config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    return Trained(run, recipe, plan, shards, model.eval(), checkpoint)


def _match_buffers(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Cast each buffer of the model, in place, to the dtype of the weight of its name; a router's is always fp32."""
    for name, buffer in model.named_buffers():
        if name in weights:
            buffer.data = buffer.data.to(weights[name].dtype)


def _saved_config(checkpoint: Path, plan: Plan) -> PreTrainedConfig | None:
    """Return the trained configuration, vocabulary unpadded; None if an older finlm saved none. Raises as load()."""
    file = checkpoint / "loop_rank_0.pt"
    values = storage.load(file).get("config") if file.is_file() else None
    if values is None:
        return None
    values.pop("_name_or_path", None)  # a path of the machine that trained
    return AutoConfig.for_model(**values | {"vocab_size": plan.vocab_size})


def step_of(checkpoint: Path) -> int:
    """Return the step of a directory step-N, from its name. Raises ValueError for another name."""
    return int(checkpoint.name.removeprefix("step-"))


def read_weights(checkpoint: Path, plan: Plan) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors on the CPU by their names in training; adapters are not merged.

    Those of ZeRO are fp32, except frozen ones. Raises UserError when a file or the manifest is not finlm's,
    FileNotFoundError when a rank's shard is missing.
    """
    if plan.zero_stage == 0:
        module: dict[str, torch.Tensor] = storage.load(checkpoint / "mp_rank_00_model_states.pt")["module"]
        return module
    return storage.Shards(checkpoint, Manifest.read(checkpoint)).weights()


# Of the fields llama.*: what transformers carries over, what may have only values that change nothing, and what says
# nothing about the function. Any other field may be one of a later llama.cpp that changes it.
_CARRIED = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "rope.freq_base"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
)
_NEEDED = tuple(key for key in _CARRIED if key not in ("vocab_size", "rope.freq_base", "attention.head_count_kv"))
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{"rope.scaling.type": ("none",), "rope.scaling.factor": (1,), "rope.scaling.attn_factor": (1,)},
    **{"rope.scale_linear": (1,), "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1)},
    **{"expert_count": (0,), "expert_used_count": (0,), "pooling_type": (0,), "use_parallel_residual": (False,)},
    **{"attention.causal": (True,), "attention.scale": (0,)},
    **{"attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,)},
    **{"hidden_activation": ("silu", "swish"), "hidden_act": ("silu", "swish")},
}
_SILENT = ("tensor_data_layout", "rope.scaling.finetuned")
_WHOLE = ("token_embd.weight", "output_norm.weight")
_LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def import_gguf(file: Path, out: Path) -> Path:
    """Write the model of the GGUF file `file` to the new directory `out`, in bf16 with finlm.json; return `out`.

    Raises UserError when `out` exists, the package gguf is missing, or the file cannot be read or holds no plain Llama.
    """
    if out.exists():
        raise UserError(f"{out} exists already", fix="give a new directory")
    if importlib.util.find_spec("gguf") is None:
        raise UserError("the package gguf is missing", fix=".venv/bin/pip install -r requirements-gguf.lock")
    if not file.is_file() or file.open("rb").read(4) != b"GGUF":
        raise UserError(f"{file} is not a GGUF file", evidence="it does not begin with GGUF" if file.is_file() else "")
    _check_gguf(file)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # a cut or garbled file ends the reader anywhere: struct.error, MemoryError, ValueError
        raise _unreadable_error(file, error) from None
    if not isinstance(loaded, LlamaForCausalLM):
        raise UserError(f"{file} is not a Llama model", evidence=f"model type {loaded.config.model_type}")
    for name in ("bos_token", "eos_token", "pad_token"):
        # The configuration has the numbers of the file; transformers 5.17 ends with the token it begins with.
        if (number := getattr(loaded.config, f"{name}_id")) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)  # transformers refuses to save a model that it calls quantised
    # A plain model with the same weights; bf16 holds more digits than the quantised ones had.
    plain = LlamaForCausalLM._from_config(type(loaded.config)(**settings), dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    with files.new_directory(out) as directory:
        plain.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        runs.seal_model(directory, source=file.name)
    return out


def _unreadable_error(file: Path, error: Exception) -> UserError:
    """Return, without raising it, the UserError for a GGUF file whose reader raised `error`."""
    return UserError(
        f"{file} cannot be read",
        evidence=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
        fix="fetch it again and compare its size with the source's; it must hold a Llama model",
    )


def _check_gguf(file: Path) -> None:
    """Raise UserError for a GGUF file that holds anything but a plain Llama, or cannot be read."""
    try:
        from gguf import GGUFReader

        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        tensors = {tensor.name: tensor.data for tensor in reader.tensors}
        problems = list(gguf_differences(fields, tensors))
    except Exception as error:
        raise _unreadable_error(file, error) from None
    if problems:
        raise UserError(
            f"{file} is not a Llama model that finlm can carry over",
            evidence="\n".join(problems[:10]),
            fix="import a plain Llama without RoPE scaling, experts, biases or a window, in one file",
        )


def gguf_differences(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each metadata field or tensor that keeps a GGUF file from being a plain Llama; none if it is.

    Another architecture, missing fields and fields that differ by layer each end the list.
    """
    if (architecture := fields.get("general.architecture")) != "llama":
        yield f"architecture {architecture!r}, not 'llama'"
        return
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    missing = [key for key in _NEEDED if llama.get(key) is None]
    yield from (f"llama.{key} is missing" for key in missing)
    if missing:
        return
    lists = [key for key in llama if isinstance(llama[key], list)]
    yield from (f"llama.{key}: {llama[key]}, another one for each layer" for key in lists)
    if lists:
        return
    width = llama["embedding_length"] / llama["attention.head_count"]
    sizes = dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), (width,))
    neutral = _NEUTRAL | sizes
    for key, value in llama.items():
        if key == "attention.sliding_window":
            is_plain = value == 0 or value >= llama["context_length"]
        else:
            is_plain = key in (*_CARRIED, *_SILENT) or value in neutral.get(key, ())
        if not is_plain:
            yield f"llama.{key}: {value!r}"
    if fields.get("split.count", 0) > 1:
        yield f"split.count: {fields['split.count']}, of which this is one file"
    layers = range(int(llama["block_count"]))
    needed = {*_WHOLE, *(f"blk.{layer}.{name}.weight" for layer in layers for name in _LAYER)}
    yield from (f"tensor {name} is missing" for name in sorted(needed - tensors.keys()))
    for name in sorted(tensors.keys() - needed - {"output.weight"}):
        if name != "rope_freqs.weight":
            yield f"tensor {name}, which a plain Llama does not have"
        elif not np.all(np.asarray(tensors[name]) == 1):
            yield "rope_freqs.weight: RoPE scaling of its own, as Llama 3.1's"
