"""A credential in a recipe reaches the run's own recipe.yaml and nothing that is made to be shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finlm import prepare
from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.base.secrets import redact_command
from finlm.cli import main
from finlm.recipe import recipe
from finlm.recipe.derive import for_publication
from finlm.record import compare, trackers
from finlm.record.report import run_page

from helpers import QUICKSTART

SECRETS = ("s3cr3t-one", "s3cr3t-two", "s3cr3t-three", "s3cr3t-four", "s3cr3t-five", "s3cr3t-six")
SOURCES = f"[https://me:{SECRETS[4]}@host/a.jsonl, {{path: 'https://host/b.jsonl?x=1&access_token={SECRETS[5]}&y=2'}}]"
MACHINES = ("db-machine-7", "someone", "10.9.8.7")
LINES = f"""
base: {QUICKSTART}
name: quickstart
env: {{WANDB_API_KEY: {SECRETS[0]}, HF_TOKEN: {SECRETS[1]}, NCCL_DEBUG: INFO}}
hosts:
  {MACHINES[0]}: {{user: {MACHINES[1]}, address: {MACHINES[2]}, env: {{WANDB_API_KEY: {SECRETS[2]}}}}}
hardware: {{hosts: [{{name: {MACHINES[0]}, slots: 2}}]}}
data: {{sources: {SOURCES}}}
batch: {{sequence_length: 128, tokens_per_step: 2048, micro_batch: {{{MACHINES[0]}: 4}}}}
"""


def no_secret_in(text: str) -> None:
    assert not [secret for secret in SECRETS if secret in text]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A recipe with credentials."""
    path = tmp_path / "secret.yaml"
    path.write_text(LINES)
    return path


def test_no_page_table_or_json_shows_a_credential(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "check_sources", lambda *_, **__: None)  # its host is no host
    runs = []
    for number, override in enumerate(("train.seed=7", f"env.HF_TOKEN={SECRETS[3]}")):
        loaded = recipe.load(written, [override])
        runs.append(run := RunDir(tmp_path / f"runs/a-{number}"))
        files.write_text(run.recipe, recipe.dump(loaded.recipe))
        files.write_json(run.origins, dict(loaded.origins))
        files.write_json(run.plan, {"steps": 3})
        files.write_json(run.ds_config, {})
        run.append_event("start", step=0)
        run.append_event("step", step=1, loss=2.0)
        run_page.build(run)
    compare.write_page(runs, tmp_path / "runs/side.html")
    assert main.main(["compare", *(str(run.path) for run in runs), "--json"]) == 1
    assert main.main(["plan", str(written), "--set", f"env={{HF_TOKEN: {SECRETS[3]}}}", "--json"]) == 0
    assert main.main(["diff", str(QUICKSTART), str(written), "--json"]) == 0
    run.recipe.write_text(run.recipe.read_text() + "key_of_another_version: 1\n")
    run_page.build(run)
    said = capsys.readouterr()
    no_secret_in(said.out + said.err)
    assert "https://host/b.jsonl?x=1&access_token=[redacted]&y=2" in said.err
    assert "env = {'HF_TOKEN': '[redacted]'}" in said.err and "env.HF_TOKEN" in said.out
    pages = [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and path.name != "recipe.yaml"]
    assert {path.name for path in pages} >= {"report.html", "side.html"}
    assert "INFO" in runs[0].report.read_text(encoding="utf-8")
    for path in pages:
        no_secret_in(path.read_text(encoding="utf-8"))


def test_what_is_published_names_no_machine_and_trains_the_same(written: Path, tmp_path: Path) -> None:
    loaded = recipe.load(written).recipe
    run = RunDir(tmp_path / "run")
    files.write_json(run.plan, {"hosts": [{"name": MACHINES[0]}], "reasons": [f"fp16: {MACHINES[0]}"], "steps": 3})
    shown = recipe.dump(for_publication(loaded))
    sent = json.dumps(trackers._config(run, loaded))
    assert not [word for word in SECRETS + MACHINES if word in shown + sent]
    files.write_text(tmp_path / "card.yaml", shown)
    again = recipe.load(tmp_path / "card.yaml").recipe
    assert again.batch.micro_batch == {again.hardware.hosts[0].name: 4} and again.model == loaded.model


def test_environments_on_the_command_line_are_cut_out_wherever_they_stand() -> None:
    given = [f"hosts.n1.env.api_key={SECRETS[0]}", f"env={{HF_TOKEN: {SECRETS[1]}}}", "hosts.n1.user=me", "optim.lr=1"]
    assert redact_command(given) == [
        "hosts.n1.env.api_key=[redacted]",
        "env=[redacted]",
        "hosts.n1.user=me",
        "optim.lr=1",
    ]
