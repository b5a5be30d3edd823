"""Parse a command line, and resolve what its words name: the hosts of every command, runs and recipes by short names.

Help and errors are in the language of messages; an error names the known word nearest to a mistyped one.

                 --hostfile, else               else                   kinds of GPU
    plan, diff   nothing                        the recipe's hardware  --gpu, else the recipe's hardware
    doctor       hostfile.txt if it names one   the recipe's hardware  --gpu, else the hosts are asked
    train        hostfile.txt if it names one   this machine           --gpu, else the hosts are asked; all must answer
    prepare      hostfile.txt if it names one   this machine           does not matter; workers of data.engine: ray
    sync         hostfile.txt                   nothing to sync        does not matter

`--local` is this machine for plan, diff and doctor. `train --print` asks no host: another launcher's may have no ssh.

A run is its directory, `latest`, the name of its recipe (then the newest) or the beginning of its own name, in runs/. A
recipe is its file, a folder of recipes (then pretrain.yaml), `quickstart` or `quickstart/sft`, or a run.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from finlm.base import language, screen
from finlm.base.errors import UserError
from finlm.base.runs import newest_runs

if TYPE_CHECKING:
    from finlm.recipe.cluster import Cluster
    from finlm.recipe.schema import Recipe

OF_DATA = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".txt", ".csv")  # how names of data end


class _Help(argparse.HelpFormatter):
    """An argparse help formatter that translates help to the language of messages."""

    def _expand_help(self, action: argparse.Action) -> str:
        """Return an option's help in the current language."""
        return language.translate(super()._expand_help(action))

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Return the text folded to `width` columns, in which Chinese characters take two."""
        return screen.fold(" ".join(text.split()), width).split("\n")

    def add_text(self, text: str | None) -> None:
        """Add a description or epilog in the current language."""
        super().add_text(text and language.translate(text))

    def start_section(self, heading: str | None) -> None:
        """Begin a section of the help under its heading in the current language."""
        super().start_section(heading and language.translate(heading))


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors end with the nearest known option or command."""

    def __init__(self, **settings: Any) -> None:
        """Make argparse's parser of `settings`, with help in the current language."""
        super().__init__(formatter_class=_Help, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return (options, unknown words) as argparse does, and keep the words for error(), which a bad one calls."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, with the nearest known word, to stderr and exit with code 2."""
        wrong = re.match(r"(?:argument .*: invalid choice: '|unrecognized arguments: )([^\s'=]+)", message)
        # argparse has no public list of a parser's commands and options.
        below = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        commands = {name: command for choices in below for name, command in choices.items()}
        named = [commands[word] for word in self._given if word in commands][:1]
        known = [*commands, *(name for each in (self, *named) for name in each._option_string_actions)]
        known += re.findall(r"'([^']+)'", message.partition("choose from")[2])
        if any("--set" in each._option_string_actions for each in named) and message.startswith("unrecognized"):
            hint = _suggest_set(message.partition(": ")[2], self._given)
            message, wrong = (f"{message}; {hint}", None) if hint else (message, wrong)
        close = difflib.get_close_matches(wrong[1].strip("'"), known, n=1) if wrong else []
        said = language.translate(f"{message}; did you mean {close[0]}?" if close else message)
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {language.translate('error:')} {said}\n")


def _suggest_set(words: str, given: list[str]) -> str:
    """Return advice about unknown words of a command line: as --set KEY=VALUE, or why to drop them; "" for none."""
    from finlm.recipe import reference  # a fifth of a second that only a mistake needs
    from finlm.recipe.schema import Recipe

    first, *rest = words.split()
    place = given.index(first) if first in given else 0
    if place > 1 and given[place - 2] == "--set" and "=" not in given[place - 1]:
        return f"write --set {given[place - 1]}={first}"
    if first.endswith(OF_DATA):
        return f"write --set data.sources={first}"
    if not first.startswith("--"):
        return f"write --set {first}" if re.match(r"[a-z_]+[\w.\[\]]*=", first) else ""
    name, _, value = first.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if reason := reference.other_programs()["needless"].get(name):
        return str(reason)
    keys = dict(reference.all_keys(Recipe, ()))
    ours = [key for key, last in keys.items() if last == name and key.count(".") == 1]
    key = reference.other_names().get(name) or (ours[0] if len(ours) == 1 else "")
    if key == "hardware.hosts" or name == "gpus":
        return "a hostfile says it, `name slots=N`; without one all GPUs of this machine train"
    return f"write --set {key}={value or next(iter(rest), 'VALUE')}" if key in keys else ""


def hostfile(options: argparse.Namespace) -> str | Path | None:
    """Return the hostfile to use: --hostfile, else hostfile.txt if it names a host; None otherwise and with --local.

    Raises UserError if hostfile.txt cannot be read.
    """
    from finlm.recipe import cluster

    if getattr(options, "local", False):
        return None
    return options.hostfile or cluster.default_hostfile()


def to_plan(options: argparse.Namespace, recipe: Recipe) -> Cluster:
    """Return the hosts of plan and diff without asking them: the hostfile's, this machine (--local) or the recipe's.

    Also declares the GPU kinds that the options describe or --calibrate measured. Raises UserError for a hostfile that
    cannot be used, or a host without a known GPU kind.
    """
    from finlm.recipe import cluster

    _declare_kinds(options)
    if options.hostfile:
        return cluster.check_hardware(_load(options, options.hostfile, recipe), recipe.hardware)
    if options.local:
        return cluster.local(recipe.train.cpu_ranks, recipe.hardware)
    return cluster.from_hardware(recipe.hardware, options.gpu)


def to_examine(options: argparse.Namespace, recipe: Recipe) -> Cluster:
    """Return the hosts of doctor: the hostfile's, else those of to_plan.

    Without --gpu, asks the hostfile's hosts for their GPU kinds over ssh. Declares the GPU kinds that --calibrate
    measured. Raises UserError for a hostfile that cannot be used.
    """
    from finlm.doctor import gpus

    if path := hostfile(options):
        _declare_kinds(options)
        hosts = _load(options, path, recipe)
        return hosts if options.gpu else gpus.ask_kinds(recipe, hosts, options.accept_new)
    return to_plan(options, recipe)


def to_train(options: argparse.Namespace, recipe: Recipe) -> Cluster:
    """Return the hosts of train: the hostfile's, which are asked for their GPUs, else this machine.

    Declares the GPU kinds that the options describe or --calibrate measured. With --gpu, hosts must only answer. With
    --print they are not asked, and their kinds must be known. Raises UserError when a host does not answer, when the
    hostfile cannot be used, or when --include, --exclude or --gpu are given without a hostfile.
    """
    from finlm.doctor import gather, gpus
    from finlm.recipe import cluster
    from finlm.runs import lineage

    _declare_kinds(options)
    path = hostfile(options)
    if path is None:
        if options.include or options.exclude or options.gpu:
            raise UserError(
                "--include, --exclude and --gpu are about a hostfile's hosts, and there is none",
                evidence="neither --hostfile nor a host in hostfile.txt: this machine alone would train",
                fix="give --hostfile; on this machine CUDA_VISIBLE_DEVICES=0,1 chooses GPUs",
            )
        return cluster.local(recipe.train.cpu_ranks, recipe.hardware)
    hosts = _load(options, path, recipe, options.include, options.exclude)
    if options.adapter:
        return cluster.check_hardware(hosts, recipe.hardware)
    way_out = functools.partial(lineage.way_out, recipe, None if options.new else Path(options.runs))
    if options.gpu:
        gpus.check_reached(gather.gather_hardware(recipe, hosts, options.accept_new), way_out)
        return hosts
    return gpus.ask_kinds(recipe, hosts, options.accept_new, way_out)


def to_prepare(options: argparse.Namespace, recipe: Recipe) -> Cluster | None:
    """Return the hosts of data.engine: ray; None for another engine or without a hostfile.

    Raises UserError for a hostfile that cannot be used.
    """
    from finlm.recipe import cluster

    path = hostfile(options) if recipe.data.engine == "ray" else None
    return None if path is None else cluster.load(path, recipe.hardware, access=recipe.hosts)


def to_sync(options: argparse.Namespace) -> list[str]:
    """Return the names of the hostfile's hosts, spares too; [] if it names none.

    Raises UserError if it is missing or has mistakes.
    """
    from finlm.recipe import cluster

    path = Path(options.hostfile)
    if path.is_file() and not cluster.entries(path):
        return []
    hosts = cluster.load(path)
    return [host.name for host in (*hosts.hosts, *hosts.spares)]


def _load(
    options: argparse.Namespace, path: str | Path, recipe: Recipe, include: str = "", exclude: str = ""
) -> Cluster:
    """Return the Cluster of a hostfile with the recipe's hardware: and hosts: and --gpu. UserError if it is unfit."""
    from finlm.recipe import cluster

    return cluster.load(path, recipe.hardware, options.gpu, recipe.hosts, include, exclude)


def _declare_kinds(options: argparse.Namespace) -> None:
    """Declare, for this process, the GPU kinds that --calibrate or finished runs measured, or that options describe.

    Raises UserError for a damaged table or list of runs, and for a description that cannot be used.
    """
    from finlm.plan import gpus

    gpus.declare_calibrated()
    if "gpu_memory" in options:  # comes second, so that it counts more
        gpus.declare_described(
            options.gpu, options.gpu_memory, options.gpu_flops, options.gpu_bandwidth, options.gpu_capability
        )


LATEST = "latest"
RUNS = Path("runs")
_TIME = re.compile(r"-\d{8}-\d{6}(\.\d+)?")
_SHOWN = 6
_OF_MODELS = ("config.json", "plan.json", "manifest.json")  # of a model directory, a run, a checkpoint


def resolve(options: argparse.Namespace) -> None:
    """Replace short names in the options, also in --set model.init_from, with paths, in place.

    Raises UserError when a name fits several or nothing, a file is missing, or a model directory lacks weights, parts
    of them or a tokenizer. Leaves `logs` and --set values that name nothing as they are.
    """
    resolvers: dict[str, Callable[[Any], Any]] = {
        "recipe": lambda text: text and str(recipe_file(text)),
        **dict.fromkeys(("parent", "world"), recipe_file),
        "run_dir": lambda text: run_directory(text, must_exist=True),
        "run_dirs": lambda text: run_directory(text, must_exist=True),
        "recipes": lambda text: text if options.command == "new" else recipe_or_run(text),
        **dict.fromkeys(("checkpoint", "contamination"), model_directory),
        # Of new and admit it may be no directory: a model of the Hub, a model_type.
        "model": lambda text: text if options.command in ("new", "admit") else model_directory(text),
        "logs": lambda text: text if text == "-" else str(run_directory(text)),
        **dict.fromkeys(("file", "tools"), _existing_file),
    }
    for name, resolver in resolvers.items():
        value = getattr(options, name, None)
        if value is not None:
            setattr(options, name, [resolver(each) for each in value] if isinstance(value, list) else resolver(value))
    if getattr(options, "set", None):
        options.set = [_resolve_start(text) for text in options.set]


def _resolve_start(override: str) -> str:
    """Return a --set value, with a recipe's or run's short name in model.init_from replaced by its path.

    Returns any other value unchanged. Raises UserError for `latest` without a run.
    """
    key, _, named = override.partition("=")
    if key.strip() != "model.init_from" or not named.strip() or Path(named.strip()).exists():
        return override
    try:
        return f"{key}={recipe_or_run(named.strip())}"
    except UserError:
        if named.strip() == LATEST:
            raise
        return override  # a Hub id, or told as no model


def run_directory(text: str | Path, *, must_exist: bool = False) -> Path:
    """Return the path of the run that a short name means, else the path as given.

    Raises UserError if the name fits several runs and, with must_exist or for `latest`, if it fits none.
    """
    path = Path(text)
    where = path.parent if path.parent != Path() else RUNS
    if path.exists() or (len(path.parts) > 1 and not where.is_dir()):
        return path
    names = [run.path.name for run in newest_runs(where)]
    # A recipe's runs are its name and a time: `quickstart` begins the names of quickstart-sft's runs too.
    of_recipe = [name for name in names if _TIME.fullmatch(name.removeprefix(path.name)) and name != path.name]
    matching = names[:1] if path.name == LATEST else of_recipe[:1] or [n for n in names if n.startswith(path.name)]
    if len(matching) > 1:
        raise UserError(
            f"{text} is the beginning of {len(matching)} runs' names",
            evidence="\n".join(matching[:_SHOWN]),
            fix="write more of the name; `latest` is the newest run",
        )
    if not matching and (must_exist or path.name == LATEST):
        raise UserError(
            f"there is no run {text}",
            evidence=f"{where}/ has {', '.join(names[:_SHOWN]) or 'no runs'}",
            fix=_how_to_train(path) or "`finlm runs` lists them; `latest` is the newest",
        )
    return where / matching[0] if matching else path


def _how_to_train(named: Path) -> str:
    """Return a hint with the command that makes a run of `named` if that is a recipe, else ""."""
    try:
        is_recipe = named.name != LATEST and named.parts[:1] != (RUNS.name,) and recipe_file(named)
    except UserError:
        return ""
    return f"`finlm train {named}` makes one" if is_recipe else ""


def _existing_file(path: Path) -> Path:
    """Return the path as given, or raise UserError if it is no file; called before torch is loaded."""
    if not path.is_file():
        raise UserError(f"there is no file {path}", fix="give a file that is there")
    return path


def model_directory(text: str | Path) -> Path:
    """Return the directory of a run, checkpoint or model, given as a path or a run's short name (`latest` too).

    Loads no torch. Raises UserError when there is none, a short name fits several runs, or a model's directory lacks
    whole weights or a tokenizer.
    """
    path = run_directory(text)
    is_model = path.parent.name == "checkpoints" or any((path / name).is_file() for name in _OF_MODELS)
    if not path.is_dir() or not is_model:
        evidence = "no config.json in it" if path.exists() else f"there is no {path.absolute()}"
        raise UserError(f"{text} holds no model", evidence=evidence, fix=_how_to_make(path, str(text)))
    if (path / "config.json").is_file():
        from finlm.recipe import weights

        weights.check_files(path)
    return path


def _how_to_make(path: Path, text: str) -> str:
    """Return a hint on how to get a model in `path`, which holds none; `text` is how the user named it."""
    adapters = "adapter_config.json"
    if (path / adapters).is_file():
        return f"these are adapters: merge them into the model that {adapters} names, or give the run that trained them"
    if files := sorted([path] if path.suffix == ".gguf" else path.glob("*.gguf")):
        return f"`finlm import-gguf {files[0]} DIRECTORY` makes one"
    otherwise = "give runs/<run>, runs/<run>/checkpoints/step-N, or a model directory in Hugging Face format"
    if path.exists():
        return otherwise
    if trains := _how_to_train(path):
        return trains
    name = re.fullmatch(r"(?:https?://[^/]+/)?([\w-][\w.-]*/[\w.-]+)", text)
    if name and path.parts[0] not in (RUNS.name, "models") and not path.parent.is_dir():
        return f"of the Hub: `hf download {name[1]} --local-dir models/{name[1]}`, then models/{name[1]}"
    return otherwise


def recipe_or_run(text: str | Path) -> Path:
    """Return the path of a recipe or run directory by its short name; a recipe comes before a run of the same name.

    A recipe.yaml in a run gives the run's directory. Raises UserError if there is neither.
    """
    try:
        path = recipe_file(text)
    except UserError:
        path = run_directory(text)
        if not (path / "plan.json").is_file():
            raise
    return path.parent if path.with_name("plan.json").is_file() else path


def recipe_file(text: str | Path) -> Path:
    """Return the path of the recipe that a file, folder, run or short name means.

    Of a recipe that came with finlm it may be recipes/<family>/<stage>.yaml, which parents.find_shipped() finds. Raises
    UserError, with the nearest name, for no such recipe or run, several that fit, or a file of data.
    """
    from finlm.recipe import parents

    path = Path(text)
    if path.name == LATEST or path.parts[:1] == (RUNS.name,):  # else `quickstart` would be its newest run
        path = run_directory(path)
    if path.is_file() and path.name.endswith(OF_DATA):
        fix = f"a recipe names it: finlm train quickstart --set data.sources={path}"
        raise UserError(f"{path} is a file of data, not a recipe", fix=fix)
    if path.is_file():
        return path
    if path.is_dir() and any(path.glob("*.yaml")):
        return _choose_recipe(path)
    below = Path("recipes") / path
    for guess in (path, path / "pretrain.yaml", below, Path(f"{below}.yaml"), below / "pretrain.yaml"):
        if guess.suffix == ".yaml" and parents.find_shipped(guess).is_file():
            return guess  # whoever reads it finds what came with finlm
    if path.is_dir():
        return _choose_recipe(path)
    known = parents.list_recipes()
    short = {name.removeprefix("recipes/").removesuffix(".yaml").removesuffix("/pretrain"): name for name in known}
    close = difflib.get_close_matches(str(text), [*known, *short], n=1)
    fix = f"did you mean {short.get(close[0], close[0])}?" if close else f"there are {', '.join(sorted(short)[:40])}"
    raise UserError(f"cannot read the recipe {text}", evidence="there is no such file", fix=fix)


def _choose_recipe(folder: Path) -> Path:
    """Return the recipe file in a folder: recipe.yaml, pretrain.yaml or the only *.yaml.

    Raises UserError if there are several others, or none.
    """
    if (folder / "recipe.yaml").is_file():  # of a run
        return folder / "recipe.yaml"
    files = sorted(path for path in folder.glob("*.yaml"))
    first = [path for path in files if path.name == "pretrain.yaml"] or files
    if len(first) == 1:
        return first[0]
    raise UserError(
        f"{folder} is a directory with {len(files)} recipes",
        evidence=", ".join(path.name for path in files) or "no *.yaml in it",
        fix="name one of them" if files else "recipes are in recipes/<family>/<stage>.yaml",
    )
