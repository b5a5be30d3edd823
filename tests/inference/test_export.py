"""What an export holds beside weights that load (tests/test_train_command.py): files, card, refusals."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import RunMaker
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.evals import suite
from finlm.inference import export
from finlm.inference import open as opening
from finlm.inference.open import load_trained
from finlm.recipe import recipe

import dialogues
from helpers import QUICKSTART, logs
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
    score = {"metric": "accuracy", "rows": 90, "value": 0.25, "interval": [0.2, 0.3]}
    run.append_event("tasks", suite="cflue-tasks", mode="chat", step=step, scores={"Fin_TC": score})
    out = run.path.parent / "model"
    assert main.main(["export", str(run.path), str(out), "--shard-size", "500KB"]) == 0
    return run, out


def test_weights_are_cut_into_files_and_give_the_checkpoints_logits(exported: tuple[RunDir, Path]) -> None:
    run, out = exported
    parts = sorted(out.glob("model-*.safetensors"))
    assert len(parts) > 2 and (out / "model.safetensors.index.json").exists()
    model = AutoModelForCausalLM.from_pretrained(out)
    source = load_trained(run.complete_checkpoints()[-1][1])
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, source.model(ids).logits)
    assert model.get_input_embeddings().weight.shape[0] == source.plan.vocab_size


def test_a_model_whose_head_is_its_embedding_scores_as_it_did_in_training(
    make_run: RunMaker, ranks: Ranks, tmp_path: Path
) -> None:
    run = make_run("model.tie_embeddings=true", "train.steps=3", "optim.warmup_steps=2", "eval.every_steps=3", ranks=1)
    ranks.train(run)
    assert main.main(["export", str(run.path), str(tmp_path / "model")]) == 0  # compares with the reloaded model
    (last,) = list(run.read_events("eval"))[-1:]
    assert suite.measure_perplexity(run.path)["loss"] == pytest.approx(last["loss"], rel=1e-5)


@pytest.fixture(scope="module")
def of_gelu(finished: tuple[RunDir, str], ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run from a start of another activation."""
    path = tmp_path_factory.mktemp("gelu")
    shutil.copytree(finished[0].export, path / "start")
    said = json.loads((path / "start/config.json").read_text())
    weights = load_file(path / "start/model.safetensors")  # barely trained ones are too small to tell activations apart
    large = {name: tensor * (10 if "mlp" in name else 1) for name, tensor in weights.items()}
    save_file(large, path / "start/model.safetensors", {"format": "pt"})
    more = {"hidden_act": "gelu", "pad_token_id": 3, "max_position_embeddings": 777, "of_the_author": "kept"}
    (path / "start/config.json").write_text(json.dumps(said | more))
    source = dialogues.write(path / "rows.jsonl", dialogues.sample(60))
    wanted = dialogues.sft(path, path / "start", source, "train.steps=3", "data.held_out_fraction=0.1")
    run = dialogues.run(path, wanted, ranks=1)
    assert ranks.codes(run) == [0], logs(run)
    return run


