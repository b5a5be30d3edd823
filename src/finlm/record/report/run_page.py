"""Write report.html: one self-contained page of a run, from the files of its run directory and nothing else.

100,000 steps give a page of 0.3 MB in about 1.2 s: curves are reduced to the lowest and highest value of 1,500 buckets.
It needs no network, no font and no script from elsewhere, so it can be mailed, archived and opened years later.

Files that are missing leave an en dash or no section; a page is also built of a run that has only begun or that failed.
Every page is a jinja2 template whose texts are escaped; the look is in report.css, the charts are in report.js.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader, Undefined

from finlm.base import files, language, units
from finlm.base.rundir import RunDir
from finlm.base.secrets import redact_key
from finlm.plan import memory
from finlm.plan.plan import decided_keys
from finlm.recipe import parents
from finlm.recipe.rules import origin_of
from finlm.record import history as histories
from finlm.record import manifest as manifests
from finlm.record.history import Chart, History, Row, read_object
from finlm.record.manifest import Machine, Manifest

_FIRST = ("torch", "deepspeed", "transformers", "accelerate", "trl", "datasets", "sentencepiece", "tokenizers", "numpy")


def build(run: RunDir, out: Path | None = None, *, ended: bool = False) -> Path:
    """Write the run's page to `out`, or to run.report if it is None, and return the path.

    `ended` means that no process of the run is left, so that a missing end event is a crash. Raises OSError.
    """
    history = histories.read_history(run)
    shown = values(run, history, histories.state(run, history, ended=ended))
    return write(out or run.report, "run.html", f"{shown['name']} · finlm run", histories.charts(history), **shown)


def values(run: RunDir, history: History, state: str) -> dict[str, object]:
    """Return {name: value} for the template run.html, from the run's files; missing or damaged files count as empty."""
    plan, data = read_object(run.plan), read_object(run.data)
    manifest, recipe, settings = Manifest.read(run), manifests.recipe_values(run), read_object(run.ds_config)
    name = plan.get("recipe") or (manifest.recipe.name if manifest else None) or run.path.name
    return {
        "name": name,
        "state": state,
        "h": history,
        "plan": plan,
        "data": data,
        "manifest": manifest,
        "recipe": recipe,
        "doctor": read_object(run.doctor),
        "diagnosis": read_object(run.diagnosis).get("findings") or (),
        "facts": _facts(history, plan),
        "suites": _newest(history.suites),
        "tasks": _newest(history.tasks),
        "against": _compare_plan(history, plan),
        "decided": _decisions(plan),
        **_count_data(data),
        "answers": _last_answers(run),
        "values": _recipe_values(run, recipe),
        "settings": json.dumps(settings, indent=2, ensure_ascii=False) if settings else "",
        **_provenance(run, manifest, history),
    }


def _facts(history: History, plan: Mapping[str, Any]) -> list[str | None]:
    """Return the parts of the line below the title: time, hosts, parameters, starts; None for an unknown part."""
    hosts = [f"{host['name']} × {host['slots']}" for host in plan.get("hosts", ())]
    start = history.starts[-1] if history.starts else {}
    device = start.get("device") or plan.get("device")
    parameters = short(start.get("parameters") or plan.get("parameters"))
    return [
        period(history.first_time, history.last_time),
        f"{', '.join(hosts)} ({device})" if hosts else device,
        f"{parameters} parameters" if parameters else None,
        f"started {len(history.starts)} times" if len(history.starts) > 1 else None,
    ]


def _newest(results: list[Row]) -> list[Row]:
    """Return the newest event of each combination of suite, mode, number of examples and model."""
    keys = ("suite", "mode", "shots", "model")
    return list({tuple(row.get(key) for key in keys): row for row in results}.values())


def _compare_plan(history: History, plan: Mapping[str, Any]) -> list[tuple[str | None, ...]]:
    """Return rows of (what, planned, measured, ratio) as text for memory, speed and time; None for unknown values."""
    on_gpus, start = plan.get("device") == "cuda", history.planned_from
    # torch.cuda.max_memory_allocated is what steps record on GPUs, the resident size of the process on CPU ranks.
    planned = memory.allocated_bytes(plan.get("gpu_bytes_items") or {}) if on_gpus else plan.get("gpu_bytes")
    measured = max(history.values("memory_bytes", start), default=None)
    speed, read = history.median("tokens_per_second", start), history.median("tokens_read", start)
    planned_speed = histories.planned_speed(plan.get("tokens_per_second"), plan.get("tokens_per_step", 1), read)
    seconds, done = (plan.get("days") or 0) * 86400, history.last("step") or 0
    so_far = seconds * done / plan["steps"] if plan.get("steps") else None
    return [
        ("Memory a rank" + ", allocated" * on_gpus, *_with_ratio(planned, measured, size)),
        ("Tokens a second", *_with_ratio(planned_speed, speed, count)),
        ("Time of the steps done", *_with_ratio(so_far or None, history.wall_seconds, duration)),
    ]


