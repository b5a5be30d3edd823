"""The text decoder of a model of more than text, in a directory as transformers saves it, is what trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from trl.trainer import grpo_trainer

import vocabularies
from finlm.base.errors import UserError
from finlm.inference import open as opening
from finlm.recipe import shape, weights
from finlm.recipe.models import config_json, traits
from finlm.recipe.schema import Model
from finlm.train.model import causal_lm
from finlm.train.post import start

VOCAB = 512
TEXT = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
SIGLIP = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 4},
}
PLACES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
# type of the whole, type that trains, text_config, vision_config
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (
        "qwen3_5_text",
        TEXT | DELTA | {"rope_parameters": PLACES | {"partial_rotary_factor": 1.0, "mrope_interleaved": True}},
        QWEN | {"num_position_embeddings": 16},
    ),
    "gemma3": ("gemma3_text", TEXT | {"sliding_window": 32}, SIGLIP),
    "mistral3": ("mistral", TEXT | {"model_type": "mistral"}, SIGLIP | {"model_type": "pixtral", "head_dim": 16}),
    "llava": ("llama", TEXT | {"model_type": "llama"}, SIGLIP | {"model_type": "siglip_vision_model"}),
    "qwen2_5_vl": ("qwen2", {**TEXT, "rope_parameters": PLACES}, QWEN),
    "qwen3_vl": (
        "qwen3",
        TEXT | {"rope_parameters": PLACES | {"mrope_interleaved": True}},
        QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
}


def make(name: str, directory: Path) -> Any:
    """A small model of more than text with random weights, saved with a tokenizer in the directory."""
    _, text, vision = WHOLE[name]
    if name == "qwen2_5_vl":
        text = {key: value for key, value in text.items() if key != "head_dim"}
    config = transformers.AutoConfig.for_model(name, text_config=text, vision_config=vision)
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(directory)
    vocabularies.byte_level(directory, 400)
    return model


@pytest.mark.parametrize("name", WHOLE)
def test_it_computes_what_the_whole_model_does(name: str, tmp_path: Path) -> None:
    model, ids = make(name, tmp_path), torch.arange(10, 50)[None]
    weights.check_files(tmp_path)
    config = causal_lm.start_config(tmp_path)
    assert config.model_type == WHOLE[name][0]
    alone = causal_lm.load_weights(causal_lm.causal_class(config), tmp_path, "", config=config)
    with torch.no_grad():
        torch.testing.assert_close(alone(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    read = config_json.read_config(tmp_path / "config.json")
    weights.check_weight_files(tmp_path, read)
    assert shape.of_config(read, VOCAB).parameters == sum(each.numel() for each in alone.parameters())
    (said,) = weights.text_alone(Model.model_construct(init_from=str(tmp_path), revision=None))
    assert f"is a {name}: its text decoder alone, a {WHOLE[name][0]}, is trained" in said
    opened = opening.open_model(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(opened.model.cpu()(ids).logits, alone(ids).logits.to(opened.model.dtype))


def test_transformers_own_class_reads_the_same_decoder_where_it_reads_one(tmp_path: Path) -> None:
    make("qwen3_5", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = causal_lm.start_config(tmp_path)
    ours = causal_lm.load_weights(type(theirs), tmp_path, "", config=config)
    left_out = {"architectures", "_name_or_path", "dtype"}
    first, second = ({k: v for k, v in each.config.to_dict().items() if k not in left_out} for each in (theirs, ours))
    assert first == second
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)


def test_a_reference_of_grpo_is_the_text_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainer, "create_model_from_path", None)  # put back afterwards
    make("gemma3", tmp_path)
    start.refer_to_text(Model.model_construct(init_from=str(tmp_path), revision=None))
    reference = grpo_trainer.create_model_from_path(str(tmp_path), dtype=torch.bfloat16)
    assert type(reference).__name__ == "Gemma3ForCausalLM" and reference.dtype == torch.bfloat16


def test_weights_of_the_decoder_are_missed_and_others_are_not(tmp_path: Path) -> None:
    make("qwen3_5", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "visual" not in name}
    save_file(tensors | {"mtp.layers.0.self_attn.q_proj.weight": torch.zeros(3, 3)}, file)
    weights.check_files(tmp_path)
    weights.check_weight_files(tmp_path, config_json.read_config(tmp_path / "config.json"))
    del tensors["model.language_model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(UserError) as error:
        weights.check_weight_files(tmp_path, config_json.read_config(tmp_path / "config.json"))
    assert "model.layers.1.self_attn.q_proj.weight is missing" in str(error.value.evidence)


def test_what_a_config_leaves_to_its_classes_is_filled_in(tmp_path: Path) -> None:
    # google/gemma-3-4b-it, as published: neither heads nor vocabulary
    text = {
        **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34},
        **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    }
    said = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = causal_lm.start_config(tmp_path)
    with torch.device("meta"):
        theirs = causal_lm.causal_class(config)(config)
    read = config_json.read_config(tmp_path / "config.json")
    found = shape.of_config(traits.complete(read, traits.record_of(read)), config.vocab_size)
    assert (config.vocab_size, config.eos_token_id) == (262208, [1, 106])
    assert found.parameters == sum(each.numel() for each in theirs.parameters()) == 3_880_263_168


def test_qwen2_5_vl_as_published_has_the_keys_of_both_in_one(tmp_path: Path) -> None:
    said = {
        **{"model_type": "qwen2_5_vl", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16},
        **{"num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True},
        **{
            "rope_theta": 1e6,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "image_token_id": 151655,
        },
        **{"vision_config": {"hidden_size": 1280}, "vision_start_token_id": 151652, "use_sliding_window": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = config_json.read_config(tmp_path / "config.json")
    assert (config["model_type"], config["rope_scaling"]) == ("qwen2", {"type": "default"})
    assert shape.of_config(config, 151936).parameters == 3_085_938_688
