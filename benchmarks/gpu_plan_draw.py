"""Configurations that nobody chose: `drawn(seed, count)` for one GPU, and the random data that such a run reads.

Vocabularies of 32 to 152 thousand, grouped queries, tied heads or not, rows of 1 to 32 thousand tokens, every stage,
adapters with and without dropout and in 4 bits, every offload; what a recipe may leave open is left to the planner.
Widths and feed-forward sizes are those of models that exist or between them. Depth: that of such models where their
states fit a GPU or its host in a few seconds, else a part of it, and the case's name says so (`cut`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from finlm.base import files

BOS, EOS = 1, 2
WIDTHS = {
    1024: (16, 24),
    1536: (12, 28),
    2048: (16, 24),
    2560: (20, 32),
    3072: (24, 28),
    4096: (32, 32),
    5120: (40, 40),
}
VOCABULARIES = (32_000, 39_438, 49_152, 64_000, 92_544, 100_352, 128_256, 151_936)
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
STAGES = {"pretrain": 7, "sft": 7, "dpo": 3, "reward": 2, "grpo": 1}
MOST_PARAMETERS = {"none": 3.2e9, "host": 2.2e9, "frozen": 7.5e9}  # more would take too long to set up
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEP_FLOPS = (1.5e14, 4e14)  # of an optimizer step: a third of a second to one on a Hopper
DOCUMENT_TOKENS = 1000  # of a text or a dialogue, on average, with exponential lengths
PAIRS = ("dpo", "reward")
# Width, layers, heads, key heads, feed-forward size, vocabulary, tied or not, what else config.json says.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "qwen3-4b": (2560, 36, 32, 8, 9728, 151_936, True, {"model_type": "qwen3", "head_dim": 128}),
    "qwen2.5-7b": (3584, 28, 28, 4, 18_944, 152_064, False, {"model_type": "qwen2"}),
    "gemma3-1b": (
        1152,
        26,
        4,
        1,
        6912,
        262_144,
        True,
        {"model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512},
    ),
    "olmo2-1b": (2048, 16, 16, 16, 8192, 100_352, False, {"model_type": "olmo2"}),
    "smollm3-3b": (2048, 36, 16, 4, 11_008, 128_256, True, {"model_type": "smollm3"}),
    "glm4-9b-cut": (4096, 32, 32, 2, 13_696, 151_552, False, {"model_type": "glm4", "partial_rotary_factor": 0.5}),
    "qwen3-8b": (4096, 36, 32, 8, 12_288, 151_936, False, {"model_type": "qwen3", "head_dim": 128}),
    "llama3.2-3b": (3072, 28, 24, 8, 8192, 128_256, True, {"model_type": "llama", "head_dim": 128}),
    "qwen3-30b-a3b-cut": (
        2048,
        8,  # of 48, which take the memory of several GPUs
        32,
        4,
        6144,
        151_936,
        False,
        {
            **{"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 768, "norm_topk_prob": True},
        },
    ),
}
SIZES = ("hidden_size", "layers", "heads", "kv_heads", "ffn_size", "vocab_size", "tie_embeddings")

Values = dict[str, Any]


def drawn(seed: int, count: int) -> list[Values]:
    """So many recipes' values; `name` is `seed-number-...` and tells them apart."""
    return [_recipe(random.Random(f"{seed}/{number}"), f"{seed}-{number:02d}") for number in range(count)]


def of_models() -> list[Values]:
    """Pretraining of models that people start from, by their config.json (PUBLISHED)."""
    return [
        {
            "name": name,
            "stage": "pretrain",
            "hardware": {"hosts": [{"name": "localhost", "slots": 1}]},
            "model": dict(zip(SIZES, sizes, strict=True)) | {"config": config},
            "tokenizer": {"path": "tokenizer.model"},
            "data": {"sources": "none.jsonl", "document_masks": False},
            "batch": {"sequence_length": 4096, "tokens_per_step": 32_768},
            "optim": {"lr": 1e-5, "schedule": "constant", "warmup_steps": 0},
            "train": {"steps": 10_000},
            "checkpoint": {"every_steps": None},
            "eval": {"every_steps": None},
        }
        for name, (*sizes, config) in PUBLISHED.items()
    ]


def published_overrides() -> dict[str, tuple[str, ...]]:
    """Return by name the `--set` options that give a recipe the model of PUBLISHED, in rows of 4,096 tokens."""
    return {
        name: (
            *(f"model.{key}={json.dumps(value)}" for key, value in zip(SIZES, sizes, strict=True)),
            f"model.config={json.dumps(config)}",
            "batch.sequence_length=4096",
        )
        for name, (*sizes, config) in PUBLISHED.items()
    }


