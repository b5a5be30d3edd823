"""`finlm serve` becomes the server of another program: with which line, and what it refuses before."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from finlm.base import processes
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.cli import main, recipes

TAIL = ["--host", "localhost", "--port", "8000"]


def test_the_line_is_that_of_transformers_or_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"fastapi", "uvicorn", "openai"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    line = recipes.server_command(tmp_path, "localhost", 8000, "auto")
    assert line == [sys.executable, "-m", "transformers.cli.transformers", "serve", str(tmp_path), *TAIL]
    with pytest.raises(UserError, match="vLLM is not installed"):
        recipes.server_command(tmp_path, "localhost", 8000, "vllm")
    installed.remove("uvicorn")
    with pytest.raises(UserError, match="transformers' server needs uvicorn") as caught:
        recipes.server_command(tmp_path, "localhost", 8000, "auto")
    assert "requirements-serve.lock" in caught.value.fix
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/vllm")
    assert recipes.server_command(tmp_path, "localhost", 8000, "vllm") == [
        "/usr/bin/vllm",
        "serve",
        str(tmp_path),
        *TAIL,
    ]


def test_a_run_is_served_by_its_export_and_what_is_no_model_is_refused(
    finished: tuple[RunDir, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _, line: lines.append(line))
    monkeypatch.setattr(recipes, "server_command", lambda directory, *_: ["server", str(directory)])
    with processes.listen("localhost", 0) as taken:
        port = taken.getsockname()[1]
        asked = Namespace(model=finished[0].path, host="localhost", port=port, engine="auto")
        with pytest.raises(UserError, match=f"cannot listen at localhost:{port}"):
            recipes.serve(asked)
        assert lines == []
    recipes.serve(asked)
    assert lines == [["server", str(finished[0].export.resolve())]]
    assert "has no chat template" in capsys.readouterr().err
    (tmp_path / "judge").mkdir()
    config = {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}
    (tmp_path / "judge/config.json").write_text(json.dumps(config))
    (tmp_path / "judge/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "judge/tokenizer.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/plan.json").touch()
    for name, words in (
        ("judge", "is a reward model"),
        ("run", "the run has no export yet"),
        ("gone", "holds no model"),
    ):
        assert main.main(["serve", str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err
