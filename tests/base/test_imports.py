"""transformers is imported with its table of models from a file and without torchao, and is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finlm.base import imports

from helpers import ROOT

RANK = """
import sys
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
from finlm.base.imports import hasten_transformers
hasten_transformers()
import finlm.train.pretrain, finlm.train.post.sft
import transformers.generation.candidate_generator, transformers.loss.loss_utils
from transformers import models, utils
assert not {"torchao", "sklearn", "scipy"} & set(sys.modules)
assert utils.is_scipy_available() and utils.is_sklearn_available()
from transformers.utils import import_utils
assert utils.is_torchao_available is import_utils.is_torchao_available
read = [path for path in opened if "/transformers/models/" in path and path.endswith(".py")]
print(len(read), len(set(read)))
opened.clear()
kept = import_utils.define_import_structure(models.__file__)
assert len(opened) == 1, opened
known = import_utils.create_import_structure_from_path(models.__file__)
assert kept == import_utils.spread_import_structure(known) and len(kept) > 5
"""


def test_a_rank_reads_the_files_of_models_once_and_leaves_out_what_it_does_not_need(tmp_path: Path) -> None:
    for package in ("sklearn", "scipy"):  # large packages that users often have, and finlm does not need
        (tmp_path / "packages" / package).mkdir(parents=True)
        (tmp_path / "packages" / package / "__init__.py").touch()
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "packages")}
    done = subprocess.run(
        [sys.executable, "-c", RANK], cwd=ROOT / "src", env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    read, files = map(int, done.stdout.split()[-2:])
    assert 1000 < read < 1.1 * files, "a type's own package reads its few again"
    assert len(list(tmp_path.glob("finlm/transformers-models-*.json"))) == 1


def test_a_table_is_kept_for_installed_files_only_and_a_damaged_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table: imports.Table = {frozenset({"torch"}): {"llama.modeling_llama": {"LlamaModel"}}, frozenset(): {"a": set()}}
    scans = []

    def scan() -> imports.Table:
        scans.append(1)
        return table

    for place, count in (("site-packages", 1), ("checkout", 2)):
        models = tmp_path / place / "transformers" / "models"
        models.mkdir(parents=True)
        (models / "__init__.py").touch()
        scans.clear()
        assert imports._read_table(models, scan) == imports._read_table(models, scan) == table
        assert len(scans) == count
    (kept,) = tmp_path.glob("cache/finlm/*.json")
    for damage in ("", "[1]", '{"a": 1}'):
        kept.write_text(damage)
        assert imports._read_table(tmp_path / "site-packages/transformers/models", scan) == table
        assert kept.read_text().startswith("[[")
    (tmp_path / "site-packages/transformers-6.dist-info").mkdir()
    scans.clear()
    assert imports._read_table(tmp_path / "site-packages/transformers/models", scan) == table and scans, (
        "another version"
    )