def of_rollouts() -> list[Values]:
    """GRPO and PPO of published shapes: 64 prompts of 256 tokens with 8 answers of 512, and others of about that work.

    `world` is synthetic-world-100m/grpo.yaml with answers of full length.
    """
    lora = {"rank": 16, "alpha": 32, "dropout": 0.0, "targets": list(ALL_TARGETS), "quantize": "none"}
    ppo = {"form": "ppo"}
    cases: list[tuple[str, tuple[Any, ...], int, int, int, Values]] = [
        ("qwen2.5-1.5b", (1536, 28, 12, 2, 8960, 151_936, True), 768, 512, 512, {}),
        ("llama3.2-1b", (2048, 16, 32, 8, 8192, 128_256, True), 1024, 256, 256, {}),
        ("qwen2.5-3b-lora", (2048, 36, 16, 2, 11_008, 151_936, True), 1536, 128, 1024, {"lora": lora}),
        ("qwen2.5-1.5b-ppo", (1536, 28, 12, 2, 8960, 151_936, True), 768, 256, 512, {"grpo": ppo}),
        ("world", (768, 12, 12, 12, 2304, 8192, False), 384, 512, 256, {}),
    ]
    return [
        {
            "name": f"{name}-{rows}x{length}",
            "stage": "grpo",
            "hardware": {"hosts": [{"name": "localhost", "slots": 1}]},
            "model": dict(zip(SIZES, sizes, strict=True)),
            "tokenizer": {"path": "tokenizer.model"},
            "data": {"sources": "none.jsonl"},
            "batch": {"sequence_length": length, "tokens_per_step": rows * length},
            "optim": {"lr": 1e-6, "schedule": "constant", "warmup_steps": 0},
            "train": {"steps": 10_000},
            "checkpoint": {"every_steps": None},
            "eval": {"every_steps": None},
            **more,
            "grpo": {"generations": 8, "max_new_tokens": answer} | more.get("grpo", {}),
        }
        for name, sizes, length, rows, answer, more in cases
    ]


def _recipe(dice: random.Random, name: str) -> Values:
    stage = dice.choices(list(STAGES), STAGES.values())[0]
    lora = _adapters(dice, stage) if stage in ("sft", "dpo", "grpo") and dice.random() < 0.5 else None
    offload = dice.choices(("auto", "stream", "cpu", "both"), (14, 2, 2, 1))[0]
    if lora is not None and stage == "grpo":
        lora["quantize"] = "none"  # it would write for minutes
    is_packed = lora is not None and lora["quantize"] == "nf4"
    offload = "auto" if is_packed and offload == "both" else offload
    model, full = _model(dice, "frozen" if lora else "none" if offload == "auto" else "host")
    length = dice.choice(LENGTHS[: 4 if stage in PAIRS else 2 if stage == "grpo" else 6])
    words = [name, stage, f"{model['hidden_size']}x{model['layers']}", "" if full else "cut", f"T{length}"]
    words += [f"{lora['quantize']}-lora{lora['dropout']:g}"] if lora else []
    words += [offload] if offload != "auto" else []
    values: Values = {
        "name": "-".join(word for word in words if word).lower(),
        "stage": stage,
        "hardware": {"hosts": [{"name": "localhost", "slots": 1}]},
        "model": model,
        "tokenizer": {"path": "tokenizer.model"},
        "data": {"sources": "none.jsonl"},
        "batch": {"sequence_length": length, "tokens_per_step": _tokens(dice, model, length, stage, bool(lora))},
        "optim": {"lr": 1e-5, "schedule": "constant", "warmup_steps": 0},
        "train": {"steps": 10_000},
        "zero": {"offload_optimizer": {"both": "cpu"}.get(offload, offload), "offload_param": "auto"},
        "checkpoint": {"every_steps": None},
        "eval": {"every_steps": None},
    }
    if offload == "both":
        values["zero"] |= {"stage": 3, "offload_param": "cpu"}
    if stage == "pretrain":
        values["data"]["document_masks"] = dice.random() < 0.4
    if stage == "pretrain" and offload == "auto" and dice.random() < 0.12:
        values["train"]["precision"] = "fp8"
    if lora is not None:
        values["lora"] = lora
    if stage == "grpo":
        values["grpo"] = {"generations": 8, "max_new_tokens": dice.choice((64, 256, 512))}
    return values


