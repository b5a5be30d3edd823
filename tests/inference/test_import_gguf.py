"""`finlm import-gguf`: the model that comes out computes what the file's does, or none comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from finlm.base.errors import UserError
from finlm.inference import open as opening

LAYERS, HEADS, KV_HEADS, WIDTH, FFN, PIECES = 2, 4, 2, 64, 96, 40
FIELDS = {
    **{"general.architecture": "llama", "general.name": "tiny", "tokenizer.ggml.model": "gpt2"},
    **{"llama.context_length": 128, "llama.embedding_length": WIDTH, "llama.block_count": LAYERS},
    **{
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
    },
    **{"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": WIDTH // HEADS},
    **{"llama.rope.freq_base": 10000.0, "llama.vocab_size": PIECES},
}
OF_LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
THEIRS = ["input_layernorm", "q", "k", "v", "o", "post_attention_layernorm", "gate", "up", "down"]
TENSORS = ["token_embd.weight", "output_norm.weight", "output.weight"]
TENSORS += [f"blk.{layer}.{name}.weight" for layer in range(LAYERS) for name in OF_LAYER]
Changes = dict[str, Any]


def check(changes: Changes, tensors: dict[str, Any] | None = None, without: str = "") -> str:
    """What is said against a file of these fields and tensors."""
    every = {name: np.zeros(1) for name in TENSORS if name != without} | (tensors or {})
    return "\n".join(opening.gguf_differences({**FIELDS, **changes}, every))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0, "llama.rope.scaling.finetuned": False},
        {"llama.attention.key_length": 16, "llama.attention.value_length": 16, "llama.attention.causal": True},
        {"llama.expert_count": 0, "llama.logit_scale": 1.0, "llama.attention.sliding_window": 128},
        {
            "llama.hidden_activation": "silu",
            "llama.tensor_data_layout": "Meta AI original pth",
            "llama.pooling_type": 0,
        },
        {"quantize.imatrix.file": "x", "general.license": "mit", "split.count": 0},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_what_changes_nothing_is_taken(changes: Changes) -> None:
    assert check(changes) == ""
    assert check(changes, {"rope_freqs.weight": np.ones(8)}) == ""
    assert check(changes, without="output.weight") == "", "a tied head"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.type: 'linear'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type: 'yarn'"),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear: 2.0"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: 8"),
        ({"llama.attention.key_length": 32}, "llama.attention.key_length: 32"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window: 64"),
        ({"llama.attention.causal": False}, "llama.attention.causal: False"),
        ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv: 8.0"),
        ({"llama.expert_count": 8}, "llama.expert_count: 8"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale: 0.5"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping: 30.0"),
        ({"llama.hidden_activation": "gelu"}, "llama.hidden_activation: 'gelu'"),
        ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count: [4, 2]"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.of_tomorrow": 3}, "llama.of_tomorrow: 3"),
        ({"split.count": 3}, "split.count: 3"),
        ({"general.architecture": "qwen2"}, "architecture 'qwen2'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_be_another_model_is_named(changes: Changes, said: str) -> None:
    assert said in check(changes)


@pytest.mark.parametrize(
    "name",
    [
        *("blk.0.attn_q.bias", "blk.1.attn_output.bias", "blk.0.ffn_up.bias", "blk.0.ffn_gate_inp.weight"),
        *("blk.0.attn_q_norm.weight", "output.bias", "rope_factors_long.weight", "blk.7.attn_q.weight"),
    ],
)
def test_tensors_that_a_llama_does_not_have_are_named(name: str) -> None:
    assert f"tensor {name}" in check({}, {name: np.zeros(1)})


def test_frequencies_of_their_own_are_named_and_so_is_what_is_missing() -> None:
    assert "rope_freqs.weight" in check({}, {"rope_freqs.weight": np.array([1.0, 8.0])})
    assert check({}, without="blk.1.ffn_up.weight") == "tensor blk.1.ffn_up.weight is missing"


def made(path: Path, rope: Changes, tied: bool, change: Callable[[Any], None] = lambda _: None) -> LlamaForCausalLM:
    """A model with these rotations, and the file that llama.cpp's converter would write of it."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS}
    shape = {"vocab_size": PIECES, "hidden_size": WIDTH, "intermediate_size": FFN, "max_position_embeddings": 128}
    config = LlamaConfig(**shape, **heads, rms_norm_eps=1e-5, rope_parameters=rope, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
            parameter.data = parameter.data.bfloat16().float()  # which the import keeps
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**FIELDS, "llama.rope.freq_base": rope["rope_theta"]}.items():
        if key not in ("general.architecture", "tokenizer.ggml.model"):
            {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    pieces = ["<unk>", "<s>", "</s>", *(chr(97 + number) for number in range(PIECES - 4)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types([3] * 3 + [1] * (PIECES - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    inner = dict(zip(OF_LAYER, THEIRS, strict=True))
    theirs = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    theirs |= {} if tied else {"lm_head.weight": "output.weight"}
    for layer in range(LAYERS):
        for name, ours in inner.items():
            block = "self_attn." if ours in "qkvo" else "" if "norm" in ours else "mlp."
            theirs[f"model.layers.{layer}.{block}{ours}{'' if 'norm' in ours else '_proj'}.weight"] = (
                f"blk.{layer}.{name}.weight"
            )
    for ours, name in theirs.items():
        writer.add_tensor(name, np.ascontiguousarray(_as_written(weights[ours], name)))
    change(writer)
    for finish in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        finish()
    return model


def _as_written(weight: Any, name: str) -> Any:
    """llama.cpp rotates neighbours where transformers rotates halves."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_the_imported_model_gives_the_logits_of_the_original(tied: bool, theta: float, tmp_path: Path) -> None:
    original = made(tmp_path / "tiny.gguf", {"rope_type": "default", "rope_theta": theta}, tied)
    imported = AutoModelForCausalLM.from_pretrained(
        opening.import_gguf(tmp_path / "tiny.gguf", tmp_path / "out"), dtype=torch.float32
    )
    ids = torch.randint(3, PIECES, (2, 128), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(imported(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)
    assert imported.config.tie_word_embeddings == tied


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_a_file_of_scaled_rotations_gives_no_model(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")

    def scale(writer: Any) -> None:
        if kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(4.0)
        else:
            writer.add_tensor("rope_freqs.weight", np.linspace(1, 32, WIDTH // HEADS // 2, dtype=np.float32))

    made(tmp_path / "tiny.gguf", {"rope_type": "default", "rope_theta": 10000.0}, False, scale)
    with pytest.raises(UserError, match="not a Llama model that finlm can carry over") as caught:
        opening.import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert ("rope.scaling.type: 'linear'" if kind == "linear" else "rope_freqs.weight") in caught.value.evidence
    assert not (tmp_path / "out").exists()
