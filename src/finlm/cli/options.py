"""Define every command and option, as `python -m finlm --help` shows them; what they do is in main.py."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from finlm.base import language, screen
from finlm.cli.parser import Parser

_Add = Callable[..., argparse.ArgumentParser]


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    root = Parser(prog="finlm", description="Pretraining recipes for financial language models.")
    root.add_argument("--version", action=_Version, nargs=0, help="print the version")
    root.add_argument(
        "--print-completion", action=_Completion, choices=("bash", "zsh"), help="print the shell's completion script"
    )
    commands = root.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for add_commands in (
        _add_data,
        _add_recipes,
        _add_hosts,
        _add_training,
        _add_drill,
        _add_evaluation,
        _add_attempts,
        _add_models,
        _add_runs,
    ):
        add_commands(commands.add_parser)
    for command in (root, *commands.choices.values()):
        command.add_argument(
            "--lang",
            choices=language.LANGUAGES,
            help="language of messages; default: FINLM_LANG, else the environment's (LC_ALL, LC_MESSAGES, LANG)",
        )
    return root


def _add_data(add: _Add) -> None:
    """Add the commands prepare, self-qa and lint."""
    command = add("prepare", help="documents -> clean -> dedup -> tokenizer -> shards; skips what is unchanged")
    _recipe_options(command)
    command.add_argument(
        "--show", type=_whole_number(0), default=0, metavar="N", help="print the first N rows of the run as text"
    )
    command.add_argument("--hostfile", help="hosts of data.engine: ray; default: hostfile.txt, else this machine")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")

    command = add("self-qa", help="questions and answers about the documents, by any model, as data for SFT")
    _recipe_options(command)

    command = add(
        "lint", help="what dialogues teach: rows with the learnt words marked, and what is wrong with the labels"
    )
    _recipe_options(command)
    command.add_argument(
        "--rows", type=_whole_number(0), default=2, metavar="N", help="rows to print (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")


def _add_recipes(add: _Add) -> None:
    """Add the commands new, diff and plan."""
    command = add("new", help="a recipe of your own, made from another, or for a model that none is for")
    command.add_argument("name", help="its name and folder, for example wider")
    start = command.add_mutually_exclusive_group(required=True)
    start.add_argument("--from", dest="parent", type=Path, metavar="RECIPE", help="what it starts from")
    start.add_argument("--model", metavar="DIR_OR_ID", help="a model directory or a model of the Hugging Face Hub")
    command.add_argument("--copy", action="store_true", help="with everything in it, instead of only what differs")
    command.add_argument("--revision", metavar="COMMIT", help="of a model of the Hub")
    command.add_argument(
        "--stage", choices=("pretrain", "sft"), default="pretrain", help="what for, with --model (default: %(default)s)"
    )
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
    command.add_argument(
        "--failures", type=_number(above=0), metavar="N", help="failures a host and day: how much of the time trains"
    )
    command.add_argument(
        "--restart-seconds",
        type=_number(0),
        default=120.0,
        metavar="N",
        help="until the ranks train again after a failure, as `finlm drill` measures it (default: %(default)g)",
    )
    command.add_argument("--calibrate", action="store_true", help="measure this machine's GPUs for all later plans")
    command.add_argument("--json", action="store_true", help="print the plan as JSON on stdout")


def _add_hosts(add: _Add) -> None:
    """Add the commands doctor and diagnose."""
    command = add("doctor", help="check every host of the hostfile, or this machine, against a recipe's plan")
    _recipe_options(command, nargs="?", default="recipes/quickstart/pretrain.yaml")
    _cluster_options(command, "hostfile.txt where it names hosts, else this machine")
    command.add_argument("--allreduce", action="store_true", help="also measure every link with real collectives")
    command.add_argument("--runs", type=Path, default=Path("runs"), help="where runs would go (default: %(default)s)")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    command.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")

    command = add("diagnose", help="name the cause of a failed run from its logs")
    command.add_argument("logs", nargs="+", metavar="LOG", help="log file, run directory, or - for standard input")
    command.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")
    command.add_argument(
        "--ask",
        metavar="ENDPOINT",
        help="OpenAI-compatible address asked where the cause is unknown, with masked evidence",
    )


def _add_training(add: _Add) -> None:
    """Add the commands train and sync."""
    command = add("train", help="prepare, plan, doctor, launch, export, report; resumes an unfinished run")
    _recipe_options(command)
    command.add_argument("--hostfile", help="hosts in DeepSpeed's format; default: hostfile.txt, else this machine")
    some = command.add_mutually_exclusive_group()
    some.add_argument("--include", default="", metavar="a@b:0,2", help="only these hosts (and slots) of the hostfile")
    some.add_argument(
        "--exclude",
        default="",
        metavar="a@b:0,2",
        help="all but these hosts (and slots); goes on without a lost "
        "host where the parts of its checkpoint are here (checkpoint.copies)",
    )
    command.add_argument("--gpu", metavar="NAME", help="GPU kind of every host, e.g. A100-40G")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    command.add_argument("--runs", default="runs", help="directory of run directories (default: %(default)s)")
    afresh = command.add_mutually_exclusive_group()
    afresh.add_argument("--new", action="store_true", help="start afresh even if an unfinished run exists")
    afresh.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="go on from the newest finished run of the recipe, with more steps or another learning rate",
    )
    command.add_argument("--toy", action="store_true", help="the recipe shrunk to a minute on a laptop")
    instead = command.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true", help="only print the steps: what is done and what is to do; write nothing"
    )
    instead.add_argument(
        "--print",
        choices=("torchrun", "accelerate", "slurm", "k8s", "ray"),
        dest="adapter",
        help="only make the run directory and print what starts it under another launcher",
    )

    command = add("sync", help="copy this repository to every host of the hostfile and prove the copies equal")
    command.add_argument("--hostfile", type=Path, default=Path("hostfile.txt"), help="default: %(default)s")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    command.add_argument("--dry-run", action="store_true", help="say what would be copied")


def _add_drill(add: _Add) -> None:
    """Add the command drill."""
    command = add("drill", help="break a run of a recipe on purpose, on its hosts, and measure how it recovers")
    _recipe_options(command)
    command.add_argument("--hostfile", help="hosts in DeepSpeed's format; default: hostfile.txt, else this machine")
    command.add_argument("--gpu", metavar="NAME", help="GPU kind of every host, e.g. A100-40G")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    command.add_argument("--runs", default="runs/drill", help="directory of its runs (default: %(default)s)")
    command.add_argument("--minutes", type=_number(above=0), default=20.0, help="how long (default: %(default)s)")
    command.add_argument(
        "--every", type=_number(above=0), default=120.0, metavar="SECONDS", help="a fault (default: %(default)s)"
    )
    command.add_argument("--faults", default="", metavar="a,b", help="which, in this order (default: all)")
    command.add_argument(
        "--seed", type=int, default=0, help="0: the faults in order; else at random, by this seed (default: 0)"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


def _add_evaluation(add: _Add) -> None:
    """Add the command eval."""
    command = add("eval", help="what a model knows: held-out perplexity, or accuracy on multiple-choice questions")
    command.add_argument("checkpoint", type=Path, help="run, checkpoint, export or Hugging Face model directory")
    suites = ("perplexity", "exam", "recall", "financeiq", "ceval", "fineval", "cflue")
    command.add_argument(
        "--suite",
        choices=suites,
        default="perplexity",
        help="perplexity of held-out text (default); exam: the laws of the fictional world, asked of companies "
        "it has not read about; recall: what it has read of companies; financeiq, ceval, fineval, cflue: with --data",
    )
    command.add_argument("--data", type=Path, metavar="DIR", help="the folder of FinanceIQ, C-Eval, FinEval or CFLUE")
    command.add_argument(
        "--mode",
        choices=("likelihood", "chat", "cloze", "published"),
        help="the likeliest letter, the letter in a written answer, or the likeliest option per character; published: "
        "as FinanceIQ's own code asks base models; default: chat for models with a chat template, else likelihood",
    )
    command.add_argument(
        "--shots",
        type=_whole_number(0),
        metavar="N",
        help="solved examples before a question (default: 5; chat: 0; cloze: none)",
    )
    command.add_argument(
        "--limit", type=_whole_number(1), metavar="N", help="ask a random N questions, the same every time"
    )
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


def _add_attempts(add: _Add) -> None:
    """Add the command attempt."""
    command = add(
        "attempt", help="several answers to each prompt of a GRPO recipe: pass@k, maj@k, the best as SFT data"
    )
    _recipe_options(command)
    command.add_argument("--model", type=Path, required=True, help="run, export or Hugging Face model directory")
    command.add_argument(
        "--count", type=_whole_number(1), default=8, metavar="N", help="attempts a prompt (default: %(default)s)"
    )
    command.add_argument("--split", choices=("held_out", "train"), default="held_out", help="default: %(default)s")
    command.add_argument("--limit", type=_whole_number(1), metavar="N", help="only the first N prompts")
    command.add_argument("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")
    command.add_argument("--best", type=Path, metavar="FILE", help="write each prompt's best right answer as messages")
    command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


def _add_models(add: _Add) -> None:
    """Add the commands admit, export, import-gguf, chat, serve and sample."""
    command = add("admit", help="whether finlm trains a model as transformers does, cell by cell; admits its type")
    command.add_argument("model", help="directory with config.json, or a model_type such as qwen3")
    command.add_argument("--json", action="store_true", help="print the verdict as JSON on stdout")

    command = add("export", help="a checkpoint as a Hugging Face model, proved by reloading it")
    command.add_argument("checkpoint", type=Path, help="runs/<run>/checkpoints/step-N, or runs/<run> for its newest")
    command.add_argument("out", type=Path, help="new directory")
    command.add_argument("--shard-size", default="5GB", help="bytes of a weight file at most (default: %(default)s)")

    command.add_argument("--adapter", action="store_true", help="the LoRA adapters alone, as peft reads them")

    command = add("import-gguf", help="a GGUF file as a Hugging Face model directory")
    command.add_argument("file", type=Path, help="model.gguf")
    command.add_argument("out", type=Path, help="new directory")

    command = add("chat", help="talk to a model in the terminal")
    command.add_argument("checkpoint", type=Path, help="run, checkpoint, export or Hugging Face model directory")
    command.add_argument("--system", help="system message")
    command.add_argument("--tools", type=Path, metavar="FILE", help="JSON list of functions that the model may call")
    command.add_argument(
        "--temperature", type=_number(0), default=0.7, help="0 = always the likeliest (default: %(default)s)"
    )
    command.add_argument(
        "--top-p", type=_number(above=0, most=1), default=0.9, help="nucleus sampling (default: %(default)s)"
    )
    command.add_argument(
        "--tokens", type=_whole_number(1), default=512, help="of an answer at most (default: %(default)s)"
    )
    command.add_argument("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")

    command = add("serve", help="an OpenAI-compatible endpoint, by the server that transformers or vLLM ships")
    command.add_argument("model", type=Path, help="run, export or Hugging Face model directory")
    command.add_argument("--host", default="localhost", help="address to listen at (default: %(default)s)")
    command.add_argument("--port", type=_whole_number(1), default=8000, help="(default: %(default)s)")
    command.add_argument(
        "--engine",
        choices=("auto", "transformers", "vllm"),
        default="auto",
        help="auto: vLLM where it is installed and there is a GPU, else transformers (default: %(default)s)",
    )

    command = add("sample", help="continue a prompt")
    command.add_argument("model", type=Path, help="run, checkpoint, export or Hugging Face model directory")
    command.add_argument("prompt", help="text to continue")
    command.add_argument("--tokens", type=_whole_number(1), default=64, help="tokens at most (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")


def _add_runs(add: _Add) -> None:
    """Add the commands runs, watch, compare, reproduce, verify-resume, track and report."""
    command = add("runs", help="the runs in a directory: state, step, loss, speed, recipe, what they start from")
    command.add_argument("--runs", type=Path, default=Path("runs"), help="directory of runs (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print the runs as JSON on stdout")

    _add_board(add)

    command = add("watch", help="a run as it goes: loss, speed, memory, when it ends")
    command.add_argument("run_dir", type=Path, metavar="RUN", help="runs/<run>, its recipe's name, or latest")

    command = add("compare", help="what differs between two runs, and the step from which their losses do")
    command.add_argument("run_dirs", nargs=2, metavar="RUN", type=Path, help="runs/<run>, its recipe's name, or latest")
    command.add_argument(
        "--tolerance", type=_number(0), default=0.0, help="of the loss, in nats (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")

    command = add("reproduce", help="run a finished run again, with its own code, recipe and data, and compare")
    command.add_argument("run_dir", type=Path, metavar="RUN", help="runs/<run>, its recipe's name, or latest")
    command.add_argument(
        "--runs", type=Path, default=Path("runs"), help="where the new run goes (default: %(default)s)"
    )
    command.add_argument(
        "--tolerance", type=_number(0), default=0.0, help="of the loss, in nats (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")

    command = add("verify-resume", help="prove that a recipe's run, killed and resumed, equals one that was not")
    _recipe_options(command)
    command.add_argument(
        "--kills", type=_whole_number(0), default=2, metavar="N", help="SIGKILLs (default: %(default)s)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    command.add_argument("--runs", type=Path, help="keep both runs there; default: a scratch directory that is removed")
    command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")

    command = add("track", help="send a run's metrics to TensorBoard, W&B or trackio")
    command.add_argument("run_dir", type=Path, metavar="RUN", help="runs/<run>, its recipe's name, or latest")
    command.add_argument(
        "--to", action="append", required=True, choices=("tensorboard", "wandb", "trackio"), help="repeatable"
    )
    command.add_argument("--follow", action="store_true", help="until the run ends")

    command = add("report", help="build a run's report.html, or one page of several runs")
    command.add_argument("run_dir", nargs="+", help="runs/<run>, its recipe's name, or latest")
    command.add_argument(
        "--out", type=Path, help="file; default: the run's report.html, or side-by-side.html beside the first"
    )


def _add_board(add: _Add) -> None:
    """Add the command board."""
    command = add("board", help="runs, recipes and hosts as pages in the browser; reads only")
    command.add_argument("--runs", type=Path, default=Path("runs"), help="directory of runs (default: %(default)s)")
    command.add_argument("--hostfile", help="hosts in DeepSpeed's format; default: hostfile.txt")
    command.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; any other needs a token (default: %(default)s)"
    )
    port = "0: any that is free (default: %(default)s)"
    command.add_argument("--port", type=_whole_number(0), default=8080, help=port)
    command.add_argument("--token-file", type=Path, metavar="FILE", help="its text is the token; default: a new one")
    command.add_argument(
        "--allow-actions", action="store_true", help="also save forks of recipes and chat with models; needs the token"
    )


def _recipe_options(command: argparse.ArgumentParser, **positional: Any) -> None:
    """Add the recipe (positional: more arguments for argparse, such as nargs) and --set to a command."""
    command.add_argument(
        "recipe", help="recipes/<family>/<stage>.yaml, a folder, or a name such as quickstart", **positional
    )
    command.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="override a key; repeatable")


def _cluster_options(command: argparse.ArgumentParser, otherwise: str = "the recipe's hardware section") -> None:
    """Add --hostfile or --local, and --gpu, to a command. otherwise: the default, as the help words it."""
    where = command.add_mutually_exclusive_group()
    where.add_argument("--hostfile", help=f"hosts in DeepSpeed's format; default: {otherwise}")
    where.add_argument("--local", action="store_true", help="this machine instead of the recipe's hardware")
    command.add_argument("--gpu", metavar="NAME", help="GPU kind of every host, e.g. A100-40G")


def _whole_number(least: int) -> Callable[[str], int]:
    """Return an argparse type that reads a whole number of at least `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return read


def _number(least: float = -math.inf, *, above: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type that reads a finite number of at least `least`, above `above` and at most `most`."""
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
    """The action of --version: print the version, read only now, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from finlm.record import manifest

        screen.write(f"{parser.prog} {manifest.version()}\n")
        parser.exit()


class _Completion(argparse.Action):
    """The action of --print-completion: print the shell's script, made from all options, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, __: Any = None) -> NoReturn:
        import shtab

        for command in subcommands(parser):
            for action in command._actions:
                if action.type is Path or action.dest in ("recipe", "hostfile", "runs", "run_dir", "logs"):
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        screen.write(f"{shtab.complete(parser, shell)}\n")
        parser.exit()


def subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of all commands."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return list(commands.choices.values())