def _model(dice: random.Random, kind: str) -> tuple[Values, bool]:
    """The model section, and whether it has the depth of its width."""
    hidden = dice.choice(list(WIDTHS))
    heads, depth = WIDTHS[hidden]
    vocab, tied = dice.choice(VOCABULARIES), hidden <= 3072 and dice.random() < 0.5
    ffn = round(hidden * dice.uniform(2.6, 4.0) / 256) * 256
    kv_heads = dice.choice([n for n in (heads, heads // 2, heads // 4, 8, 4) if n >= 1 and heads % n == 0])
    layer = 2 * hidden * hidden * (1 + kv_heads / heads) + 3 * hidden * ffn
    fitting = int((MOST_PARAMETERS[kind] - (2 - tied) * vocab * hidden) // layer)
    layers = max(2, min(depth, fitting))
    shape = {"hidden_size": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn_size": ffn}
    return shape | {"vocab_size": vocab, "tie_embeddings": tied}, layers == depth


def _adapters(dice: random.Random, stage: str) -> Values:
    targets = dice.choice([ALL_TARGETS, ALL_TARGETS, ALL_TARGETS[:4], ("q_proj", "v_proj")])
    rank, dropout = dice.choice((8, 16, 64)), dice.choice((0.0, 0.05, 0.1))
    quantize = "nf4" if dice.random() < 0.35 else "none"
    return {"rank": rank, "alpha": 2 * rank, "dropout": dropout, "targets": list(targets), "quantize": quantize}


def _tokens(dice: random.Random, model: Values, length: int, stage: str, is_lora: bool) -> int:
    """Tokens of a step: whole rows of about STEP_FLOPS."""
    hidden, kv = model["hidden_size"], model["hidden_size"] // model["heads"] * model["kv_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * model["ffn_size"]
    flops = 6 * (model["layers"] * layer + model["vocab_size"] * hidden) + 6 * model["layers"] * hidden * length
    rows = round(dice.uniform(*STEP_FLOPS) * (1.3 if is_lora else 1.0) / flops / length)
    rows = max(8, rows // 8 * 8) if rows > 12 or stage == "grpo" else max(1, rows)
    return int(length * min(256, rows))


def write(directory: Path, values: Values, steps: int, rows: int) -> None:
    """The random tokens that so many steps of so many rows read. Every eighth row is three quarters full."""
    length = values["batch"]["sequence_length"] - values.get("grpo", {}).get("max_new_tokens", 0)
    _write_shards(directory / "shards", values["stage"], values["model"]["vocab_size"], length, steps * rows)


def write_start(directory: Path, model: Values) -> Path:
    """A start without weights: configuration and tokenizer."""
    write_tokenizer(directory)
    names = {"hidden_size": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    names |= {"kv_heads": "num_key_value_heads", "ffn_size": "intermediate_size", "vocab_size": "vocab_size"}
    about = {theirs: model[ours] for ours, theirs in names.items()}
    about |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 32_768}
    about |= {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": model["tie_embeddings"]}
    about |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    files.write_json(directory / "config.json", about)
    return directory


def _write_shards(directory: Path, stage: str, vocab: int, length: int, rows: int) -> None:
    dice, dtype = np.random.default_rng(0), "uint16" if vocab <= 65536 else "uint32"
    lengths = np.array(list(_lengths(stage, length, rows, dice)))
    ids = dice.integers(3, vocab, int(lengths.sum())).astype(f"<{dtype[0]}{2 if dtype == 'uint16' else 4}")
    ends = np.concatenate(([0], np.cumsum(lengths))).astype("<u8")
    ids[ends[:-1].astype(int)], ids[ends[1:].astype(int) - 1] = BOS, EOS
    (directory / "train").mkdir(parents=True)
    if stage in PAIRS:  # both answers have one prompt
        for number in range(0, len(lengths), 2):
            first, second, stop = (int(ends[number + n]) for n in range(3))
            prompt = min(second - first, stop - second) // 2
            ids[second : second + prompt] = ids[first : first + prompt]
    ids.tofile(directory / "train/random-00000.bin")
    ends.tofile(directory / "train/random-00000.idx")
    halves = [np.arange(size) >= (size if stage == "grpo" else size // 2) for size in lengths]
    np.concatenate(halves).astype(np.uint8).tofile(directory / "train/random-00000.mask")
    counts = {"tokens": len(ids), "documents": len(lengths), "text_bytes": 3 * len(ids), "learnt": len(ids) // 2}
    facts = {"dtype": dtype, "vocab_size": vocab, "bos_id": BOS, "eos_id": EOS, "end_of_turn_id": EOS, "add_bos": True}
    shard = {"source": "random", "split": "train", "file": "train/random-00000.bin", **counts}
    facts |= {"stage": stage, "encoder": "tokenizers", "shards": [shard], "totals": {"train": {"random": counts}}}
    files.write_json(directory / "manifest.json", facts)
    if stage == "grpo":
        template = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
        files.write_text(directory / "chat_template.jinja", template)
    write_tokenizer(directory / "tokenizer")


def _lengths(stage: str, length: int, rows: int, dice: Any) -> Iterator[int]:
    """Tokens of every document: of a text, a dialogue, an answer with its prompt, a prompt."""
    for number in range(rows):
        if stage in PAIRS:
            longest = length // 2
            yield longest
            yield longest * 3 // 4 if number % 8 == 3 else longest
        elif stage == "grpo":
            yield length - (number // 8 % 4) * 8
        else:
            left = length + (stage == "pretrain")
            while left:
                size = min(left, 64 + int(dice.exponential(DOCUMENT_TOKENS - 64)))
                size = size if left - size > 64 else left
                yield size
                left -= size


def write_tokenizer(directory: Path) -> None:
    """A tokenizer that transformers opens; no text is encoded."""
    words = {"<unk>": 0, "<s>": BOS, "</s>": EOS}
    special = [
        {"id": n, "content": word, "special": True}
        | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for word, n in words.items()
    ]
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    directory.mkdir(parents=True, exist_ok=True)
    files.write_json(
        directory / "tokenizer.json",
        {"version": "1.0", **dict.fromkeys(parts), "added_tokens": special, "model": model},
    )
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    files.write_json(directory / "tokenizer_config.json", about)
