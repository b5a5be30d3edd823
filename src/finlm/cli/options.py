"""Define every command and option, as `python -m finlm --help` shows them; what they do is in main.py."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from finlm.base import language, screen
from finlm.cli.command_line import Parser

_Add = Callable[..., argparse.ArgumentParser]
_Option = Callable[..., argparse.Action]  # add_argument of a command


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    root = Parser(prog="finlm", description="Pretraining recipes for financial language models.")
    root.add_argument("--version", action=_Version, nargs=0, help="print the version")
    root.add_argument(
        "--print-completion", action=_Completion, choices=("bash", "zsh"), help="print the shell's completion script"
    )
    commands = root.add_subparsers(required=True, metavar="COMMAND", dest="command")
    rooms = (_add_data, _add_recipes, _add_hosts, _add_training, _add_drill, _add_evaluation, _add_attempts)
    for add_commands in (*rooms, _add_models, _add_runs):
        add_commands(commands.add_parser)
    for command in (root, *commands.choices.values()):
        command.add_argument(
            "--lang",
            choices=language.LANGUAGES,
            help="language of messages; default: FINLM_LANG, else the environment's (LC_ALL, LC_MESSAGES, LANG)",
        )
    return root


def _add_data(add: _Add) -> None:
    """Add the commands prepare, self-qa and lint, each by add(name, help=...)."""
    option = add("prepare", help="clean, deduplicate and tokenize documents; reuses unchanged results").add_argument
    _recipe_options(option)
    option("--show", type=_whole_number(0), default=0, metavar="N", help="print the first N rows of the run as text")
    option("--hostfile", help="hosts of data.engine: ray; default: hostfile.txt, else this machine")
    option("--accept-new", action="store_true", help="record the ssh keys of new hosts")

    option = add("self-qa", help="generate questions and answers about documents, as SFT data").add_argument
    _recipe_options(option)

    option = add("lint", help="check the labels of dialogues and mark the tokens that count in the loss").add_argument
    _recipe_options(option)
    option("--rows", type=_whole_number(0), default=2, metavar="N", help="rows to print (default: %(default)s)")
    option("--json", action="store_true", help="print the findings as JSON on stdout")


def _add_recipes(add: _Add) -> None:
    """Add the commands new, diff and plan, each by add(name, help=...)."""
    command = add("new", help="write a new recipe: a fork of another one, or for a given model")
    option = command.add_argument
    option("name", help="name of the recipe and its folder, e.g. wider")
    start = command.add_mutually_exclusive_group(required=True)
    start.add_argument("--from", dest="parent", type=Path, metavar="RECIPE", help="recipe to fork")
    start.add_argument("--model", metavar="DIR_OR_ID", help="model directory, or id on the Hugging Face Hub")
    option("--copy", action="store_true", help="copy every key instead of inheriting")
    option("--revision", metavar="COMMIT", help="commit of a Hub model")
    option(
        "--stage",
        choices=("pretrain", "sft"),
        default="pretrain",
        help="with --model: its stage (default: %(default)s)",
    )
    option("--recipes", type=Path, default=Path("recipes"), help="output directory (default: %(default)s)")

    command = add("diff", help="compare two recipes or runs: settings, memory, time, tokens")
    option = command.add_argument
    option("recipes", nargs="+", type=Path, metavar="RECIPE", help="two recipes or runs; or a fork, against its parent")
    _cluster_options(command)
    option("--json", action="store_true", help="print the differences as JSON on stdout")

    command = add("plan", help="print memory, ZeRO stage, micro-batch, time and cost of a run; needs no GPU")
    option = command.add_argument
    _recipe_options(option, nargs="?")
    _cluster_options(command)
    option("--gpu-memory", metavar="BYTES", help="memory of a GPU kind that finlm does not know, e.g. 48GiB")
    option("--gpu-flops", type=_number(above=0), metavar="N", help="dense 16-bit FLOP/s of that GPU, e.g. 165e12")
    option("--gpu-bandwidth", type=_number(above=0), metavar="N", help="its memory bandwidth in bytes/s, e.g. 1e12")
    option("--gpu-capability", type=_number(above=0), metavar="X.Y", help="its compute capability, e.g. 8.6")
    option("--price", type=_number(0), metavar="N", help="price of one GPU-hour, in your currency")
    option("--failures", type=_number(1e-9), metavar="N", help="simulate N failures per host and day")
    option(
        "--restart-seconds",
        type=_number(0),
        default=120.0,
        metavar="N",
        help="with --failures: time from a failure to the next step, see `finlm drill` (default: %(default)g)",
    )
    option("--calibrate", action="store_true", help="measure this machine's GPUs; later plans use the results")
    option("--json", action="store_true", help="print the plan as JSON on stdout")


def _add_hosts(add: _Add) -> None:
    """Add the commands doctor and diagnose, each by add(name, help=...)."""
    command = add("doctor", help="check that every host, or this machine, can run a recipe")
    option = command.add_argument
    _recipe_options(option, nargs="?", default="recipes/quickstart/pretrain.yaml")
    _cluster_options(command, "hostfile.txt where it names hosts, else this machine")
    option("--allreduce", action="store_true", help="also measure every link with real all-reduces")
    option("--runs", type=Path, default=Path("runs"), help="directory of future runs (default: %(default)s)")
    option("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    option("--json", action="store_true", help="print the findings as JSON on stdout")

    option = add("diagnose", help="name the cause of a failed run from its logs").add_argument
    option("logs", nargs="+", metavar="LOG", help="log file, run directory, or - for standard input")
    option("--json", action="store_true", help="print the findings as JSON on stdout")
    option(
        "--ask", metavar="ENDPOINT", help="OpenAI-compatible endpoint to ask about an unknown cause; secrets are masked"
    )


def _add_training(add: _Add) -> None:
    """Add the commands train and sync, each by add(name, help=...)."""
    command = add("train", help="train a recipe, from raw text to report; resumes an unfinished run")
    option = command.add_argument
    _recipe_options(option)
    option("--hostfile", help="hosts in DeepSpeed's format; default: hostfile.txt, else this machine")
    some = command.add_mutually_exclusive_group()
    some.add_argument("--include", default="", metavar="a@b:0,2", help="use only these hosts (and slots)")
    some.add_argument(
        "--exclude",
        default="",
        metavar="a@b:0,2",
        help="all but these hosts (and slots); goes on without a lost "
        "host where the parts of its checkpoint are here (checkpoint.copies)",
    )
    option("--gpu", metavar="NAME", help="GPU kind of every host, e.g. A100-40G")
    option("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    option("--runs", default="runs", help="directory of run directories (default: %(default)s)")
    afresh = command.add_mutually_exclusive_group()
    afresh.add_argument("--new", action="store_true", help="start a new run even if an unfinished one exists")
    afresh.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="extend the newest finished run of the recipe: more steps or another learning rate",
    )
    option("--toy", action="store_true", help="shrink the recipe to a minute on a laptop")
    instead = command.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true", help="print which steps are done and which are left; write nothing"
    )
    instead.add_argument(
        "--print",
        choices=("torchrun", "accelerate", "slurm", "k8s", "ray"),
        dest="adapter",
        help="create the run directory and print what starts it under this launcher",
    )

    option = add("sync", help="copy this repository to every host of the hostfile and compare hashes").add_argument
    option("--hostfile", type=Path, default=Path("hostfile.txt"), help="default: %(default)s")
    option("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    option("--dry-run", action="store_true", help="print what would be copied")


def _add_drill(add: _Add) -> None:
    """Add the command drill, by add(name, help=...)."""
    option = add("drill", help="inject faults into a run of a recipe and measure how it recovers").add_argument
    _recipe_options(option)
    option("--hostfile", help="hosts in DeepSpeed's format; default: hostfile.txt, else this machine")
    option("--gpu", metavar="NAME", help="GPU kind of every host, e.g. A100-40G")
    option("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    option("--runs", default="runs/drill", help="directory of the drill's runs (default: %(default)s)")
    option("--minutes", type=_number(above=0), default=20.0, help="length of the drill (default: %(default)s)")
    option(
        "--every", type=_number(above=0), default=120.0, metavar="SECONDS", help="between faults (default: %(default)g)"
    )
    option("--faults", default="", metavar="a,b", help="faults to inject, in this order (default: all but disk-filled)")
    option("--seed", type=int, default=0, help="0: faults in order; else at random with this seed (default: 0)")
    option("--json", action="store_true", help="print the result as JSON on stdout")


def _add_evaluation(add: _Add) -> None:
    """Add the command eval, by add(name, help=...)."""
    option = add("eval", help="measure held-out perplexity, or accuracy on multiple-choice questions").add_argument
    option("checkpoint", type=Path, help="run, checkpoint, export or Hugging Face model directory")
    suites = ("perplexity", "exam", "recall", "financeiq", "ceval", "fineval", "cflue", "cflue-tasks")
    option(
        "--suite",
        choices=suites,
        default="perplexity",
        help="perplexity of held-out text (default); exam: the laws of the fictional world, asked of companies "
        "it has not read about; recall: what it has read of companies; financeiq, ceval, fineval, cflue: with --data; "
        "cflue-tasks: translation, extraction and other written answers, with --data",
    )
    option("--data", type=Path, metavar="DIR", help="directory of FinanceIQ, C-Eval, FinEval or CFLUE")
    option(
        "--mode",
        choices=("likelihood", "chat", "cloze", "published"),
        help="the likeliest letter, the letter in a written answer, or the likeliest option per character; published: "
        "as FinanceIQ's own code asks base models; default: chat for models with a chat template, else likelihood",
    )
    option(
        "--shots",
        type=_whole_number(0),
        metavar="N",
        help="solved examples before a question (default: 5; chat: 0; cloze: none)",
    )
    option("--limit", type=_whole_number(1), metavar="N", help="ask N random questions, the same every time")
    option("--world", type=Path, metavar="RECIPE", help="ask about this recipe's world instead of the run's")
    option("--answers", type=Path, metavar="DIR", help="directory of the answers (default: in the run)")
    option("--contamination", type=Path, metavar="RUN", help="also search this run's training data for the questions")
    option("--write-lm-eval", type=Path, metavar="DIR", help="write the suite as a task of lm-evaluation-harness")
    option("--json", action="store_true", help="print the result as JSON on stdout")


def _add_attempts(add: _Add) -> None:
    """Add the command attempt, by add(name, help=...)."""
    option = add("attempt", help="sample answers to a GRPO recipe's prompts: pass@k, maj@k, SFT data").add_argument
    _recipe_options(option)
    option("--model", type=Path, help="run, export or model directory; default: the model at self_qa.endpoint")
    option("--count", type=_whole_number(1), default=8, metavar="N", help="attempts per prompt (default: %(default)s)")
    option("--split", choices=("held_out", "train"), default="held_out", help="default: %(default)s")
    option("--limit", type=_whole_number(1), metavar="N", help="answer only the first N prompts")
    option("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")
    option("--best", type=Path, metavar="FILE", help="write the best correct answer to each prompt as messages")
    option("--json", action="store_true", help="print the result as JSON on stdout")


def _add_models(add: _Add) -> None:
    """Add the commands admit, export, import-gguf, chat, serve and sample, each by add(name, help=...)."""
    option = add("admit", help="test that finlm trains a model type as transformers does; admit it").add_argument
    option("model", help="directory with config.json, or a model_type such as qwen3")
    option("--json", action="store_true", help="print the verdict as JSON on stdout")

    option = add("export", help="write a checkpoint as a Hugging Face model, tested by reloading").add_argument
    option("checkpoint", type=Path, help="runs/<run>/checkpoints/step-N, or runs/<run> for its newest")
    option("out", type=Path, help="new directory")
    option("--shard-size", default="5GB", help="largest weight file (default: %(default)s)")

    option("--adapter", action="store_true", help="export only the LoRA adapters, in peft's format")

    option = add("import-gguf", help="convert a GGUF file to a Hugging Face model directory").add_argument
    option("file", type=Path, help="model.gguf")
    option("out", type=Path, help="new directory")

    option = add("chat", help="talk to a model in the terminal").add_argument
    option("checkpoint", type=Path, help="run, checkpoint, export or Hugging Face model directory")
    option("--system", help="system message")
    option("--tools", type=Path, metavar="FILE", help="JSON list of functions that the model may call")
    option("--temperature", type=_number(0), default=0.7, help="temperature; 0 = greedy (default: %(default)s)")
    option("--top-p", type=_number(above=0, most=1), default=0.9, help="nucleus sampling (default: %(default)s)")
    option("--tokens", type=_whole_number(1), default=512, help="maximum tokens of an answer (default: %(default)s)")
    option("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")

    option = add("serve", help="serve an OpenAI-compatible endpoint with transformers or vLLM").add_argument
    option("model", type=Path, help="run, export or Hugging Face model directory")
    option("--host", default="localhost", help="address to listen on (default: %(default)s)")
    option("--port", type=_whole_number(1, most=65535), default=8000, help="(default: %(default)s)")
    option(
        "--engine",
        choices=("auto", "transformers", "vllm"),
        default="auto",
        help="auto: vLLM if it is installed and there is a GPU, else transformers (default: %(default)s)",
    )

    option = add("sample", help="continue a prompt").add_argument
    option("model", type=Path, help="run, checkpoint, export or Hugging Face model directory")
    option("prompt", help="text to continue")
    option("--tokens", type=_whole_number(1), default=64, help="maximum tokens (default: %(default)s)")
    option("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")


def _add_runs(add: _Add) -> None:
    """Add the commands runs, board, watch, compare, reproduce, verify-resume, track and report by add(name, ...)."""
    option = add("runs", help="list runs: state, step, loss, speed, recipe, parent").add_argument
    option("--runs", type=Path, default=Path("runs"), help="directory of runs (default: %(default)s)")
    option("--json", action="store_true", help="print the runs as JSON on stdout")

    _add_board(add)

    option = add("watch", help="follow a run: loss, speed, memory, time left").add_argument
    option("run_dir", type=Path, metavar="RUN", help="runs/<run>, its recipe's name, or latest")

    option = add("compare", help="compare two runs: settings, and the first step at which losses differ").add_argument
    option("run_dirs", nargs=2, metavar="RUN", type=Path, help="runs/<run>, its recipe's name, or latest")
    option("--tolerance", type=_number(0), default=0.0, help="tolerance of losses, in nats (default: %(default)s)")
    option("--json", action="store_true", help="print the result as JSON on stdout")

    option = add("reproduce", help="repeat a finished run with its own code, recipe and data; compare").add_argument
    option("run_dir", type=Path, metavar="RUN", help="runs/<run>, its recipe's name, or latest")
    option("--runs", type=Path, default=Path("runs"), help="directory of the new run (default: %(default)s)")
    option("--tolerance", type=_number(0), default=0.0, help="tolerance of losses, in nats (default: %(default)s)")
    option("--json", action="store_true", help="print the result as JSON on stdout")

    option = add("verify-resume", help="test that a killed and resumed run equals an unbroken one").add_argument
    _recipe_options(option)
    option("--kills", type=_whole_number(0), default=2, metavar="N", help="number of SIGKILLs (default: %(default)s)")
    option("--seed", type=int, default=0, help="seed of the kills' moments (default: %(default)s)")
    option("--runs", type=Path, help="keep both runs in this directory; default: a scratch directory that is removed")
    option("--json", action="store_true", help="print the result as JSON on stdout")

    option = add("track", help="send a run's metrics to TensorBoard, W&B or trackio").add_argument
    option("run_dir", type=Path, metavar="RUN", help="runs/<run>, its recipe's name, or latest")
    option("--to", action="append", required=True, choices=("tensorboard", "wandb", "trackio"), help="repeatable")
    option("--follow", action="store_true", help="keep sending until the run ends")

    option = add("report", help="write a run's report.html, or one page for several runs").add_argument
    option("run_dir", nargs="+", help="runs/<run>, its recipe's name, or latest")
    option(
        "--out", type=Path, help="output file; default: report.html in the run, or side-by-side.html beside the first"
    )


def _add_board(add: _Add) -> None:
    """Add the command board, by add(name, help=...)."""
    option = add("board", help="show runs, recipes and hosts in the browser; read-only").add_argument
    option("--runs", type=Path, default=Path("runs"), help="directory of runs (default: %(default)s)")
    option("--hostfile", help="hosts in DeepSpeed's format; default: hostfile.txt")
    option("--host", default="127.0.0.1", help="address to listen on; any other needs a token (default: %(default)s)")
    port = "0: any that is free (default: %(default)s)"
    option("--port", type=_whole_number(0, most=65535), default=8080, help=port)
    option("--token-file", type=Path, metavar="FILE", help="file that holds the token; default: a new one")
    option(
        "--allow-actions", action="store_true", help="allow forking recipes and chatting with models; needs the token"
    )


def _recipe_options(option: _Option, **positional: Any) -> None:
    """Add the recipe and --set by `option`, a command's add_argument; `positional` goes to the recipe, as nargs."""
    option("recipe", help="recipes/<family>/<stage>.yaml, a folder, or a name such as quickstart", **positional)
    option("--set", action="append", default=[], metavar="a.b=VALUE", help="override a key; repeatable")


