"""Run `finlm admit MODEL`: does finlm train this model as transformers does? Print a table of checks and results.

MODEL is a directory with config.json, or a model_type of transformers. A check, called cell, has passed or says what is
wrong. A type that model_types.json does not have is admitted for this user when every cell passes: its row goes to
~/.config/finlm/model_types.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoTokenizer

from finlm.admit import cells, record, runs
from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.dialogues import encode
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.models import config_json, refusals, traits
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Chat, Sft

DIALOGUE = [
    {"role": "user", "content": "净利润是什么？"},
    {"role": "assistant", "content": "收入减去成本、费用和税。"},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "You are welcome."},
]


@dataclass(frozen=True)
class Verdict:
    """Whether a type is admitted, the seconds it took, and what is wrong by cell, "" for a passed cell."""

    model_type: str
    admitted: bool
    seconds: float
    cells: dict[str, str]


def admit(model: str) -> Verdict:
    """Run every cell on a model directory or model_type, print the table and return the verdict; takes minutes.

    If a new type passes, writes its row to the user's model_types.json and says so on stderr. Switches transformers'
    progress bars and warnings off. Raises UserError if it is no model, or has a structure that no cell can check.
    """
    began = time.monotonic()
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    config, directory = read_config(model)
    refusals.refuse_unsupported(dict(config), model)
    model_type = str(config["model_type"])
    row = make_row(model_type)
    with tempfile.TemporaryDirectory(prefix="finlm-admit-") as shared, runs.Trainer(Path(shared)) as trainer:
        results = dict(examine(config, row, directory, trainer))
    screen.table(("cell", "result"), [(name, why or "passed") for name, why in results.items()])
    passed = not any(results.values())
    shipped = model_type in files.read_json(traits.RECORD)
    if passed and not shipped:
        theirs = files.read_json(traits.user_file()) if traits.user_file().is_file() else {}
        known = {name: traits.TypeRecord(**values) for name, values in theirs.items()}
        traits.write_records(known | {model_type: dataclasses.replace(row, cells=results)}, traits.user_file())
        screen.say(f"{model_type} is admitted; noted in {traits.user_file()}")
    seconds = round(time.monotonic() - began, 1)
    return Verdict(model_type, passed, seconds, results)


def read_config(model: str) -> tuple[traits.Config, Path | None]:
    """Return (config.json, directory) of a model directory, or (default configuration, None) of a model_type.

    The default is transformers', with every dropout 0 and without null keys. Raises UserError when `model` is neither,
    or a type whose class rejects its own defaults.
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
        with runs.admitted(model_type, row), contextlib.redirect_stderr(io.StringIO()):
            return cells.fill_held(cells.make_case(read_config(model_type)[0], row, *_small_run()))
    except Exception:  # a class that its own configuration cannot build: the cells say what is wrong
        return row


def _small_run() -> tuple[Recipe, Plan]:
    """Return (recipe, plan) of the small models, on a single CPU rank."""
    loaded = recipe.load(runs.RECIPE, ("hardware.hosts=[{name: localhost, slots: 1}]",)).recipe
    return loaded, planner.make(loaded, cluster.from_hardware(loaded.hardware), shape.of(loaded))


def examine(
    config: traits.Config, row: traits.TypeRecord, directory: Path | None, trainer: runs.Trainer
) -> Iterator[tuple[str, str]]:
    """Run every cell; yield its name with what is wrong, or "" if it passed.

    `directory` is the model's, for the cell of its chat template, or None. Raises UserError when transformers rejects
    the configuration.
    """
    model_type = str(config["model_type"])
    with runs.admitted(model_type, row), tempfile.TemporaryDirectory(prefix="finlm-admit-") as scratch:
        case = cells.make_case(config, row, *_small_run())
        for name, cell in cells.CELLS.items():
            yield name, _run_cell(cell, case)
        try:
            made = runs.Runs(case, Path(scratch), trainer)
        except Exception as error:  # a class that its own configuration cannot build
            yield next(iter(runs.CELLS)), f"{type(error).__name__}: {error}"
            return
        for name, trains in runs.CELLS.items():
            yield name, _run_cell(trains, made)
    if directory is not None and _has_template(directory):
        yield "template", _run_cell(check_template, directory)


def _has_template(directory: Path) -> bool:
    """Return whether a model directory has a tokenizer with a chat template; a base model's has none."""
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
    learnt = encoder.tokenizer.decode(
        [number for number, counts in zip(encoded.ids, encoded.mask, strict=True) if counts]
    )
    if lost := [turn["content"] for turn in DIALOGUE if (turn["content"] in learnt) != (turn["role"] == "assistant")]:
        return f"the loss is on {learnt!r}, which is wrong about {lost[0]!r}"
    return ""


def _run_cell(cell: Callable[[Any], str], subject: Any) -> str:
    """Run a cell on a case, runs or directory; return what is wrong, returned or raised, or "". Hides stderr."""
    with contextlib.redirect_stderr(io.StringIO()):  # plans, library warnings
        try:
            return cell(subject)
        except UserError as error:
            return " ".join(f"{error.problem}: {error.evidence}".split())
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
