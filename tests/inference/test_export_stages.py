"""The last step of every stage after pretraining: what `finlm export` writes loads in plain transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jinja2
import peft
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.recipe import recipe

import dialogues
from helpers import ROOT
from ranks import Ranks

PAIRS = [{"prompt": f"第{n}家公司经营得怎样？", "chosen": "增长。", "rejected": "公司。"} for n in range(60)]
TALK = [{"role": "user", "content": "第3家公司的营业收入是多少？"}]
FILES = {
    *("README.md", "chat_template.jinja", "config.json", "finlm.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
}


@pytest.fixture(scope="module")
def assistant(finished: tuple[RunDir, str], ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a tiny fine-tuning."""
    return exported(tmp_path_factory.mktemp("sft"), Path(finished[0].export), ranks)


def exported(path: Path, start: Path, ranks: Ranks, *overrides: str) -> Path:
    """Train on dialogues from `start`, export the last step."""
    source = dialogues.write(path / "rows.jsonl", dialogues.sample(60))
    short = ("train.steps=3", "optim.lr=1e-2", "eval.every_steps=null")
    made = dialogues.run(path, dialogues.sft(path, start, source, *short, *overrides), ranks=1)
    ranks.train(made)
    assert main.main(["export", str(made.path), str(path / "out")]) == 0
    return path / "out"


def preferred(path: Path, start: Path, ranks: Ranks, stage: str) -> Path:
    """Train on preferences from `start`, export the last step."""
    source = dialogues.write(path / "rows.jsonl", PAIRS)
    overrides = (
        *(f"model.init_from={start}", f"data.sources={source}", f"data.cache_dir={path / 'cache'}"),
        *("batch={sequence_length: 64, tokens_per_step: 512}", "train.steps=3", "optim={lr: 1.0e-3, warmup_steps: 2}"),
        *("checkpoint.every_steps=null", "eval={every_steps: null}", "data.held_out_fraction=0.1"),
    )
    wanted = recipe.load(ROOT / f"recipes/quickstart/{stage}.yaml", overrides).recipe
    made = dialogues.run(path, wanted, ranks=1)
    ranks.train(made)
    assert main.main(["export", str(made.path), str(path / "out")]) == 0
    return path / "out"


def check(out: Path, start: Path) -> None:
    """The files other programs look for, and the keys of config.json that llama.cpp and vLLM read."""
    config = json.loads((out / "config.json").read_text())
    writes = config["architectures"] == ["LlamaForCausalLM"]
    assert {file.name for file in out.iterdir()} == FILES | ({"generation_config.json"} if writes else set())
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    before = json.loads((start / "config.json").read_text())
    keys = (*keys, "rms_norm_eps", "rope_theta", "vocab_size", "hidden_act", "bos_token_id", "eos_token_id", "dtype")
    assert {key: config[key] for key in keys} == {key: before[key] for key in keys}
    assert config["max_position_embeddings"] >= before["max_position_embeddings"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    if writes:
        ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
        assert ends == tokenizer.eos_token_id, "an answer ends with </s>"
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    template = (out / "chat_template.jinja").read_text(encoding="utf-8")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    plain = jinja2.Template(template).render(messages=TALK, add_generation_prompt=True, **tokens)
    assert text == plain == f"<s>Human: {TALK[0]['content']} Assistant:"
    assert "with finlm: 3 steps" in (out / "README.md").read_text(encoding="utf-8")


def weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory."""
    with safe_open(path / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_fine_tuning_gives_an_assistant_that_generates(assistant: Path, finished: tuple[RunDir, str]) -> None:
    check(assistant, Path(finished[0].export))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(assistant), AutoTokenizer.from_pretrained(assistant)
    prompt = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > prompt["input_ids"].shape[1]
    # llama.cpp's converter: no space after the control token at the beginning of a dialogue; documents have one.
    spaces = [
        json.loads((path / "tokenizer_config.json").read_text()) for path in (assistant, Path(finished[0].export))
    ]
    assert spaces[0]["add_prefix_space"] is False and spaces[1]["add_prefix_space"] is None


def as_llama_2(start: Path, directory: Path) -> Path:
    """A copy of a model whose tokenizer.json puts the first space itself, and whose flags say nothing of it."""
    shutil.copytree(start, directory, ignore=shutil.ignore_patterns("finlm.json"))
    fast = json.loads((start / "tokenizer.json").read_text(encoding="utf-8"))
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    fast |= {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
    (directory / "tokenizer.json").write_text(json.dumps(fast), encoding="utf-8")
    flags = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(flags))
    return directory


def test_adapters_are_merged_and_the_tokenizer_is_the_one_trained_with(
    finished: tuple[RunDir, str], ranks: Ranks, tmp_path: Path
) -> None:
    start = as_llama_2(Path(finished[0].export), tmp_path / "start")
    out = exported(tmp_path, start, ranks, "lora={rank: 4, alpha: 64, targets: [q_proj, up_proj]}")
    check(out, start)
    before, after = weights(start), weights(out)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert set(before) == set(after)
    alone = tmp_path / "alone"
    (run,) = (tmp_path / "runs").iterdir()
    assert main.main(["export", str(run), str(alone), "--adapter"]) == 0
    assert json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"] == str(start)
    theirs, ours = (AutoTokenizer.from_pretrained(each) for each in (alone, out))
    rendered = [each.apply_chat_template(TALK, tokenize=False) for each in (theirs, ours)]
    assert rendered[0] == rendered[1] and theirs(rendered[0])["input_ids"] == ours(rendered[1])["input_ids"]
    assert (alone / "chat_template.jinja").read_text() == (out / "chat_template.jinja").read_text()
    ids = torch.arange(3, 40)[None]
    beside = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), alone)
    with torch.no_grad():
        apart, merged = beside(ids).logits, AutoModelForCausalLM.from_pretrained(out)(ids).logits
    torch.testing.assert_close(apart, merged, rtol=1e-4, atol=1e-4)
    assert all(path.stat().st_mode & 0o044 for path in (*alone.iterdir(), *out.iterdir())), "others may read it"
    assert changed == {name for name in after if "q_proj" in name or "up_proj" in name}
    tokenizer, trained_with = AutoTokenizer.from_pretrained(out), Tokenizer.from_file(str(start / "tokenizer.json"))
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == trained_with.encode(text, add_special_tokens=False).ids
    assert tokenizer.convert_ids_to_tokens(ids[:2]) == ["<s>", "▁"], "which transformers' LlamaTokenizer leaves out"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_preferences_start_from_an_export_and_give_one(
    stage: str, assistant: Path, ranks: Ranks, tmp_path: Path
) -> None:
    out = preferred(tmp_path, assistant, ranks, stage)
    check(out, assistant)
    kind = AutoModelForSequenceClassification if stage == "reward" else AutoModelForCausalLM
    model, tokenizer = kind.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    ids = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        assert model(**ids).logits.shape == ((1, 1) if stage == "reward" else (*ids["input_ids"].shape, 2048))
    heads = {"score.weight"} if stage == "reward" else {"lm_head.weight"}
    assert heads == {name for name in weights(out) if "layers" not in name and "model." not in name}
