"""The manifest: hashes that can be checked, code that can be run, no secrets."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.doctor.gather import HostFacts
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Recipe
from finlm.record import manifest

from doctor_facts import healthy

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes/quickstart/pretrain.yaml"


@pytest.fixture(scope="module")
def planned() -> tuple[Recipe, Plan]:
    wanted = recipe.load(QUICKSTART).recipe
    return wanted, planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted))


def git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True)


def test_hashes_are_those_of_the_files_in_the_run_directory(planned: tuple[Recipe, Plan], tmp_path: Path) -> None:
    wanted, plan = planned
    files.write_text(tmp_path / "recipe.yaml", recipe.dump(wanted))
    files.write_json(tmp_path / "plan.json", plan.to_json())
    files.write_json(tmp_path / "shards/manifest.json", {"tokenizer_sha256": "ab" * 32})
    made = manifest.make(wanted, plan, tmp_path / "shards").to_json()
    assert made["recipe"]["sha256"] == files.sha256_file(tmp_path / "recipe.yaml")
    assert made["plan"]["sha256"] == files.sha256_json(files.read_json(tmp_path / "plan.json"))
    assert made["shards"] == {
        "path": str(tmp_path / "shards"),
        "sha256": files.sha256_file(tmp_path / "shards/manifest.json"),
        "tokenizer_sha256": "ab" * 32,
    }
    assert made["seeds"] == {"train.seed": 7, "data.sources[0].synthetic.seed": 7}
    assert made["hosts"] == [{"name": "localhost", "slots": 2, "gpu": None}]
    assert json.loads(json.dumps(made)) == made


def test_packages_and_machine_are_recorded(planned: tuple[Recipe, Plan]) -> None:
    made = manifest.make(*planned, None).to_json()
    assert made["packages"]["pydantic"] and made["packages"]["torch"]
    assert made["machine"]["python"].startswith("3.")
    assert made["machine"]["cpus"] >= made["machine"]["cpus_usable"] >= 1
    assert made["shards"] is None
    assert made["finlm"]["version"] != "unknown"
    assert Path(made["command"][0]).name.startswith(("python", "pytest"))


def test_secrets_never_reach_the_manifest(planned: tuple[Recipe, Plan]) -> None:
    secret = "s3cr3t"
    environment = {
        "HF_TOKEN": secret,
        "NCCL_API_KEY": secret,
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "8",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_ENDPOINT": f"https://user:{secret}@mirror.example/x",
        "HTTPS_PROXY": f"http://u:{secret}@proxy:3128",
        "AWS_SECRET_ACCESS_KEY": secret,
        "HOME": "/home/someone",
    }
    command = ["python", "-m", "finlm", "train", "r.yaml", "--set", "batch.tokens_per_step=8192"]
    command += ["--set", f"env.HF_TOKEN={secret}", "--api-key", secret, f"--password={secret}", f"WANDB_KEY={secret}"]
    command += ["--tokens", "5", f"https://me:{secret}@host/data"]
    made = manifest.make(*planned, None, command=command, environment=environment).to_json()
    assert secret not in json.dumps(made)
    assert made["environment"] == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HF_ENDPOINT": "https://[redacted]@mirror.example/x",
        "HF_TOKEN": "[redacted]",
        "HTTPS_PROXY": "http://[redacted]@proxy:3128",
        "NCCL_API_KEY": "[redacted]",
        "NCCL_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "8",
        "TOKENIZERS_PARALLELISM": "false",
    }
    assert "batch.tokens_per_step=8192" in made["command"]
    assert made["command"][-3:] == ["--tokens", "5", "https://[redacted]@host/data"]


def test_the_copied_code_runs_on_its_own_and_has_the_packages_hash(tmp_path: Path) -> None:
    digest = manifest.copy_code(tmp_path / "code")
    assert digest == manifest.code_hash()
    assert not list((tmp_path / "code").rglob("__pycache__"))
    script = "import finlm.record.report.run_page, finlm.record.manifest as m; print(m.PACKAGE, m.code_hash())"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "code"), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == [str(tmp_path / "code/finlm"), digest]


def test_git_state_tells_commit_dirt_and_the_hash_of_the_changes(tmp_path: Path) -> None:
    package = tmp_path / "src/finlm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    clean: Any = manifest.git_state(package)
    assert len(clean.commit) == 40 and clean.dirty is False and clean.diff_sha256 is None
    (package / "__init__.py").write_text("x = 1\n")
    dirty: Any = manifest.git_state(package)
    assert dirty.commit == clean.commit and dirty.dirty is True
    diff = subprocess.run(["git", "-C", str(package), "diff", "HEAD", "--binary"], capture_output=True, check=True)
    assert dirty.diff_sha256 == hashlib.sha256(diff.stdout).hexdigest()


def test_the_diff_and_the_remote_are_kept_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src/finlm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "remote", "add", "origin", "https://me:s3cr3tword@git.example/finlm.git")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    monkeypatch.setattr(manifest, "PACKAGE", package)
    assert manifest.changes() == ""
    secret = "s3cr3tword"
    lines = [f'API_KEY = "{secret}"', f"password: {secret}", "tokens_per_step = 98304", f"url = 'ftp://u:{secret}@h/x'"]
    lines += ["token = 'hf_" + "a" * 30 + "'", "bos_token_id = 1234567", "lr = 3e-4"]
    (package / "__init__.py").write_text("\n".join(lines))
    diff = manifest.changes()
    assert secret not in diff and "hf_a" not in diff
    assert all(f"+{line}" in diff for line in (lines[2], lines[5], lines[6]))
    # A credential that lies across the limit of the diff: neither half of it stays.
    monkeypatch.setattr(manifest, "MOST_DIFF_BYTES", diff.encode().index(b"password") + len("password: ") + 4)
    assert secret[:4] not in manifest.changes() and "[cut: " in manifest.changes()
    state: Any = manifest.git_state(package)
    assert state.remote == "https://[redacted]@git.example/finlm.git"


def test_what_doctor_saw_of_a_host_is_recorded(planned: tuple[Recipe, Plan]) -> None:
    facts = HostFacts.from_json(healthy()).for_manifest()
    (host,) = manifest.make(*planned, None, facts={"localhost": facts}).to_json()["hosts"]
    assert host["drivers"] == ["580.159.04"] and host["gpus"] == ["NVIDIA H200"] * 2 and host["nccl"] == "2.28.9"
    assert "cpu" not in host, "nobody told it"


def test_a_manifest_of_another_version_is_read_as_far_as_it_is_understood(
    planned: tuple[Recipe, Plan], tmp_path: Path
) -> None:
    run, made = RunDir(tmp_path), manifest.make(*planned, None)
    start = {"run": "a", "step": 3, "recipe": "r", "settings": {"optim.lr": 0.1, "data.sources": [{"path": "x"}]}}
    files.write_json(run.manifest, made.to_json() | {"start": start, "new": 1})
    assert manifest.Manifest.read(run) == dataclasses.replace(made, start=start)
    files.write_json(run.manifest, made.to_json() | {"seeds": "other"})
    assert manifest.Manifest.read(run) == dataclasses.replace(made, seeds={})
    run.manifest.write_text("[]")
    assert manifest.Manifest.read(run) is None


def test_a_package_outside_git_or_ignored_by_it_has_no_git_state(tmp_path: Path) -> None:
    package = tmp_path / ".venv/finlm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert manifest.git_state(package) is None
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text(".venv/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "someone else's project")
    assert manifest.git_state(package) is None


def test_a_machine_without_git_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert manifest.git_state(manifest.PACKAGE) is None
