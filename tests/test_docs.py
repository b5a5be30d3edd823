"""Every command in the READMEs and docs is run: as it stands, or on smaller input where it says what is replaced."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finlm.base.rundir import RunDir, open_run
from finlm.recipe import recipe
from finlm.world import writer
from object_store import serve

from helpers import QUICKSTART, ROOT, TINY, finlm, with_fault

FOLDERS = ("README*.md", "CONTRIBUTING.md", "recipes/README.md", "recipes/*/README.md", "docs/*.md")
PAGES = sorted(page for pattern in FOLDERS for page in ROOT.glob(pattern))
# These recipes need GPUs, corpora and base models that tests do not have: the commands must say what is missing.
NEEDS_DOWNLOAD = re.compile(r"recipes/(xuanyuan|llama2|mistral|qwen3|fin-r1|dianjin|oda-fin|r1-distill|deepscaler)")
# The same run, with the model and data of its full size, once: test_the_quickstart_learns.
QUICKSTART_COMMANDS = ("bash scripts/pretrain_run.sh", "bash scripts/pretrain_run.sh recipes/quickstart/pretrain.yaml")


def commands() -> list[str]:
    """The distinct lines of all ```bash blocks, in order; continuation lines joined."""
    found: dict[str, None] = {}
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.partition("  #")[0].strip()
                if command and not command.startswith("#"):
                    found[command] = None
    return list(found)


def shown() -> dict[str, list[str]]:
    """The lines of output that a page shows right below a command; a line may end in "..."."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for command, output in re.findall(r"```bash\n([^\n]+)\n```\n+```text\n(.*?)```", text, re.DOTALL):
            found[command] = [" ".join(line.split()) for line in output.splitlines() if line.strip() not in ("", "...")]
    return found


Shell = Callable[..., "subprocess.CompletedProcess[str]"]
# A drill of the tiny model restarts by itself and takes as many tokens a step as the quickstart, so that it lasts.
NOT_DRILLED = ("train.steps", "checkpoint.every_steps", "launch.restarts", "batch.tokens_per_step")


@pytest.fixture(scope="module")
def shell(checkout: Path) -> Shell:
    """Types a line of a README at the root of the copied checkout."""
    path = f"{checkout / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"  # as after `source .venv/bin/activate`
    env = os.environ | {"PYTHONPATH": str(checkout / "src"), "PATH": path}

    def run(command: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command], cwd=checkout, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run


@pytest.fixture(scope="module")
def download_help(shell: Shell) -> str:
    """What `hf download` can be told: the tests have no network, and the tool must know the options."""
    done = shell(".venv/bin/hf download --help")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that stand for the reader's own corpus/*.jsonl.gz."""
    directory = tmp_path_factory.mktemp("corpus")
    writer.write(directory, 1_000_000, 5, "train")
    return directory


@pytest.fixture
def bucket(corpus: Path) -> Iterator[str]:
    """Words before a command that reads the reader's own files from a bucket, whose server runs here."""
    pytest.importorskip("s3fs")
    with serve() as server:
        server.objects |= {f"fincorpus/a/{file.name}": file.read_bytes() for file in corpus.glob("*.jsonl.gz")}
        yield " ".join(f"{name}={value}" for name, value in server.environment.items())


@pytest.fixture(scope="module")
def run_copies(finished: tuple[RunDir, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what pages call runs/RUN and runs/OTHER: a finished run of the tiny recipe, twice."""
    directory = tmp_path_factory.mktemp("runs")
    for name in ("RUN", "OTHER"):
        shutil.copytree(finished[0].path, directory / name)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_quickstart_learns(shell: Shell, checkout: Path) -> None:
    """The first command of the README, for 8 of its 250 steps: in full it is a third of the time of all tests."""
    short = "--set train.steps=8 --set optim.warmup_steps=4 --set eval.max_tokens_per_source=3k"
    result = shell(f"bash scripts/pretrain_run.sh --new {short}", timeout=2300)
    assert result.returncode == 0, result.stderr[-3000:]
    run = open_run(checkout / re.findall(r"run directory\s+(\S+)", result.stderr)[0])
    first, *_, last = (event["loss"] for event in run.read_events("eval"))
    assert last < 0.9 * first
    promised = recipe.load(QUICKSTART).recipe.expect
    assert promised is not None
    low, high = promised.loss[1]
    assert low <= next(run.read_events("step"))["loss"] <= high, "the same first step as of the whole run"
    assert run.report.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fine_tuning_trains_its_parent_first(shell: Shell, tmp_path: Path) -> None:
    """The script for it, with toys: that of its parent and its own, each held to its expect.toy."""
    result = shell(f"bash scripts/sft_run.sh --toy --runs {tmp_path}")
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr.count("all 4 numbers of the recipe's expect: are met") == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("command", [c for c in commands() if c not in QUICKSTART_COMMANDS], ids=str)
def test_the_command_works(command: str, shell: Shell, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    expected = shown().get(command, [])
    if "runs/" in command:
        copies = request.getfixturevalue("run_copies")
        command = command.replace("runs/RUN", str(copies / "RUN")).replace("runs/OTHER", str(copies / "OTHER"))
    command = re.sub(r"\b[AB]\.log\b", "tests/diagnose/logs/nccl_ifname_missing.log", command)
    if command == "bash scripts/test.sh":
        command += " --collect-only -q tests/recipe"  # the tests are running already
    elif re.search("--toy( --runs runs/toy)?$", command):  # the one is sft_run.sh's parent, above; test_toy.py has both
        command += " --dry-run"
    elif "hf download" in command:
        download_help = request.getfixturevalue("download_help")
        assert all(option in download_help for option in re.findall(r"--[a-z-]+", command))
        return
    elif command.startswith("finlm drill"):
        tiny = [text for text in request.getfixturevalue("tiny") if not text.startswith(NOT_DRILLED)]
        command += f" --runs {tmp_path / 'runs'} " + " ".join(f"--set '{value}'" for value in tiny)
        command += " --minutes 0.25 --every 8 --set train.cpu_ranks=1"  # one fault, with time for a checkpoint before
        command = f"PYTHONPATH={with_fault(tmp_path / 'site', 'paced(0.1)')} {command}"
    elif command.startswith("finlm board"):  # looked at once, then Ctrl-C
        look = "python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1])'"
        command = f'coproc board {{ exec {command} --port 0; }}; pid=$board_PID; read -r -u "${{board[0]}}" at; '
        command += f'{look} "$at" && kill -INT $pid; wait $pid'
    elif command.startswith("git clone"):
        assert all(option in shell("git clone -h").stdout for option in re.findall(r"--[a-z-]+", command))
        return
    elif "s3://" in command:
        small = f"--set data.cache_dir={tmp_path / 'cache'} --set tokenizer.vocab_size=2048"
        command = command.replace("RECIPE", str(QUICKSTART)).replace("s3://bucket", "s3://corpus")
        command = f"{request.getfixturevalue('bucket')} {command} {small}"
    elif "=corpus/" in command:
        small = [text for text in TINY if not text.startswith("data.sources")]
        small += [f"data.cache_dir={tmp_path / 'cache'}"]
        options = " ".join(f"--set '{value}'" for value in small)
        if "pretrain_run" in command:
            options += f" --runs {tmp_path / 'runs'} --set tokenizer.vocab_size=2048"
            options += " --print torchrun"  # all that comes before the ranks
        command = command.replace("=corpus/", f"={request.getfixturevalue('corpus')}/") + " " + options
    result = shell(command)
    if NEEDS_DOWNLOAD.search(command) and not re.search(" plan | doctor |--toy", command):
        assert result.returncode == 2, result.stderr
        assert re.search("does not fit this cluster|no file matches|data/FinCorpus|models/", result.stderr), (
            result.stderr
        )
    else:  # diagnose and doctor say with 1 that they found something
        codes = {0, 1} if re.search(" (diagnose|doctor) ", command) else {0}
        assert result.returncode in codes, result.stderr[-3000:]
    assert " drill " not in command or ", 1 faults" in result.stdout
    printed = [" ".join(line.split()) for line in (result.stdout + result.stderr).splitlines()]
    missing = [line for line in expected if not any(one.startswith(line.removesuffix("...")) for one in printed)]
    assert missing == [], "a page shows other output"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["python.md", "python.zh-CN.md"])
def test_the_lines_for_python_run(page: str, shell: Shell, run_copies: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "page.py").write_text("".join(blocks).replace("runs/RUN", str(run_copies / "RUN")), encoding="utf-8")
    done = shell(f".venv/bin/python {tmp_path / 'page.py'}")
    assert done.returncode == 0, done.stderr
    plan, speed, run, losses = done.stdout.splitlines()
    assert plan.startswith("1 8 500 ") and re.fullmatch(r"[\d,]+ tokens/s, [\d.]+ days", speed)
    assert run.startswith("finished quickstart 20") and losses.startswith("(20, ")


def test_the_recipe_shown_in_the_readme_loads_and_plans(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "wider.yaml"
    path.write_text(text.replace("../quickstart/pretrain.yaml", str(QUICKSTART)), encoding="utf-8")
    result = finlm("plan", path)
    assert result.returncode == 0, result.stderr
    assert "model.hidden_size = 256" in result.stdout and "wider.yaml:3" in result.stdout
