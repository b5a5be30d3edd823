"""Run `finlm admit MODEL`: does finlm train this model as transformers does? Print a table of checks and results.

A check, called cell, has passed or says what is wrong. A type that model_types.json does not have is admitted for this
user when every cell passes: its row goes to ~/.config/finlm/model_types.json.

The last cells train a small model of the type, in runs of four steps on two CPU ranks: ZeRO stages give the same
losses, a run that goes on from a checkpoint gives those of a run that did not stop, and the export is transformers'
model again with every field of the start's config.json.

`python -m finlm.admit.command` forks the ranks, because it has imported the trainer: it reads a run directory a line on
stdin, and writes the exit codes of its ranks, a line of JSON, to a pipe: libraries print on stdout.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoTokenizer, Qwen2Tokenizer

import finlm
from finlm import pipeline
from finlm.admit import cells, record
from finlm.base import files, processes, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.dialogues import encode
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.models import config_json, refusals, traits
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Chat, Sft

STEPS, RANKS = 4, 2
TOLERANCE = 2e-5  # share of the loss; sums over ranks and partitions round otherwise
VOCABULARY = 1024  # byte-level pieces, at most
PROSE = Path(finlm.__file__).parent / "world/prose"
RECIPE = "recipes/quickstart/pretrain.yaml"
# What a run decides of config.json, or saving does.
DECIDED = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id", "vocab_size"),
)
DIALOGUE = [
    {"role": "user", "content": "净利润是什么？"},
    {"role": "assistant", "content": "收入减去成本、费用和税。"},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "You are welcome."},
]


@dataclass(frozen=True)
class Verdict:
    """Whether every cell passed, the seconds that took, and what is wrong by cell, "" for a passed cell."""

    model_type: str
    admitted: bool
    seconds: float
    cells: dict[str, str]


def admit(model: str) -> Verdict:
    """Run every cell on a model directory or model_type, print the table and return the verdict; takes minutes.

    If a type that is new to finlm passes, writes its row to the user's model_types.json and says so on stderr. Turns
    transformers' progress bars and warnings off. UserError if it is no model, or of a structure that no cell can check.
    """
    began = time.monotonic()
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    config, directory = read_config(model)
    refusals.refuse_unsupported(dict(config), model)
    model_type = str(config["model_type"])
    row = make_row(model_type)
    with tempfile.TemporaryDirectory(prefix="finlm-admit-") as shared, Trainer(Path(shared)) as trainer:
        results = dict(examine(config, row, directory, trainer))
    screen.table(("cell", "result"), [(name, why or "passed") for name, why in results.items()])
    passed = not any(results.values())
    if passed and model_type not in files.read_json(traits.RECORD):
        theirs = files.read_json(traits.user_file()) if traits.user_file().is_file() else {}
        known = {name: traits.TypeRecord(**values) for name, values in theirs.items()}
        traits.write_records(known | {model_type: dataclasses.replace(row, cells=results)}, traits.user_file())
        screen.say(f"{model_type} is admitted; noted in {traits.user_file()}")
    return Verdict(model_type, passed, round(time.monotonic() - began, 1), results)


def read_config(model: str) -> tuple[traits.Config, Path | None]:
    """Return (config.json, directory) of a model directory, or (default configuration, None) of a model_type.

    The default is transformers', with dropout and jitter 0, small values for null numbers of heads and experts, and no
    null keys. Raises UserError when `model` is neither, or a type whose class rejects its own defaults.
    """
    path = Path(model)
    if (path / "config.json").is_file():
        return dict(config_json.read_config(path / "config.json")), path
    if path.is_dir() or model not in CONFIG_MAPPING:
        raise UserError(
            f"there is no model {model}",
            evidence=f"no {path / 'config.json'}, and no model_type of transformers {transformers.__version__}",
            fix="give a directory with config.json, or a model_type such as qwen3",
        )
    try:
        defaults = record.whole_config(model).to_dict()
    except Exception as error:  # of transformers' classes there are many kinds
        raise UserError(
            f"transformers' {model} has no default configuration",
            evidence=" ".join(str(error).split())[:200],
            fix="give a directory with config.json",
        ) from None
    heads = defaults.get("num_attention_heads")
    if defaults.get("hidden_size") and heads:  # what some classes have no default for, as Llama's has it
        like = {"head_dim": defaults["hidden_size"] // heads, "num_key_value_heads": heads, "num_experts_per_tok": 2}
        like |= {"n_routed_experts": 8, "n_shared_experts": 1}
        defaults |= {key: value for key, value in like.items() if key in defaults and defaults[key] is None}
    return {k: 0.0 if k.endswith(traits.NOISE) else v for k, v in defaults.items() if v is not None}, None


def make_row(model_type: str) -> traits.TypeRecord:
    """Return the table row of a type, with `held` filled in if its class can be built; builds and runs small models.

    Raises UserError for a type that no cell can check.
    """
    row = record.record(model_type)
    try:
        with admitted(model_type, row), redirect_stderr(io.StringIO()):
            return cells.fill_held(cells.make_case(read_config(model_type)[0], row, *_small_run()))
    except Exception:  # a class that its own configuration cannot build: the cells say what is wrong
        return row


def _small_run() -> tuple[Recipe, Plan]:
    """Return (recipe, plan) of the small models, on a single CPU rank."""
    loaded = recipe.load(RECIPE, ("hardware.hosts=[{name: localhost, slots: 1}]",)).recipe
    return loaded, planner.make(loaded, cluster.from_hardware(loaded.hardware), shape.of(loaded))


def examine(
    config: traits.Config, row: traits.TypeRecord, directory: Path | None, trainer: Trainer
) -> Iterator[tuple[str, str]]:
    """Run every cell; yield its name with what is wrong, or "" if it passed.

    The template's cell runs only if `directory` has a chat template. If no start model can be made, the first cell that
    trains is wrong and the others are left out. Raises UserError when transformers rejects the configuration.
    """
    model_type = str(config["model_type"])
    with admitted(model_type, row), tempfile.TemporaryDirectory(prefix="finlm-admit-") as scratch:
        case = cells.make_case(config, row, *_small_run())
        for name, cell in cells.CELLS.items():
            yield name, _run_cell(cell, case)
        try:
            made = Runs(case, Path(scratch), trainer)
        except Exception as error:  # a class that its own configuration cannot build
            yield next(iter(TRAINING)), f"{type(error).__name__}: {error}"
            return
        for name, trains in TRAINING.items():
            yield name, _run_cell(trains, made)
    if directory is not None and _has_template(directory):
        yield "template", _run_cell(check_template, directory)


def _has_template(directory: Path) -> bool:
    """Return whether a tokenizer with a chat template is here. Raises NotJson for a damaged tokenizer_config.json."""
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return False
    settings = directory / "tokenizer_config.json"
    said = files.read_json(settings) if settings.is_file() else {}
    return (directory / "chat_template.jinja").is_file() or bool(said.get("chat_template"))


def check_template(directory: Path) -> str:
    """Return how a dialogue's ids or loss spans differ from those by the model's own template; "" if equal."""
    encoder = encode.Encoder(encode.Rules(directory, Chat(template="model"), Sft(), 2**20))
    theirs = AutoTokenizer.from_pretrained(directory).apply_chat_template(DIALOGUE, tokenize=True, return_dict=False)
    encoded = encoder.encode(DIALOGUE)
    if encoded.ids != list(theirs):
        return f"ids {encoded.ids[:8]}, the tokenizer's own {list(theirs)[:8]}"
    learnt = encoder.tokenizer.decode([token for token, counts in zip(*encoded, strict=True) if counts])
    if lost := [turn["content"] for turn in DIALOGUE if (turn["content"] in learnt) != (turn["role"] == "assistant")]:
        return f"the loss is on {learnt!r}, which is wrong about {lost[0]!r}"
    return ""


def _run_cell(cell: Callable[[Any], str], subject: Any) -> str:
    """Run a cell on a case, runs or directory; return what is wrong, returned or raised, or "". Hides stderr."""
    with redirect_stderr(io.StringIO()):  # plans, library warnings
        try:
            return cell(subject)
        except UserError as error:
            return " ".join(f"{error.problem}: {error.evidence}".split())
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Trainer:
    """Starts the process that ranks are forked from, and trains a tokenizer; all runs share its corpus and settings.

    A context manager: at its end the process is closed, after 30 s killed.
    """

    def __init__(self, shared: Path) -> None:
        """Train the tokenizer on finlm's own prose and start the process; `shared` will hold cache and settings."""
        self.cache, self.settings = shared / "cache", shared / "settings"
        # Of a class that AutoTokenizer takes for every model type; it would read some types' sentencepiece as another.
        prose = (path.read_text(encoding="utf-8") for path in sorted(PROSE.glob("*.txt")))
        self.tokenizer = Qwen2Tokenizer().train_new_from_iterator(prose, VOCABULARY)
        env = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(self.settings)}
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "finlm.admit.command", str(write_end)]
        pipe, lost = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=lost, stderr=lost, text=True, env=env, pass_fds=(write_end,)
        )
        os.close(write_end)
        self.answers = os.fdopen(read_end)

    def train(self, run: RunDir) -> None:
        """Run the ranks of a run directory to the last step. RuntimeError with a log's last line if a rank fails."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it has ended; there is no answer then
            self.process.stdin.write(json.dumps([str(run.path), RANKS]) + "\n")
            self.process.stdin.flush()
        answer = self.answers.readline()
        if not answer or any(json.loads(answer)):
            lines = [line for log in sorted(run.logs.glob("*.log")) for line in log.read_text().splitlines() if line]
            raise RuntimeError(lines[-1] if lines else "the ranks wrote no log")

    def __enter__(self) -> Trainer:
        """Return the trainer, whose process runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the process's input, wait up to 30 s for its end, else kill it."""
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:  # it has nothing left to write
            self.process.kill()
            self.process.wait()
        self.answers.close()


