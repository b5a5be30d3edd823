"""The lower half of a report: problems, samples, checkpoints, recipe, how to reproduce, environment.

Shows credentials of no kind: the recipe's environments pass the same filter as the manifest's.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.secrets import redact_key
from finlm.recipe import recipe as recipes
from finlm.record import page
from finlm.record.history import History
from finlm.record.page import Html, element, join

_FIRST = ("torch", "deepspeed", "transformers", "accelerate", "trl", "datasets", "sentencepiece", "tokenizers", "numpy")


def read(path: Path) -> dict[str, Any]:
    """A JSON object; empty when the file is missing or no object."""
    try:
        value = files.read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def values(run: RunDir) -> dict[str, Any]:
    """The resolved recipe by dotted key; empty when it cannot be read."""
    try:
        loaded = recipes.load(run.recipe).recipe
    except UserError:
        return {}
    return dict(_leaves(loaded.model_dump(mode="json"), ""))


def unchecked_values(run: RunDir) -> dict[str, Any]:
    """The same of a recipe that another version wrote, as it stands in the file; empty when that is no YAML."""
    try:
        return dict(_leaves(YAML(typ="safe", pure=True).load(run.recipe), ""))
    except (OSError, YAMLError):
        return {}


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{index}]")
    else:
        yield key, value


def recipe(run: RunDir, values: Mapping[str, Any]) -> Html | None:
    """Every value of the resolved recipe with its origin, and the DeepSpeed settings made from it."""
    values, origins = values or unchecked_values(run), read(run.origins)
    written = {key: origin for key in values if (origin := _origin(key, origins))}
    defaults = [(key, _value(key, value)) for key, value in values.items() if key not in written]
    parts: list[Html] = []
    if written:
        rows = [(key, _value(key, values[key]), _place(origin)) for key, origin in written.items()]
        parts.append(element("div", page.table(("Key", "Value", "Origin"), rows, text=3), class_="keys"))
    if defaults:
        title = f"Values left at their defaults ({len(defaults)})" if written else "All values, of unrecorded origin"
        body = element("div", page.table(("Key", "Value"), defaults, text=2), class_="keys")
        parts.append(page.folded(title, body, is_open=not written))
    settings = read(run.ds_config)
    if settings:
        parts.append(page.folded("DeepSpeed settings", page.code(json.dumps(settings, indent=2, ensure_ascii=False))))
    files_named = sorted({origin.rpartition(":")[0] for origin in written.values()} - {""})
    note = f"Origins are lines of {', '.join(files_named)}." if files_named else ""
    return page.section("Recipe", "recipe", *parts, note=note) if parts else None


def _place(origin: str) -> Html:
    """An origin without its directory; the whole path shows on hovering."""
    return element("span", origin.rpartition("/")[2], class_="origin", title=origin)


def _origin(key: str, origins: Mapping[str, Any]) -> str | None:
    """Where a value was written: itself, something in it, or the list or mapping it was given in."""
    inside = (place for name, place in origins.items() if name.startswith((f"{key}.", f"{key}[")))
    found = origins.get(key) or next(inside, None)
    while key and found is None:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
        found = origins.get(key)
    return None if found is None else str(found)


def _value(key: str, value: Any) -> Html:
    shown = redact_key(key, value)
    return element("code", shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False, default=str))


def problems(run: RunDir, history: History) -> Html:
    """Findings of the doctor before launch, and incidents during the run."""
    report = read(run.doctor)
    rows: list[Html] = []
    for finding in report.get("findings") or ():
        head = join([finding.get("level"), finding.get("check"), finding.get("host")], " · ")
        is_error = finding.get("level") == "error"
        rows.append(_problem(head, finding.get("evidence"), finding.get("fix"), is_error=is_error))
    checked = "findings" in report
    before = join(rows) if rows else element("p", "Nothing wrong." if checked else "Not recorded.", class_="quiet")
    during = [
        _problem(
            join([f"step {page.count(row.get('step')) or page.MISSING}", row.get("what")], " · "),
            row.get("detail"),
            below=_documents(row),
        )
        for row in history.incidents[-200:]
    ]
    during += [
        _problem(
            f"step {page.count(row.get('origin')) or page.MISSING} · rolled back",
            f"to the checkpoint of step {page.count(row.get('step'))}, without the data since",
        )
        for row in history.rollbacks
    ]
    if history.unreadable:
        during.append(_problem("events.jsonl", f"{history.unreadable:,} line(s) could not be read and are left out"))
    without_loss = history.steps["loss"].count(None)
    if without_loss:
        during.append(_problem("loss", f"{without_loss:,} step(s) have none: it was not a finite number"))
    if len(history.incidents) > 200:
        during.insert(0, _problem("incidents", f"the last 200 of {len(history.incidents):,}"))
    after = join(during) if during else element("p", "None." if history.starts else "Not started.", class_="quiet")
    parts = (element("h3", "Doctor, before launch"), before, element("h3", "Incidents, during the run"), after)
    return page.section("Findings and incidents", "problems", *parts)


def _documents(row: Mapping[str, Any]) -> Html | None:
    """The documents of an incident's batch, folded."""
    found = row.get("documents") or ()
    if not found:
        return None
    names = ("source", "shard", "document", "tokens", "text")
    lines = [tuple(page.count(one.get(n)) if n == "tokens" else one.get(n) for n in names) for one in found]
    head = ("Source", "Shard", "Number", "Tokens", "Begins")
    return page.folded(f"Documents ({len(found)})", page.table(head, lines, text=5))


