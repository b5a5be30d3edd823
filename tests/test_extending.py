"""The worked examples of docs/extending.md: the recipes load and plan, the diffs apply and do what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from finlm.plan import planner
from finlm.recipe import cluster, recipe, shape

from helpers import QUICKSTART, ROOT

PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
QUESTION = ",Question,A,B,C,D,Answer\n0,1+1=?,1,2,3,4,B\n"
USES = {
    "clean": "from finlm.corpus.clean import Cleaner; from finlm.recipe.schema_data import Clean; "
    "clean = Cleaner(Clean(max_repeated_lines=0.5)); frame = '上一页 下一页\\n' * 12 + '正文。'; "
    "assert clean(frame) == ('', 'repeated_lines'); assert Cleaner(Clean())(frame)[1] is None",
    "suite": "import pathlib, sys; from finlm.cli import options; from finlm.evals import questions; "
    "suite = questions.read_questions('cmmlu', pathlib.Path(sys.argv[1]), None); "
    "assert suite.questions[0].answer == 'B' and suite.name in questions.STYLES; "
    "options.parser().parse_args(['eval', 'MODEL', '--suite', 'cmmlu'])",
    "diagnose": "import sys; from finlm.diagnose import command; "
    "assert [found.cause for found in command.of_logs([sys.argv[1]])][:1] == ['cross_device_rename']",
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with all diffs of the page applied."""
    copy = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "src/finlm", copy / "src/finlm", ignore=shutil.ignore_patterns("__pycache__"))
    diffs = "".join(re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL))
    done = subprocess.run(["git", "apply", "-"], cwd=copy, input=diffs, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"the source has changed: mend the diffs of docs/extending.md\n{done.stderr}"
    return copy


@pytest.mark.parametrize("what", USES)
def test_the_diffs_do_what_the_page_says(what: str, extended: Path, tmp_path: Path) -> None:
    for part in ("dev", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "arithmetic.csv").write_text(QUESTION)
    log = tmp_path / "rank.log"
    log.write_text("OSError: [Errno 18] Invalid cross-device link: '/tmp/a.safetensors' -> '/data/a.safetensors'\n")
    env = os.environ | {"PYTHONPATH": str(extended / "src")}
    command = [sys.executable, "-c", USES[what], str(log if what == "diagnose" else tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_recipes_of_the_page_load_and_the_shape_plans(tmp_path: Path) -> None:
    texts = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    loaded = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text.replace("../quickstart/pretrain.yaml", str(QUICKSTART)), encoding="utf-8")
        loaded.append(recipe.load(path).recipe)
    plan = planner.make(loaded[0], cluster.from_hardware(loaded[0].hardware), shape.of(loaded[0]))
    assert plan.parameters == 1_100_048_384  # TinyLlama's
    assert [source.format for source in loaded[1].data.sources] == ["auto", "txt", "auto"]