class Runs:
    """The runs of a small model in a scratch directory; each run is trained once and then reused."""

    def __init__(self, case: cells.Case, scratch: Path, trainer: Trainer) -> None:
        """Write a small start model with random weights, and the type's row to the trainer's settings; seed torch."""
        self.scratch, self.trainer = scratch, trainer
        self.start = scratch / "start"
        self.made: dict[int, RunDir] = {}
        traits.write_records({case.small.model_type: case.row}, trainer.settings / "finlm" / traits.RECORD.name)
        trainer.tokenizer.save_pretrained(self.start)
        config = cells.shrink(case.config, case.row, len(trainer.tokenizer))
        cells.build(config, "eager").save_pretrained(self.start)
        said = files.read_json(self.start / "config.json")
        files.write_json(self.start / "config.json", said | {"of_the_author": [1]})

    def run(self, stage: int) -> RunDir:
        """Return the finished run at this ZeRO stage; prepare and train it at the first call.

        Raises UserError if it cannot be prepared or planned, RuntimeError with the last line of its log if it failed.
        """
        if stage not in self.made:
            loaded = recipe.load(RECIPE, self._overrides(stage))
            host = cluster.Host("localhost", RANKS, None, 8 * 2**30)
            t = pipeline.Training(loaded, cluster.Cluster((host,)), self.scratch / f"runs-{stage}")
            pipeline.prepare_data(t)
            pipeline.plan_run(t)
            run = pipeline.create_run(t)
            self.trainer.train(run)
            self.made[stage] = run
        return self.made[stage]

    def _overrides(self, stage: int) -> tuple[str, ...]:
        """Return the --set values for a run of STEPS steps at this ZeRO stage, from the small model in self.start."""
        config = files.read_json(self.start / "config.json")
        eps = next((config[key] for key in traits.NORM_EPS if config.get(key) is not None), 1e-5)
        return (
            f"model.init_from={self.start}",
            f"model.hidden_size={config['hidden_size']}",
            f"model.layers={config['num_hidden_layers']}",
            f"model.heads={config['num_attention_heads']}",
            f"model.kv_heads={config.get('num_key_value_heads', config['num_attention_heads'])}",
            f"model.ffn_size={config['intermediate_size']}",
            f"model.tie_embeddings={json.dumps(config['tie_word_embeddings'])}",
            f"model.rope_theta={traits.rope_theta(config)}",
            f"model.norm_eps={eps}",
            "tokenizer={}",
            "data.sources=[{synthetic: {size: 1MB, held_out_size: 100KB, seed: 3}}]",
            f"data.cache_dir={self.trainer.cache}",
            "data.document_masks=true",
            "data.num_proc=1",
            "batch={sequence_length: 64, tokens_per_step: 512, micro_batch: 2}",
            f"train.steps={STEPS}",
            f"train.cpu_ranks={RANKS}",
            "optim.warmup_steps=2",
            f"zero.stage={stage}",
            "eval.every_steps=null",
            "eval.suites=[]",
            f"checkpoint={{every_steps: {STEPS // 2}, keep_last: 2}}",
        )


