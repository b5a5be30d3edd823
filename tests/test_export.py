"""What an export holds beside weights that load (tests/test_train_command.py): files, card, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import RunMaker
from finlm import cli, export, import_gguf
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.evals import perplexity
from finlm.train import trained

from helpers import QUICKSTART
from ranks import Ranks


@pytest.fixture(scope="module")
def exported(finished: tuple[RunDir, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Path]:
    """An export in small shards of a run that was asked a suite."""
    run = RunDir(tmp_path_factory.mktemp("run") / finished[0].path.name)
    shutil.copytree(finished[0].path, run.path, ignore=shutil.ignore_patterns("code"))
    written = run.recipe.read_text(encoding="utf-8")
    run.recipe.write_text(
        written.replace("env: {}", "env: {HF_TOKEN: s3cr3t}").replace("name: localhost", "name: gpu-7")
    )
    step = run.complete_checkpoints()[-1][0]
    numbers = {"macro": 0.5, "micro": 0.4, "micro_interval": [0.3, 0.5], "questions": 99}
    run.append_event("suite", suite="exam", mode="chat", shots=0, step=step, **numbers)
    out = run.path.parent / "model"
    assert cli.main(["export", str(run.path), str(out), "--shard-size", "500KB"]) == 0
    return run, out


def test_weights_are_cut_into_files_and_give_the_checkpoints_logits(exported: tuple[RunDir, Path]) -> None:
    run, out = exported
    parts = sorted(out.glob("model-*.safetensors"))
    assert len(parts) > 2 and (out / "model.safetensors.index.json").exists()
    model = AutoModelForCausalLM.from_pretrained(out)
    source = trained.load(run.complete_checkpoints()[-1][1])
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, source.model(ids).logits)
    assert model.get_input_embeddings().weight.shape[0] == source.plan.vocab_size


def test_a_model_whose_head_is_its_embedding_scores_as_it_did_in_training(
    make_run: RunMaker, ranks: Ranks, tmp_path: Path
) -> None:
    run = make_run("model.tie_embeddings=true", "train.steps=3", "optim.warmup_steps=2", "eval.every_steps=3", ranks=1)
    ranks.train(run)
    assert cli.main(["export", str(run.path), str(tmp_path / "model")]) == 0  # compares with the reloaded model
    (last,) = list(run.read_events("eval"))[-1:]
    assert perplexity.evaluate(run.path)["loss"] == pytest.approx(last["loss"], rel=1e-5)


def test_other_readers_find_what_they_look_for(exported: tuple[RunDir, Path]) -> None:
    _, out = exported
    config = json.loads((out / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["architectures"] == ["LlamaForCausalLM"] and config["head_dim"] * config["num_attention_heads"] == 64
    pieces, fast = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model")), AutoTokenizer
    text = "2023年净利润为3.6亿元，\n同比增长12.5%"
    assert fast.from_pretrained(out)(text, add_special_tokens=False)["input_ids"] == pieces.encode(text)
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings["eos_token_id"] == pieces.eos_id()


def test_the_card_says_what_the_run_knows_and_no_licence(exported: tuple[RunDir, Path]) -> None:
    run, out = exported
    card = (out / "README.md").read_text(encoding="utf-8")
    manifest = json.loads(run.manifest.read_text())
    (last,) = list(run.read_events("eval"))[-1:]
    for source, row in last["sources"].items():
        assert f"| {source} | {row['loss']:,.4f} |" in card
    assert manifest["shards"]["sha256"] in card and manifest["finlm"]["code_sha256"] in card
    assert "| exam | chat, 0-shot | 99 | 50.00 % | 40.00 % | 30.0 to 50.0 |" in card
    assert "license:" not in card.partition("# quickstart")[0]
    assert "s3cr3t" in run.recipe.read_text() and "gpu-7" in run.recipe.read_text()
    assert "s3cr3t" not in card and "gpu-7" not in card and "tokens_per_step: 1024" in card


def test_refusals_leave_nothing_behind(exported: tuple[RunDir, Path], tmp_path: Path) -> None:
    run, out = exported
    for arguments in ((str(run.path), str(out)), (str(run.path), str(tmp_path / "a"), "--shard-size", "much")):
        assert cli.main(["export", *arguments]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_run_its_checkpoint_and_its_export_continue_a_prompt_alike(
    exported: tuple[RunDir, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = exported
    for model in (run.path, run.complete_checkpoints()[-1][1], out):
        assert cli.main(["sample", str(model), "净利润", "--tokens", "8", "--seed", "3"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("净利润") and others == [first] * 2
    assert cli.main(["sample", str(out), "净利润" * 100]) == 2
    assert "the model's context 64" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-16), (torch.bfloat16, 2**-7)])
def test_the_proof_allows_roundings_and_nothing_else(dtype: torch.dtype, rounding: float) -> None:
    logits = torch.linspace(-20, 30, 4096).to(dtype)
    assert export._alike(logits * (1 + rounding), logits)
    assert not export._alike(logits.roll(200), logits) and not export._alike(logits * torch.nan, logits)


def test_only_a_gguf_file_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as missing:
        import_gguf.write(QUICKSTART, tmp_path / "out")
    assert "requirements-gguf.txt" in (missing.value.fix or "")
    monkeypatch.setattr(import_gguf.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="is not a GGUF file"):
        import_gguf.write(QUICKSTART, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF" + b"garbage" * 9], ids=["cut", "garbage"])
def test_a_damaged_gguf_file_is_told_as_one(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    monkeypatch.setattr(import_gguf.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="cannot be read") as caught:
        import_gguf.write(tmp_path / "model.gguf", tmp_path / "out")
    assert "rror: " in caught.value.evidence and not (tmp_path / "out").exists()


def test_an_imported_tokenizer_ends_with_the_files_own_token(
    exported: tuple[RunDir, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 gave SmolLM2's tokenizer the token that a turn begins with."""
    model, tokenizer = (kind.from_pretrained(exported[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    end, tokenizer.eos_token = tokenizer.eos_token, tokenizer.bos_token
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with monkeypatch.context() as patched:
        patched.setattr(import_gguf.importlib.util, "find_spec", lambda name: True)
        patched.setattr(import_gguf.AutoModelForCausalLM, "from_pretrained", lambda **_: model)
        patched.setattr(import_gguf.AutoTokenizer, "from_pretrained", lambda **_: tokenizer)
        import_gguf.write(tmp_path / "model.gguf", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == end != tokenizer.bos_token