def test_what_was_trained_is_what_is_written(of_gelu: RunDir, tmp_path: Path) -> None:
    shutil.rmtree(recipe.load(of_gelu.recipe).recipe.model.init_from)  # the checkpoint knows what it needs
    out = export.export(of_gelu.path, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    kept = {key: config[key] for key in ("hidden_act", "pad_token_id", "max_position_embeddings", "of_the_author")}
    assert list(kept.values()) == ["gelu", 3, 777, "kept"]
    (trained_loss,) = [row["loss"] for row in of_gelu.read_events("eval") if row["step"] == 3]
    assert suite.measure_perplexity(of_gelu.path)["loss"] == pytest.approx(trained_loss, rel=1e-5)


def test_an_export_that_reads_a_held_out_text_otherwise_than_the_training_is_refused(
    of_gelu: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = opening._saved_config

    def forgetful(*given: Any) -> Any:
        config = own(*given)
        config.hidden_act = "silu"
        return config

    monkeypatch.setattr(opening, "_saved_config", forgetful)
    with pytest.raises(RuntimeError, match="loss of a held-out text is"):
        export.export(of_gelu.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


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
    assert "| cflue-tasks | Fin_TC | accuracy | 90 | 0.2500 | 0.2000 to 0.3000 |" in card
    assert "license:" not in card.partition("# quickstart")[0]
    assert "s3cr3t" in run.recipe.read_text() and "gpu-7" in run.recipe.read_text()
    assert "s3cr3t" not in card and "gpu-7" not in card and "tokens_per_step: 1024" in card


def flip(path: Path) -> None:
    """Change a few single bytes; the size stays."""
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 7, len(content), len(content) // 5):
        content[place] ^= 0xFF
    path.write_bytes(content)


COMMANDS = (["eval"], ["eval", "--suite", "exam"], ["export"], ["sample"], ["chat"])


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_checkpoint_is_refused_by_all_that_open_one(
    exported: tuple[RunDir, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    run = RunDir(shutil.copytree(exported[0].path, tmp_path / "run", ignore=shutil.ignore_patterns("export")))
    directory, name = run.checkpoint(20), "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    aside = shutil.copytree(run.checkpoint(10), run.path / "checkpoints/step-15.damaged")
    if damage == "flipped":
        flip(directory / name)
    elif damage == "truncated":
        os.truncate(directory / name, 1000)
    else:
        (directory / name).unlink()
    words = {"flipped": "sha256 differs", "truncated": "found 1000", "missing": "the file is missing"}[damage]
    for verb, *options in COMMANDS:
        for given in (directory, run.path):
            rest = {"export": [str(tmp_path / "out")], "sample": ["公司"]}.get(verb, [])
            assert main.main([verb, str(given), *rest, *options]) == 2
            said = capsys.readouterr().err
            assert f"error: {directory} is damaged: 1 of its" in said and f"{name}: " in said and words in said
            assert "complete ones beside it: step-10\n" in said and "step-N of another one" in said
    assert not (tmp_path / "out").exists() and directory.is_dir()
    assert main.main(["eval", str(aside)]) == 2
    assert "set aside as damaged by a launch; complete ones beside it: step-10, step-20\n" in capsys.readouterr().err


def test_a_damaged_export_is_refused_and_one_that_was_changed_on_purpose_is_not(
    exported: tuple[RunDir, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(exported[1], tmp_path / "out"))
    made = json.loads((out / "finlm.json").read_text())
    assert (made["run"], made["recipe"], made["step"]) == (exported[0].path.name, "quickstart", 20)
    assert set(made["files"]) == {path.name for path in out.iterdir()} - {"README.md", "finlm.json"}
    (out / "README.md").write_text("licence: mine")
    assert main.main(["sample", str(out), "公司", "--tokens", "4"]) == 0
    weights = sorted(out.glob("*.safetensors"))[1]
    flip(weights)
    sft = [str(QUICKSTART.with_name("sft.yaml")), "--set", f"model.init_from={out}"]
    for command in (["sample", str(out), "x"], ["chat", str(out)], ["train", *sft, "--runs", str(tmp_path / "runs")]):
        assert main.main(command) == 2
        said = capsys.readouterr().err
        assert f"{weights.name}: sha256 differs" in said
        assert f"if you changed it on purpose, remove {out}/finlm.json" in said
    (out / "finlm.json").write_text("{")
    assert main.main(["sample", str(out), "x"]) == 2
    assert f"{out}/finlm.json is damaged" in capsys.readouterr().err
    (out / "finlm.json").unlink()
    assert main.main(["sample", str(out), "公司", "--tokens", "4"]) == 0


def test_refusals_leave_nothing_behind(exported: tuple[RunDir, Path], tmp_path: Path) -> None:
    run, out = exported
    for arguments in ((str(run.path), str(out)), (str(run.path), str(tmp_path / "a"), "--shard-size", "much")):
        assert main.main(["export", *arguments]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_run_its_checkpoint_and_its_export_continue_a_prompt_alike(
    exported: tuple[RunDir, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = exported
    for model in (run.path, run.complete_checkpoints()[-1][1], out):
        assert main.main(["sample", str(model), "净利润", "--tokens", "8", "--seed", "3"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("净利润") and others == [first] * 2
    assert main.main(["sample", str(out), "净利润" * 100]) == 2
    assert "the model's context 64" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-16), (torch.bfloat16, 2**-7)])
def test_the_proof_allows_roundings_and_nothing_else(dtype: torch.dtype, rounding: float) -> None:
    logits = torch.linspace(-20, 30, 4096).to(dtype)
    assert export._is_alike(logits * (1 + rounding), logits)
    assert not export._is_alike(logits.roll(200), logits) and not export._is_alike(logits * torch.nan, logits)


def test_only_a_gguf_file_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as missing:
        opening.import_gguf(QUICKSTART, tmp_path / "out")
    assert "requirements-gguf.lock" in (missing.value.fix or "")
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="is not a GGUF file"):
        opening.import_gguf(QUICKSTART, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF" + b"garbage" * 9], ids=["cut", "garbage"])
def test_a_damaged_gguf_file_is_told_as_one(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="cannot be read") as caught:
        opening.import_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert "rror: " in caught.value.evidence and not (tmp_path / "out").exists()


def test_an_imported_tokenizer_ends_with_the_files_own_token(
    exported: tuple[RunDir, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 gave SmolLM2's tokenizer the token that a turn begins with."""
    model, tokenizer = (kind.from_pretrained(exported[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    end, tokenizer.eos_token = tokenizer.eos_token, tokenizer.bos_token
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with monkeypatch.context() as patched:
        patched.setattr(opening.importlib.util, "find_spec", lambda name: True)
        patched.setattr(opening, "_check_gguf", lambda file: None)
        patched.setattr(opening.AutoModelForCausalLM, "from_pretrained", lambda **_: model)
        patched.setattr(opening.AutoTokenizer, "from_pretrained", lambda **_: tokenizer)
        opening.import_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == end != tokenizer.bos_token


def test_a_buffer_in_fp32_stays_so_in_a_model_of_16_bits() -> None:
    router = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    router.register_buffer("correction", torch.zeros(2, dtype=torch.bfloat16))
    weights = router.state_dict() | {"correction": torch.tensor([1.0001, 1.0002])}
    opening._match_buffers(router, weights)
    router.load_state_dict(weights)
    assert torch.equal(router.correction, weights["correction"]) and router.weight.dtype == torch.bfloat16