@contextmanager
def admitted(model_type: str, row: traits.TypeRecord) -> Iterator[None]:
    """Treat the type as admitted, with this row, in the block: replaces traits.records. Raises what that raises."""
    known = dict(traits.records())
    former, traits.records = traits.records, lambda: known | {model_type: row}  # type: ignore[assignment]
    try:
        yield
    finally:
        traits.records = former


def losses(run: RunDir) -> list[float]:
    """Return each step's loss in the run's events, NaN where it was not finite; of a repeated step the last."""
    by_step = {row["step"]: math.nan if row["loss"] is None else row["loss"] for row in run.read_events("step")}
    return [by_step[step] for step in sorted(by_step)]


def check_stages(runs: Runs) -> str:
    """Return how losses at ZeRO-1 or ZeRO-3 differ from ZeRO-0's, or that ZeRO-0's do not change; "" if all is well.

    Trains the runs that are not there yet; raises what Runs.run() raises.
    """
    expected = losses(runs.run(0))
    for stage in (1, 3):
        of_stage = losses(runs.run(stage))
        if not all(map(math.isfinite, [*expected, *of_stage])):
            return f"losses that are not finite: at ZeRO-0 {expected}, at ZeRO-{stage} {of_stage}"
        pairs = zip(of_stage, expected, strict=True)
        if (off := max(abs(loss - other) / abs(other) for loss, other in pairs)) > TOLERANCE:
            return f"a loss at ZeRO-{stage} is {off:.1e} of it away from ZeRO-0's"
    return "" if expected[-1] != expected[0] else "the loss does not move"


