"""Checks (cells) of `finlm admit` that train: a small model of the type, in runs of four steps on two CPU ranks.

ZeRO stages give the same losses, a run that goes on from a checkpoint gives those of a run that did not stop, and the
export is transformers' model again with every field of the start's config.json. The corpus is the synthetic corpus.

`python -m finlm.admit.runs` is the process that the ranks are forked from, because it has imported the trainer: a run
directory a line on stdin, its ranks' exit codes a line of JSON on a pipe of its own, as libraries print on stdout. A
launch through `finlm train` would import torch and DeepSpeed anew for every rank of every run, which is most of such a
run's time.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers import Qwen2Tokenizer

import finlm
from finlm import pipeline
from finlm.admit import cells
from finlm.base import files, processes
from finlm.base.rundir import RunDir
from finlm.recipe import cluster, recipe
from finlm.recipe.models import traits

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
        command = [sys.executable, "-m", "finlm.admit.runs", str(write_end)]
        pipe, lost = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=lost, stderr=lost, text=True, env=env, pass_fds=(write_end,)
        )
        os.close(write_end)
        self.answers = os.fdopen(read_end)

    def train(self, run: RunDir) -> None:
        """Run the ranks of a run directory to the last step.

        Raises RuntimeError with the last line of a log if a rank fails or the process is gone.
        """
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

        Raises RuntimeError with the last line of its log if it failed.
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
    """Make this process treat the type as admitted, with this row, in the block; replaces traits.records."""
    known = dict(traits.records())
    former, traits.records = traits.records, lambda: known | {model_type: row}  # type: ignore[assignment]
    try:
        yield
    finally:
        traits.records = former


def losses(run: RunDir) -> list[float]:
    """Return the loss of every step, in order of steps; of a repeated step the last."""
    by_step = {row["step"]: row["loss"] for row in run.read_events("step")}
    return [by_step[step] for step in sorted(by_step)]


def _largest_difference(actual: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists of losses, for example 2e-5.

    Raises ValueError if they are empty or of different length.
    """
    return max(abs(loss - other) / abs(other) for loss, other in zip(actual, expected, strict=True))


def check_stages(runs: Runs) -> str:
    """Return how losses at ZeRO-1 or ZeRO-3 differ from ZeRO-0's, or that ZeRO-0's do not change; "" if all is well.

    Trains the runs that are not there yet. Raises RuntimeError when ranks fail.
    """
    expected = losses(runs.run(0))
    for stage in (1, 3):
        if (off := _largest_difference(losses(runs.run(stage)), expected)) > TOLERANCE:
            return f"a loss at ZeRO-{stage} is {off:.1e} of it away from ZeRO-0's"
    return "" if expected[-1] != expected[0] else "the loss does not move"


def check_resume(runs: Runs) -> str:
    """Train a copy of the run, without its last checkpoint, to the end again; return what is wrong, "" if nothing.

    It is wrong if the copy does not begin at its checkpoint, step STEPS // 2, or if its losses differ from the run's.
    Makes the copy in scratch/half, where it must not exist yet (FileExistsError). Raises RuntimeError when the ranks
    fail.
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


CELLS: dict[str, Callable[[Runs], str]] = {
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

    They meet at a free port of 127.0.0.1. When a rank fails, the others are killed.
    """
    port = str(processes.free_port(0))
    shared = {"WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size), "FINLM_HOST": "localhost"}
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            try:
                os.environ.update(
                    shared, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), LOCAL_RANK=str(rank)
                )
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
