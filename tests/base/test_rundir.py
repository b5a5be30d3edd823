"""Names of run directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from finlm.base import files
from finlm.base.runs import reserve_run

STEM = "llama-1.5b-20260101-000000"


def test_runs_begun_in_the_same_second_have_names_of_their_own_whichever_is_made_first(tmp_path: Path) -> None:
    with reserve_run(tmp_path, STEM) as first, files.new_directory(first) as begun:
        (begun / "recipe.yaml").touch()
        with reserve_run(tmp_path, STEM) as second, files.new_directory(second) as made:
            (made / "recipe.yaml").touch()
    with reserve_run(tmp_path, STEM) as third:
        pass
    assert [path.name for path in (first, second, third)] == [STEM, f"{STEM}.2", f"{STEM}.3"]
    assert all((path / "recipe.yaml").exists() for path in (first, second))


def test_the_name_of_a_run_that_could_not_be_made_is_free_again(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), reserve_run(tmp_path, STEM) as path, files.new_directory(path):
        raise OSError("full")
    assert not list(tmp_path.iterdir())