def check_resume(runs: Runs) -> str:
    """Train a copy of the run, without its last checkpoint, to the end again; return what is wrong, "" if nothing.

    It is wrong if the copy does not begin at its checkpoint, step STEPS // 2, or if its losses differ from the run's.
    Raises what Runs.run() raises, and FileExistsError if scratch/half exists.
    """
    whole = runs.run(1)
    half = RunDir(runs.scratch / "half" / whole.path.name)
    shutil.copytree(whole.path, half.path)
    shutil.rmtree(half.checkpoints / f"step-{STEPS}")
    expected = losses(whole)
    runs.trainer.train(half)
    begun = [row["step"] for row in half.read_events("start")]
    if STEPS // 2 not in begun:
        return f"the run began at step {begun[-1]}, not at its checkpoint"
    return "" if losses(half) == expected else f"losses {losses(half)}, without a stop {expected}"


def check_export(runs: Runs) -> str:
    """Export a run to scratch/export; return which field of the start's config.json the export changed, "" if none.

    Raises RuntimeError if the export, loaded again, is not the trained model, UserError if the directory exists.
    """
    from finlm.inference import export

    run, out = runs.run(1), runs.scratch / "export"
    export.export(run.checkpoints / f"step-{STEPS}", out)
    exported, start = files.read_json(out / "config.json"), files.read_json(runs.start / "config.json")
    lost = [key for key, value in start.items() if key not in DECIDED and exported.get(key) != value]
    return f"config.json: {lost[0]} is {exported.get(lost[0])}, the start's {start[lost[0]]}" if lost else ""


TRAINING: dict[str, Callable[[Runs], str]] = {
    "ZeRO-0, 1 and 3": check_stages,
    "resume": check_resume,
    "export": check_export,
}


def main() -> None:
    """Read [run directory, ranks] as lines of JSON from stdin until it closes; fork them and write their exit codes.

    The first argument of the command line is the file descriptor to write to.
    """
    answers = os.fdopen(int(sys.argv[1]), "w")
    importlib.import_module("finlm.train.pretrain")
    for line in sys.stdin:
        path, world_size = json.loads(line)
        print(json.dumps(fork_ranks(path, world_size)), file=answers, flush=True)


def fork_ranks(path: str, world_size: int) -> list[int]:
    """Fork the ranks of a run directory, wait for them, and return their exit codes by rank (negative: a signal).

    They meet at a free port of 127.0.0.1. When a rank fails, kills the others. Waits for any child of this process.
    """
    shared = {"WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size), "FINLM_HOST": "localhost"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port(0))}
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            try:
                os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
                sys.argv[:] = ["finlm.train", path]
                from finlm.train import __main__

                __main__.main()
            finally:
                os._exit(99)  # main does not return
        children.append(child)
    codes: dict[int, int] = {}
    while len(codes) < world_size:
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:
            for other in set(children) - codes.keys():
                os.kill(other, 9)
    return [codes[child] for child in children]


if __name__ == "__main__":
    main()
