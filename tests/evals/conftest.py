"""A finished run that may be changed, its model opened, and the exam about its world."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from finlm.base.rundir import RunDir
from finlm.evals import questions
from finlm.evals.questions import Suite
from finlm.inference.open import Opened, open_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on two threads, and far slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(finished: tuple[RunDir, str], tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The finished run with an export of its own that may be changed."""
    copied = tmp_path_factory.mktemp("run") / finished[0].path.name
    shutil.copytree(finished[0].path, copied, ignore=shutil.ignore_patterns("code"))
    return RunDir(copied)


@pytest.fixture(scope="module")
def opened(run: RunDir) -> Opened:
    found = open_model(run.path)
    found.model.config.max_position_embeddings = 4096
    return Opened(**(vars(found) | {"context": 4096}))  # rotary positions go as far as needed here


@pytest.fixture(scope="module")
def exam(run: RunDir) -> Suite:
    return questions.read_questions("exam", None, questions.find_world("exam", run, None))