def _cluster_options(command: argparse.ArgumentParser, otherwise: str = "the recipe's hardware section") -> None:
    """Add --hostfile or --local, and --gpu, to a command; `otherwise` is the default host in the help's words."""
    where = command.add_mutually_exclusive_group()
    where.add_argument("--hostfile", help=f"hosts in DeepSpeed's format; default: {otherwise}")
    where.add_argument("--local", action="store_true", help="plan for this machine instead of the recipe's hardware")
    command.add_argument("--gpu", metavar="NAME", help="GPU kind of every host, e.g. A100-40G")


def _whole_number(least: int, most: int = 10**18) -> Callable[[str], int]:
    """Return an argparse type that reads a whole number from `least` to `most`, both included."""

    def read(text: str) -> int:
        """Return the number of an option's text. Raises ArgumentTypeError if it is none or out of range."""
        # int() also reads 1_000, digits of other scripts, and as many as somebody pastes
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        if int(text) > most:
            raise argparse.ArgumentTypeError(f"expected at most {most}, got {text!r}")
        return int(text)

    return read


def _number(least: float = -math.inf, *, above: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type that reads a finite number of at least `least`, above `above` and at most `most`."""
    bounds = {"at least": least, "above": above, "at most": most}
    limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))

    def read(text: str) -> float:
        """Return the number of an option's text. Raises ArgumentTypeError if it is none or out of range."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most and value > above):
            raise argparse.ArgumentTypeError(f"expected a number {limits}, got {text!r}")
        return value

    return read


class _Version(argparse.Action):
    """The action of --version: print the version, which is read only now, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print the version to stdout and exit with code 0."""
        from finlm.record import manifest

        screen.write(f"{parser.prog} {manifest.version()}\n")
        parser.exit()


class _Completion(argparse.Action):
    """The action of --print-completion: print the shell's completion script, generated from all options, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, __: Any = None) -> NoReturn:
        """Print the completion script for `shell`, "bash" or "zsh", to stdout and exit with code 0."""
        import shtab

        for command in subcommands(parser):
            for action in command._actions:
                if action.type is Path or action.dest in ("recipe", "hostfile", "runs", "run_dir", "logs"):
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        screen.write(f"{shtab.complete(parser, shell)}\n")
        parser.exit()


def subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of all commands of finlm's parser. Raises ValueError for a parser without commands."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return list(commands.choices.values())