def promises(history: History) -> Html | None:
    """The recipe's expect: against what came out."""
    if not history.expectations:
        return None
    row = history.expectations[-1]
    rows = [
        (one.get("what"), page.digits(one.get("expected")), page.digits(one.get("found")), "yes" if one["ok"] else "NO")
        for one in row.get("checked") or ()
    ]
    table = page.table(("", "Expected", "Found", "Near enough"), rows) if rows else element("p", row.get("elsewhere"))
    return page.section("Expected by the recipe", "expected", table)


def diagnosis(run: RunDir) -> Html | None:
    """The first finding of `finlm diagnose` on a run that failed, and the names of the others."""
    found = read(run.diagnosis).get("findings") or ()
    if not found:
        return None
    first = found[0]
    place = join([first.get("file"), first.get("line"), first.get("host")], " · ")
    steps = [element("li", step) for step in str(first.get("fix") or "").splitlines()]
    parts = [
        element("h3", first.get("title")),
        element("p", first.get("explanation")),
        page.code(str(first.get("evidence") or "")),
        element("p", place, class_="quiet"),
        element("ol", join(steps)),
    ]
    if len(found) > 1:
        parts.append(element("p", "Also possible: " + ", ".join(str(other.get("cause")) for other in found[1:])))
    return page.section("Why it failed", "diagnosis", *parts)


def _problem(head: Any, *lines: Any, below: Html | None = None, is_error: bool = False) -> Html:
    inner = join(element("p", line) for line in lines if line)
    return element("div", element("h4", head), inner, below or "", class_="problem error" if is_error else "problem")


def samples(history: History) -> Html | None:
    """What the model wrote; the prompt is set apart."""
    if not history.samples:
        return None
    shown = [
        element(
            "figure",
            element("figcaption", f"step {page.count(row.get('step')) or page.MISSING}"),
            element("blockquote", element("b", row.get("prompt")), row.get("text")),
        )
        for row in history.samples[-8:]
    ]
    return page.section("Samples", "samples", *shown)