def _with_ratio(planned: Any, measured: Any, how: Any) -> tuple[str | None, str | None, str | None]:
    """Return (planned, measured, measured / planned) as text, the first two by how(value).

    None for what is not known.
    """
    ratio = f"{measured / planned:.2f}" if planned and measured is not None else None
    return how(planned), how(measured), ratio


_DECISIONS = (
    ("Precision", "precision"),
    ("ZeRO stage", "zero_stage"),
    ("Optimizer offload", "offload_optimizer"),
    ("Parameter offload", "offload_param"),
    ("Recompute", "recompute"),
    ("Micro-batch", "micro_batch"),
    ("Accumulation", "gradient_accumulation_steps"),
    ("Sequence", "sequence_length"),
    ("Tokens a step", "tokens_per_step"),
    ("Ranks", "world_size"),
)


def _decisions(plan: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (label, value) of the plan's decisions, with each host's micro-batch if they differ."""
    decided = [(label, count(plan.get(key)) or plan.get(key)) for label, key in _DECISIONS]
    unequal = decided_keys(plan)["batch.micro_batch"]
    if isinstance(unequal, dict):
        decided.append(("Micro-batches", ", ".join(f"{name} {rows}" for name, rows in unequal.items())))
    return decided


# Always shown; the others only where a document fell under them.
_USUAL = {"broken", "duplicate", "too_short", "equals_held_out", "held_out", "kept"}
_COUNTS = (
    ("Broken", "broken"),
    ("Cleaned away", "cleaned"),
    ("Perplexity", "perplexity"),
    ("In a benchmark", "contaminated"),
    ("Duplicate", "duplicate"),
    ("Near-duplicate", "near_duplicate"),
    ("Too short", "too_short"),
    ("As held out", "equals_held_out"),
    ("Near held out", "near_held_out"),
    ("Held out", "held_out"),
    ("Reserved", "reserved"),
    ("Kept", "kept"),
)


def _count_data(data: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what the page shows of data.json, each empty if data.json lacks it.

    `counts` are (title, key) of the columns, `sources` and `lengths` rows of tables, `origins` (source, field, value,
    documents).
    """
    documents, shards = data.get("documents") or {}, data.get("shards") or {}
    shown = [(title, key) for title, key in _COUNTS if key in _USUAL or any(row.get(key) for row in documents.values())]
    sources = [_row(name, row, shards.get(name) or {}, shown) for name, row in documents.items()]
    if len(sources) > 1:
        sources.append(_row("all", _sum(documents), _all_shards(shards), shown))
    origins = [
        (source, name, value or "(none)", count(count))
        for source, fields in (data.get("values") or {}).items()
        for name, values in fields.items()
        for value, count in values
    ]
    return {"counts": shown, "sources": sources, "lengths": _lengths(data.get("lengths") or {}), "origins": origins}


def _lengths(lengths: Mapping[str, Any]) -> list[list[Any]]:
    """Return the table of documents' lengths, its header first; [] if no lengths were recorded."""
    edges = sorted({edge for row in lengths.values() for edge, _, _ in row.get("histogram") or ()})
    rows: list[list[Any]] = [["Source", "Median", "Longest", *(f"{edge:,}+" for edge in edges)]] if edges else []
    for name, row in lengths.items() if edges else ():
        documents_from = {edge: documents for edge, documents, _ in row.get("histogram") or ()}
        whole = max(1, row.get("documents") or 0)
        shares = (percent(documents_from[edge] / whole) if edge in documents_from else "" for edge in edges)
        rows.append([name, count(row.get("median")), count(row.get("longest")), *shares])
    return rows


def _row(name: str, row: Mapping[str, Any], shard: Mapping[str, Any], shown: list[tuple[str, str]]) -> list[Any]:
    """Return the cells of a table's line about a source: its name, numbers, training tokens and bytes per token."""
    counts = (count(row.get(key)) for key in ("rows", *(key for _, key in shown)))
    return [name, *counts, count(shard.get("train_tokens")), digits(shard.get("bytes_per_token"), 2)]


def _all_shards(shards: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the sums over all sources, with bytes_per_token averaged by tokens; {} if a source lacks either number."""
    whole = _sum(shards)
    if not {"train_tokens", "bytes_per_token"} <= set(whole) or not whole["train_tokens"]:
        return {}
    text = sum(row["train_tokens"] * row["bytes_per_token"] for row in shards.values())
    return whole | {"bytes_per_token": text / whole["train_tokens"]}


def _sum(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of the keys that every row has; a key that a row lacks has no sum."""
    keys = set.intersection(*(set(row) for row in rows.values())) if rows else set()
    return {key: sum(row[key] for row in rows.values()) for key in keys}


def _last_answers(run: RunDir) -> list[Mapping[str, Any]]:
    """Return the rows of rollouts.jsonl of the last step, answers with their rewards; [] if the stage writes none."""
    rows = list(files.read_json_lines(run.rollouts)) if run.rollouts.exists() else []
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def _recipe_values(run: RunDir, recipe: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the recipe's values for the page: `written` (key, value, origin), `defaults` (key, value), `files`.

    Values are text without credentials; `files` are those that the written ones come from. If `recipe` is empty, as
    that of an invalid recipe is, the values are those of recipe.yaml, unchecked.
    """
    values, origins = recipe or manifests.unchecked_recipe_values(run), read_object(run.origins)
    written = {key: origin for key in values if (origin := origin_of(key, origins))}
    return {
        "written": [(key, _value(key, values[key]), origin) for key, origin in written.items()],
        "defaults": [(key, _value(key, value)) for key, value in values.items() if key not in written],
        "files": sorted({origin.rpartition(":")[0] for origin in written.values()} - {""}),
    }


def _value(key: str, value: Any) -> str:
    """Return a recipe's value as text for the page, without credentials."""
    shown = redact_key(key, value)
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False, default=str)


def _provenance(run: RunDir, manifest: Manifest | None, history: History) -> dict[str, object]:
    """Return the page's `commands`, `hashes`, `machine` and `packages`; without a manifest hashes are None."""
    made = manifest or Manifest()
    code, git, shards, machine = made.finlm, made.finlm.git, made.shards, made.machine
    lines = [f"cd {shlex.quote(made.directory)}"] if made.directory else []
    python = shlex.quote(machine.executable or "python")
    path, resolved = shlex.quote(str(run.code)), shlex.quote(str(run.recipe))
    commands = {
        "again": f"{python} -m finlm reproduce {shlex.quote(str(run.path))}",
        "by_hand": f"PYTHONPATH={path} {python} -m finlm train {resolved} --new",
        "started": shlex.join(made.command),
    }
    hashes = [
        ("finlm", code.version),
        ("Git commit", f"{git.commit}{' with uncommitted changes' * git.dirty}" if git else None),
        ("Starts from", str(parents.Start.from_json(made.start)) if made.start else None),
        ("Code", code.code_sha256),
        ("Recipe", made.recipe.sha256),
        ("Plan", made.plan.sha256),
        ("Shards", shards.sha256 if shards else None),
        ("Tokenizer", shards.tokenizer_sha256 if shards else None),
        *made.seeds.items(),
    ]
    return {
        "commands": {name: "\n".join([*lines, command]) for name, command in commands.items()},
        "hashes": hashes,
        "machine": _describe_machine(machine, made.packages, history.starts[-1] if history.starts else {}),
        "packages": "\n".join(f"{name}=={version}" for name, version in made.packages.items()),
    }


def _describe_machine(machine: Machine, packages: Mapping[str, str], start: Row) -> list[tuple[str, str | None]]:
    """Return (name, value) rows: host, platform, Python, cores, GPUs, and the main packages' versions."""
    gpus = [f"{gpu.get('name')}, driver {gpu.get('driver_version')}" for gpu in machine.gpus]
    listed = "; ".join(f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus))
    cpus = count(machine.cpus)
    return [
        ("Host", machine.hostname),
        ("Platform", machine.platform),
        ("Python", machine.python),
        ("Cores", f"{cpus}, {count(machine.cpus_usable) or MISSING} usable" if cpus else None),
        ("GPUs", listed or ("none" if machine.hostname else None)),
        *((name, packages.get(name) or start.get(name)) for name in _FIRST if name in packages or name in start),
    ]


MISSING = "–"
_UNITS = {"years": "年", "days": "天", "hours": "小时", "minutes": "分钟", "seconds": "秒"}
FILES = Path(__file__).parent


def show(value: Any, how: Callable[[Any], str]) -> str | None:
    """Return how(value); None if the value is missing (None, undefined) or `how` raises TypeError or ValueError."""
    try:
        return None if value is None or isinstance(value, Undefined) else how(value)
    except (TypeError, ValueError):
        return None


count = partial(show, how=lambda value: f"{value:,.0f}")  # 1,234,567
short = partial(show, how=units.format_count)  # 2.05M
size = partial(show, how=units.format_bytes)
duration = partial(show, how=units.format_duration)


def digits(value: Any, places: int = 4) -> str | None:
    """Return a number with fixed decimal places; None for a missing value and for what is no number."""
    return show(value, lambda v: f"{v:,.{places}f}")


def percent(value: Any, places: int = 1) -> str | None:
    """Return 0.123 as '12.3 %'; None for a missing value and for what is no number."""
    return show(value, lambda v: f"{100 * v:.{places}f} %")


def moment(value: Any) -> str | None:
    """Return Unix seconds as UTC date and time; None for a missing value and for what is no number."""
    return show(value, lambda v: datetime.fromtimestamp(v, UTC).strftime("%Y-%m-%d %H:%M UTC"))


def period(first: Any, last: Any) -> str | None:
    """Return two Unix times in UTC as '<first> to <last>', with a single date if both have the same.

    Returns the first alone if the second is unknown, None if the first is.
    """
    begun, ended = moment(first), moment(last)
    if begun is None or ended is None:
        return begun
    return f"{begun.removesuffix(' UTC')} to {ended[11:] if ended[:10] == begun[:10] else ended}"


def interval(bounds: Any) -> str | None:
    """Return two shares as a confidence interval in percent; None for anything but a list or tuple of two."""
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
        return None
    return f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"


def data(charts: Iterable[Chart]) -> str:
    """Return the charts as the text of a JSON <script> element, which no title or name in them can end.

    Raises ValueError for NaN and infinity.
    """
    value = {"charts": [asdict(chart) for chart in charts]}
    packed = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return packed.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def translate(chart: Chart, lang: str) -> Chart:
    """Return a copy of the chart with its title and the names of its series in this language ("en" or "zh")."""
    known = language.words(lang)
    series = [replace(each, name=known.get(each.name, each.name)) for each in chart.series]
    return replace(chart, title=known.get(chart.title, chart.title), series=series)


def say_units(text: str | None, lang: str) -> str | None:
    """Return a text that ends with a unit of time, such as "5 minutes", with the unit in `lang`; None for None."""
    units = _UNITS if lang == "zh" else {}
    return text and re.sub("[a-z]+$", lambda unit: units.get(unit[0], unit[0]), text)


def environment(*folders: Path, lang: str = "en") -> Environment:
    """Return a jinja2 environment with the templates of these folders, then of the report, and filters such as `count`.

    Templates translate with _() to `lang`, "en" or "zh". Undefined and None print as a dash.
    """
    known = language.words(lang)
    pages = Environment(
        loader=FileSystemLoader([*folders, FILES]),
        autoescape=True,
        undefined=ChainableUndefined,  # what a missing object has is missing too
        finalize=lambda value: MISSING if value is None or isinstance(value, Undefined) else value,
    )
    pages.filters |= {"count": count, "short": short, "size": size, "digits": digits, "percent": percent}
    pages.filters |= {"moment": moment, "interval": interval}
    pages.filters["duration"] = lambda value: say_units(duration(value), lang)
    pages.filters["in_units"] = lambda rows: [[say_units(cell, lang) for cell in row] for row in rows]
    pages.globals |= {"first_and_last": histories.first_and_last, "fall": histories.relative_fall}

    def say(text: Any) -> Any:
        """Return text in the page's language; other values, and unknown text, as they are."""
        return known.get(text) or language.translate(text, lang) if isinstance(text, str) else text

    pages.globals["_"] = say
    return pages


def write(path: Path, template: str, title: str, charts: Iterable[Chart], **values: Any) -> Path:
    """Render the template to a self-contained page in the current language, write it to `path`, and return the path.

    `values` are the template's variables. Raises ValueError for NaN or infinity in a chart.
    """
    lang = language.current()
    text = (
        environment(lang=lang)
        .get_template(template)
        .render(
            values,
            title=title,
            lang=lang,
            chart_data=data(translate(chart, lang) for chart in charts),
            built=moment(time.time()),
            style=(FILES / "report.css").read_text("utf-8"),
            script=(FILES / "report.js").read_text("utf-8"),
        )
    )
    files.write_text(path, text + "\n")
    return path
