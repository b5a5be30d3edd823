"""Every command and option of the command line, as `python -m finlm --help` shows them; what they do is in cli.py."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    root = argparse.ArgumentParser(prog="finlm", description="Pretraining recipes for financial language models.")
    root.add_argument("--version", action=_Version, nargs=0, help="print the version")
    root.add_argument(
        "--print-completion", action=_Completion, choices=("bash", "zsh"), help="print the shell's completion script"
    )
    commands = root.add_subparsers(required=True, metavar="COMMAND", dest="command")
    add = commands.add_parser

    command = add("prepare", help="documents -> clean -> dedup -> tokenizer -> shards; skips what is unchanged")
    _recipe_options(command)
    command.add_argument(
        "--show", type=_whole(0), default=0, metavar="N", help="print the first N rows of the run as text"
    )

    command = add("self-qa", help="questions and answers about the documents, by any model, as data for SFT")
    _recipe_options(command)

    command = add(
        "lint", help="what dialogues teach: rows with the learnt words marked, and what is wrong with the labels"
    )
    _recipe_options(command)
    command.add_argument("--rows", type=_whole(0), default=2, metavar="N", help="rows to print (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")

    command = add("new", help="a recipe of your own, made from another")
    command.add_argument("name", help="its name and folder, for example wider")
    command.add_argument(
        "--from", dest="parent", type=Path, required=True, metavar="RECIPE", help="what it starts from"
    )
    command.add_argument("--copy", action="store_true", help="with everything in it, instead of only what differs")
    command.add_argument("--recipes", type=Path, default=Path("recipes"), help="where to (default: %(default)s)")

    command = add("diff", help="what two recipes or runs say differently, and what follows for memory, time and tokens")
    command.add_argument("recipes", nargs="+", type=Path, metavar="RECIPE", help="two recipes or runs, or a fork alone")
    _cluster_options(command)
    command.add_argument("--json", action="store_true", help="print the differences as JSON on stdout")

    command = add("plan", help="what a run would do: memory, ZeRO stage, micro-batch, time, cost; needs no GPU")
    _recipe_options(command, nargs="?")
    _cluster_options(command)
    command.add_argument("--gpu-memory", metavar="BYTES", help="memory of a GPU kind that is not known, e.g. 48GiB")
    command.add_argument("--gpu-flops", type=_number(above=0), metavar="N", help="its dense 16-bit FLOP/s, e.g. 165e12")
    command.add_argument("--gpu-bandwidth", type=_number(above=0), metavar="N", help="its memory's bytes/s, e.g. 1e12")
    command.add_argument(
        "--gpu-capability", type=_number(above=0), metavar="X.Y", help="its compute capability, e.g. 8.6"
    )
    command.add_argument("--price", type=_number(0), metavar="N", help="price of a GPU-hour, in your currency")
    command.add_argument("--calibrate", action="store_true", help="measure this machine's GPUs for all later plans")
    command.add_argument("--json", action="store_true", help="print the plan as JSON on stdout")

    command = add("doctor", help="check every host of the hostfile, or this machine, against a recipe's plan")
    _recipe_options(command, nargs="?", default="recipes/quickstart/pretrain.yaml")
    _cluster_options(command, "hostfile.txt where it names hosts, else this machine")
    command.add_argument("--allreduce", action="store_true", help="also measure every link with real collectives")
    command.add_argument("--runs", type=Path, default=Path("runs"), help="where runs would go (default: %(default)s)")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    command.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")

    command = add("diagnose", help="name the cause of a failed run from its logs")
    command.add_argument("logs", nargs="+", metavar="LOG", help="log file, run directory, or - for standard input")
    command.add_argument("--lang", choices=("en", "zh"), default="en", help="language (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")

    command = add("train", help="prepare, plan, doctor, launch, export, report; resumes an unfinished run")
    _recipe_options(command)
    command.add_argument("--hostfile", help="hosts in DeepSpeed's format; default: hostfile.txt, else this machine")
    some = command.add_mutually_exclusive_group()
    some.add_argument("--include", default="", metavar="a@b:0,2", help="only these hosts (and slots) of the hostfile")
    some.add_argument("--exclude", default="", metavar="a@b:0,2", help="all but these hosts (and slots)")
    command.add_argument("--gpu", metavar="NAME", help="GPU kind of every host, e.g. A100-40G")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    command.add_argument("--runs", default="runs", help="directory of run directories (default: %(default)s)")
    command.add_argument("--new", action="store_true", help="start afresh even if an unfinished run exists")
    command.add_argument("--toy", action="store_true", help="the recipe shrunk to a minute on a laptop")
    command.add_argument(
        "--print",
        choices=("torchrun", "accelerate", "slurm", "k8s", "ray"),
        dest="adapter",
        help="only make the run directory and print what starts it under another launcher",
    )

    command = add("sync", help="copy this repository to every host of the hostfile and prove the copies equal")
    command.add_argument("--hostfile", type=Path, default=Path("hostfile.txt"), help="default: %(default)s")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    command.add_argument("--dry-run", action="store_true", help="say what would be copied")

    command = add("eval", help="what a model knows: held-out perplexity, or accuracy on multiple-choice questions")
    command.add_argument("checkpoint", type=Path, help="run, checkpoint, export or Hugging Face model directory")
    suites = ("perplexity", "exam", "recall", "financeiq", "ceval")
    command.add_argument(
        "--suite",
        choices=suites,
        default="perplexity",
        help="perplexity of held-out text (default); exam: the laws of the fictional world, asked of companies "
        "it has not read about; recall: what it has read of companies; financeiq, ceval: with --data",
    )
    command.add_argument("--data", type=Path, metavar="DIR", help="the folder of FinanceIQ or C-Eval")
    command.add_argument(
        "--mode",
        choices=("likelihood", "chat", "cloze"),
        help="the likeliest letter, the letter in a written answer, or the likeliest option per character; "
        "default: chat for models with a chat template, else likelihood",
    )
    command.add_argument(
        "--shots",
        type=_whole(0),
        metavar="N",
        help="solved examples before a question (default: 5; chat: 0; cloze: none)",
    )
    command.add_argument("--limit", type=_whole(1), metavar="N", help="ask a random N questions, the same every time")
    command.add_argument(
        "--world", type=Path, metavar="RECIPE", help="the world of this recipe instead of the run's own"
    )
    command.add_argument("--answers", type=Path, metavar="DIR", help="where answers are kept (default: in the run)")
    command.add_argument(
        "--contamination", type=Path, metavar="RUN", help="also look for the questions in what this run has read"
    )
    command.add_argument(
        "--write-lm-eval", type=Path, metavar="DIR", help="only write the suite as a task of lm-evaluation-harness"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")

    command = add("export", help="a checkpoint as a Hugging Face model, proved by reloading it")
    command.add_argument("checkpoint", type=Path, help="runs/<run>/checkpoints/step-N, or runs/<run> for its newest")
    command.add_argument("out", type=Path, help="new directory")
    command.add_argument("--shard-size", default="5GB", help="bytes of a weight file at most (default: %(default)s)")

    command = add("import-gguf", help="a GGUF file as a Hugging Face model directory")
    command.add_argument("file", type=Path, help="model.gguf")
    command.add_argument("out", type=Path, help="new directory")

    command = add("chat", help="talk to a model in the terminal")
    command.add_argument("checkpoint", type=Path, help="run, checkpoint, export or Hugging Face model directory")
    command.add_argument("--system", help="system message")
    command.add_argument(
        "--temperature", type=_number(0), default=0.7, help="0 = always the likeliest (default: %(default)s)"
    )
    command.add_argument(
        "--top-p", type=_number(above=0, most=1), default=0.9, help="nucleus sampling (default: %(default)s)"
    )
    command.add_argument("--tokens", type=_whole(1), default=512, help="of an answer at most (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")

    command = add("sample", help="continue a prompt")
    command.add_argument("model", type=Path, help="run, checkpoint, export or Hugging Face model directory")
    command.add_argument("prompt", help="text to continue")
    command.add_argument("--tokens", type=_whole(1), default=64, help="tokens at most (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")

    command = add("watch", help="a run as it goes: loss, speed, memory, when it ends")
    command.add_argument("run_dir", type=Path, metavar="RUN", help="runs/<run>")

    command = add("compare", help="what differs between two runs, and the step from which their losses do")
    command.add_argument("run_dirs", nargs=2, metavar="RUN", type=Path, help="runs/<run>")
    command.add_argument(
        "--tolerance", type=_number(0), default=0.0, help="of the loss, in nats (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")

    command = add("reproduce", help="run a finished run again, with its own code, recipe and data, and compare")
    command.add_argument("run_dir", type=Path, metavar="RUN", help="runs/<run>")
    command.add_argument(
        "--runs", type=Path, default=Path("runs"), help="where the new run goes (default: %(default)s)"
    )
    command.add_argument(
        "--tolerance", type=_number(0), default=0.0, help="of the loss, in nats (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")

    command = add("verify-resume", help="prove that a recipe's run, killed and resumed, equals one that was not")
    _recipe_options(command)
    command.add_argument("--kills", type=_whole(0), default=2, metavar="N", help="SIGKILLs (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    command.add_argument("--runs", type=Path, help="keep both runs there; default: a scratch directory that is removed")
    command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")

    command = add("track", help="send a run's metrics to TensorBoard, W&B or trackio")
    command.add_argument("run_dir", type=Path, metavar="RUN", help="runs/<run>")
    command.add_argument(
        "--to", action="append", required=True, choices=("tensorboard", "wandb", "trackio"), help="repeatable"
    )
    command.add_argument("--follow", action="store_true", help="until the run ends")

    command = add("report", help="build a run's report.html, or one page of several runs")
    command.add_argument("run_dir", nargs="+", help="runs/<run>")
    command.add_argument(
        "--out", type=Path, help="file; default: the run's report.html, or side-by-side.html beside the first"
    )
    return root


def _recipe_options(command: argparse.ArgumentParser, **positional: Any) -> None:
    command.add_argument("recipe", help="recipes/<family>/<stage>.yaml", **positional)
    command.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="override a key; repeatable")


def _cluster_options(command: argparse.ArgumentParser, otherwise: str = "the recipe's hardware section") -> None:
    where = command.add_mutually_exclusive_group()
    where.add_argument("--hostfile", help=f"hosts in DeepSpeed's format; default: {otherwise}")
    where.add_argument("--local", action="store_true", help="this machine instead of the recipe's hardware")
    command.add_argument("--gpu", metavar="NAME", help="GPU kind of every host, e.g. A100-40G")


def _whole(least: int) -> Callable[[str], int]:
    """A whole number of at least this."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return read


def _number(least: float = -math.inf, *, above: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """A finite number within these bounds."""
    bounds = {"at least": least, "above": above, "at most": most}
    said = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most and value > above):
            raise argparse.ArgumentTypeError(f"expected a number {said}, got {text!r}")
        return value

    return read


class _Version(argparse.Action):
    """Reads the version only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from finlm.record import manifest

        print(f"{parser.prog} {manifest.version()}")
        parser.exit()


class _Completion(argparse.Action):
    """Writes the script from the options above, so that it never misses one."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, __: Any = None) -> NoReturn:
        import shtab

        for command in _commands(parser):
            for action in command._actions:
                if action.type is Path or action.dest in ("recipe", "hostfile", "runs", "run_dir", "logs"):
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell))
        parser.exit()


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return list(commands.choices.values())