def checkpoints(history: History) -> Html | None:
    """Checkpoints and exports that were written."""
    rows = [
        (page.count(row.get("step")), row.get("path"), page.size(row.get("bytes")), page.duration(row.get("seconds")))
        for row in history.checkpoints[-50:]
    ]
    rows += [("export", row.get("path"), page.size(row.get("bytes")), None) for row in history.exports[-1:]]
    if not rows:
        return None
    head = ("Step", "Directory", "Size", "Time to save")
    note = "As they were written; older ones are removed beyond checkpoint.keep_last."
    return page.section("Checkpoints", "checkpoints", page.table(head, rows, text=2), note=note)


def reproduce(run: RunDir, manifest: Mapping[str, Any]) -> Html | None:
    """How it was started, and how the same run is started again from its own directory."""
    if not manifest:
        return None
    started = shlex.join(map(str, manifest.get("command") or ()))
    code = manifest.get("finlm") or {}
    git = code.get("git") or {}
    lines = [f"cd {shlex.quote(str(manifest['directory']))}"] if manifest.get("directory") else []
    python = shlex.quote(str((manifest.get("machine") or {}).get("executable") or "python"))
    path, resolved = shlex.quote(str(run.code)), shlex.quote(str(run.recipe))
    again = [*lines, f"{python} -m finlm reproduce {shlex.quote(str(run.path))}"]
    by_hand = [*lines, f"PYTHONPATH={path} {python} -m finlm train {resolved} --new"]
    state = None if not git else f"{git.get('commit')}{' with uncommitted changes' if git.get('dirty') else ''}"
    shards = manifest.get("shards") or {}
    hashes = [
        ("finlm", code.get("version")),
        ("Git commit", state),
        ("Code", code.get("code_sha256")),
        ("Recipe", (manifest.get("recipe") or {}).get("sha256")),
        ("Plan", (manifest.get("plan") or {}).get("sha256")),
        ("Shards", shards.get("sha256")),
        ("Tokenizer", shards.get("tokenizer_sha256")),
        *((name, seed) for name, seed in (manifest.get("seeds") or {}).items()),
    ]
    return page.section(
        "Reproduce",
        "reproduce",
        element("h3", "The same run again, with the code and the recipe it carries"),
        page.code("\n".join(again)),
        element("h3", "Without the comparison"),
        page.code("\n".join(by_hand)),
        element("h3", "How it was started") if started else "",
        page.code("\n".join([*lines, started])) if started else "",
        element("div", page.pairs(hashes), class_="hashes"),
    )


def environment(manifest: Mapping[str, Any], history: History) -> Html | None:
    """Machine, versions and variables."""
    machine, packages = manifest.get("machine") or {}, manifest.get("packages") or {}
    start = history.starts[-1] if history.starts else {}
    if not (manifest or start):
        return None
    gpus = [f"{gpu.get('name')}, driver {gpu.get('driver_version')}" for gpu in machine.get("gpus") or ()]
    cpus = page.count(machine.get("cpus"))
    facts = [
        ("Host", machine.get("hostname")),
        ("Platform", machine.get("platform")),
        ("Python", machine.get("python")),
        ("Cores", f"{cpus}, {page.count(machine.get('cpus_usable')) or page.MISSING} usable" if cpus else None),
        (
            "GPUs",
            "; ".join(f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus)) or ("none" if machine else None),
        ),
    ]
    facts += [(name, packages.get(name) or start.get(name)) for name in _FIRST if name in packages or name in start]
    parts: list[Html] = [page.pairs(facts)]
    variables = manifest.get("environment") or {}
    if variables:
        shown = [(name, element("code", value)) for name, value in variables.items()]
        body = element("div", page.table(("Variable", "Value"), shown, text=2), class_="keys")
        parts.append(page.folded(f"Environment variables ({len(shown)})", body))
    if packages:
        listed = "\n".join(f"{name}=={version}" for name, version in packages.items())
        parts.append(page.folded(f"Installed packages ({len(packages)})", page.code(listed)))
    return page.section("Environment", "environment", *parts)
