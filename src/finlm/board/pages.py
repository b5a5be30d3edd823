"""Build each page of the board from the functions behind the commands `runs`, `report`, `compare`, `plan` and `diff`.

The pages of a run and of several runs use the report's own templates in the board's frame and are rendered at every
request; histories that have not changed are not read again.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment

from finlm import prepare
from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import list_runs
from finlm.base.secrets import redact_text
from finlm.cli import command_line
from finlm.cli import recipes as commands
from finlm.diagnose import command as diagnosis
from finlm.plan import advice, show
from finlm.plan.plan import Plan
from finlm.recipe import cluster, parents
from finlm.recipe import recipe as recipes_
from finlm.record import compare as comparing
from finlm.record import history, live
from finlm.record.history import Chart, History, Listed
from finlm.record.manifest import Manifest
from finlm.record.report import run_page

FILES = Path(__file__).parent
_MOST_RUNS = 500  # on a page
_MOST_SAMPLES = 60
_DOCS = ("incidents", "troubleshooting")
_PLANNING = threading.Lock()  # a plan keeps a core busy: one at a time, however fast somebody types


class Missing(Exception):
    """Raised when an address names a run or recipe that is not listed."""


@dataclass(frozen=True)
class Board:
    """The directory of runs and the hostfile that the board shows, and whether actions are allowed."""

    runs: Path
    hostfile: str | None = None
    allow_actions: bool = False


@dataclass(frozen=True)
class Page:
    """A page to render.

    `poll` is the seconds until a browser asks again (0: never), `place` the menu entry that it is under.
    """

    template: str
    title: str
    place: str
    values: Mapping[str, Any]
    charts: Iterable[Chart] = ()
    poll: float = 0


def render(page: Page, board: Board, lang: str, csrf: str) -> str:
    """Return the page as HTML in this language, "en" or "zh".

    `csrf`, the secret that forms send back, goes into it only if actions are allowed.
    """
    made = environment(lang)
    return made.get_template(page.template).render(
        page.values,
        title=page.title,
        place=page.place,
        poll=page.poll,
        lang=lang,
        csrf=csrf if board.allow_actions else "",
        allow_actions=board.allow_actions,
        chart_data=run_page.data(run_page.translate(chart, lang) for chart in page.charts),
    )


@lru_cache
def environment(lang: str) -> Environment:
    """Return the jinja2 environment of the board's templates with the words of this language; cached.

    Its global `docs` names the pages of docs/ that are installed.
    """
    made = run_page.environment(FILES, lang=lang)
    made.globals["docs"] = [name for name in _DOCS if find_docs(name, lang)]
    return made


def problem(error: UserError) -> Page:
    """Return the page that shows an error: problem, evidence, fix."""
    return Page("problem.html", error.problem, "", {"error": error})


def damage_error(names: Sequence[str], error: Exception) -> UserError:
    """Return, without raising it, the UserError about these runs, whose files raised `error` (one of DAMAGED)."""
    return UserError(
        f"{', '.join(names)} holds files that finlm did not write",
        evidence=f"{type(error).__name__}: {error}",
        fix="look at events.jsonl and plan.json there; the other runs are not touched",
    )


# --- runs


def _list_runs(board: Board) -> list[RunDir]:
    """Return the runs of the board's directory, without links that lead out of it."""
    root = board.runs.resolve()
    return [run for run in list_runs(board.runs) if run.path.resolve().is_relative_to(root)]


def find_run(board: Board, name: str) -> RunDir:
    """Return the run of this directory name. Raises Missing if none is listed (_list_runs)."""
    found = next((run for run in _list_runs(board) if run.path.name == name), None)
    if found is None:
        raise Missing("there is no such run")
    return found


def _sizes_and_times(run: RunDir) -> tuple[tuple[int, int], ...]:
    """Return sizes and mtimes of a run's files, which change when the run goes on or is resumed."""
    return tuple(_size_and_time(path) for path in (run.events, run.plan, run.manifest, run.path / ".lock"))


def _size_and_time(path: Path) -> tuple[int, int]:
    """Return (size in bytes, mtime in ns) of a file; (0, 0) if it cannot be read."""
    try:
        about = path.stat()
    except OSError:
        return 0, 0
    return about.st_size, about.st_mtime_ns


@lru_cache(maxsize=12)
def _history(path: Path, mark: tuple[tuple[int, int], ...]) -> History:
    """Return the history of the run at `path`; cached while `mark`, its files' _sizes_and_times, is the same."""
    return history.read_history(RunDir(path))


_lines: dict[Path, tuple[tuple[tuple[int, int], ...], Listed]] = {}  # what was read of each run, and its mark then
_OPEN = ("running", "not started")  # states that time alone may change


def list_lines(board: Board) -> list[Listed]:
    """Return the rows of `finlm runs`, newest recipe.yaml first; reads again only runs that changed or are not over."""
    found = _newest(board)
    for run in found:
        mark, kept = _sizes_and_times(run), _lines.get(run.path)
        if kept is None or kept[0] != mark or kept[1].state in _OPEN:
            _lines[run.path] = mark, _read_line(run)
    return [_lines[run.path][1] for run in found]


# Errors of readers that meet rows which finlm never wrote.
DAMAGED = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)


def _read_line(run: RunDir) -> Listed:
    """Return the run's row, or one with the state "damaged" if its files cannot be read."""
    try:
        return history.read_listed(run)
    except DAMAGED:
        return Listed(run.path.name, "damaged", 0, None, None, None, "-", "")


def _newest(board: Board) -> list[RunDir]:
    """Return the runs of the board, the newest recipe.yaml first."""
    return sorted(_list_runs(board), key=lambda run: _size_and_time(run.recipe)[1], reverse=True)


def runs(board: Board, wanted: str) -> Page:
    """Return the page of at most 500 runs: all, or those with every word of `wanted` in name, state or recipe."""
    lines = list_lines(board)
    words = wanted.lower().split()
    found = [line for line in lines if all(word in f"{line.name} {line.state} {line.recipe}".lower() for word in words)]
    values = {"runs": found[:_MOST_RUNS], "found": len(found), "all": len(lines), "wanted": wanted, "dir": board.runs}
    return Page("runs.html", "Runs", "runs", values, poll=5)


def run(board: Board, name: str, lang: str) -> Page:
    """Return the page of a run: its report as of now; if it failed or was killed, with what diagnose finds, in `lang`.

    Raises Missing for an unknown run, and one of DAMAGED for files that are not finlm's.
    """
    found = find_run(board, name)
    read = _history(found.path, _sizes_and_times(found))
    state = history.state(found, read)
    values = run_page.values(found, read, state)
    if state in ("failed", "killed"):
        values["diagnosis"] = _diagnose(found, lang) or values["diagnosis"]
    values |= {
        "run": name,
        "left": _seconds_left(found) if state == "running" else None,
        "dropped": _read_dropped(found),
        "has_report": report_of(found) is not None,
        "has_model": (found.export / "config.json").is_file(),
    }
    is_open = state in ("running", "not started", "killed", "failed")
    return Page("board_run.html", name, "runs", values, history.charts(read), poll=2 if is_open else 0)


def _seconds_left(run: RunDir) -> float | None:
    """Return the predicted seconds to the last step; None for a damaged plan, or with fewer than three steps."""
    try:
        state = live.State(Plan.read(run.plan))
    except UserError:
        return None
    for row in list(run.read_events("step"))[-live.RECENT :]:
        state.feed(row)
    return state.left


def _diagnose(run: RunDir, lang: str) -> Sequence[Any]:
    """Return the findings of a run's logs; () without logs, or when they cannot be read."""
    logs = tuple((str(path), *_size_and_time(path)) for path in diagnosis.run_logs(run.path))
    return _findings(run.path, lang, logs) if logs else ()


@lru_cache(maxsize=50)
def _findings(path: Path, lang: str, logs: tuple[tuple[str, int, int], ...]) -> Sequence[Any]:
    """Return the findings of a run's logs, cached until a log in `logs` changes; () when a log cannot be read."""
    try:
        return diagnosis.of_run(path, lang, keep=False)
    except OSError:
        return ()


def _read_dropped(run: RunDir) -> list[Mapping[str, Any]]:
    """Return at most 60 samples of the documents that prepare dropped, at most 6 of each reason.

    [] if the data are not here.
    """
    kept: dict[str, list[Mapping[str, Any]]] = {}
    for row in _samples(run.path, _size_and_time(run.recipe)):
        if isinstance(row, dict) and len(kept.setdefault(str(row.get("reason")), [])) < _MOST_SAMPLES // 10:
            kept[str(row.get("reason"))].append(row)
    return [row for rows in kept.values() for row in rows][:_MOST_SAMPLES]


@lru_cache(maxsize=50)
def _samples(path: Path, mark: tuple[int, int]) -> Sequence[Any]:
    """Return samples of the documents that prepare dropped, cached for this `mark`; () if they cannot be read."""
    try:
        return prepare.dropped_samples(recipes_.load(RunDir(path).recipe).recipe)
    except (UserError, OSError):
        return ()


def report_of(found: RunDir) -> Path | None:
    """Return the path of a run's report.html; None if it is missing or leads out of the run directory."""
    try:
        path = files.within(found.path, found.report.name)
    except ValueError:
        return None
    return path if path.is_file() else None


def compare(board: Board, names: Sequence[str]) -> Page:
    """Return the page of runs side by side; for two runs also with the differences of their recipes.

    Raises Missing for an unknown run, one of DAMAGED for files that are not finlm's, and UserError for fewer than two
    runs, more than six, or the same run twice.
    """
    found = [find_run(board, name) for name in names]
    if len(found) < 2:
        raise UserError("fewer than two runs were chosen", fix="choose two or more in the list of runs")
    loaded = comparing.load_runs(found)
    pair = comparing.compare(found[0], found[1]) if len(found) == 2 else None
    values = comparing.page_values(loaded) | {"pair": pair, "chosen": names, "digits": comparing.format_losses}
    return Page("compare.html", f"{len(found)} runs side by side", "runs", values, comparing.charts(loaded))


# --- recipes


def _recipes() -> dict[str, Path]:
    """Return {recipes/<family>/<stage>.yaml: file}, without links that lead out of the folder of recipes."""
    known = parents.list_recipes()
    return {name: path for name, path in known.items() if path.resolve().is_relative_to(path.parent.parent.resolve())}


def find_recipe(name: str) -> Path:
    """Return the file of the recipe of this name. Raises Missing if there is none."""
    found = _recipes().get(name)
    if found is None:
        raise Missing("there is no such recipe")
    return found


def recipes(board: Board) -> Page:
    """Return the page of all recipes, by family; the board has no part in it."""
    families: dict[str, list[str]] = {}
    for name in _recipes():
        families.setdefault(name.split("/")[1], []).append(name)
    return Page("recipes.html", "Recipes", "recipes", {"families": families})


@dataclass(frozen=True)
class Wanted:
    """What the form of a recipe says: values as --set takes them, and hosts as `finlm plan` takes them."""

    name: str
    overrides: tuple[str, ...] = ()
    gpu: str | None = None
    local: bool = False
    hostfile: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, board: Board, name: str, ask: Mapping[str, str]) -> Wanted:
        """Return what the parameters `ask` of a request say about the recipe `name`.

        Reads `set` (KEY=VALUE, a line each), `on` ("local", "hostfile" or else the recipe's hardware) and `gpu`.
        """
        lines = tuple(line.strip() for line in ask.get("set", "").splitlines() if line.strip())
        local, hostfile = ask.get("on") == "local", board.hostfile if ask.get("on") == "hostfile" else None
        return cls(name, lines, ask.get("gpu", "").strip() or None, local, hostfile, dict(ask))

    def options(self) -> argparse.Namespace:
        """Return the hosts as options of `finlm plan`."""
        return argparse.Namespace(hostfile=self.hostfile, local=self.local, gpu=self.gpu)


def recipe(board: Board, name: str, ask: Mapping[str, str]) -> Page:
    """Return the page of a recipe: its text with secrets redacted, and the form that forks it.

    `ask` has the request's parameters, which fill in the form. Raises Missing if there is no such recipe.
    """
    path = find_recipe(name)
    text = redact_text(path.read_text("utf-8", "replace"))
    values = {"recipe": name, "text": text, "wanted": ask, "has_hostfile": bool(board.hostfile)}
    return Page("recipe.html", name, "recipes", values)


def plan(board: Board, ask: Mapping[str, str]) -> Page:
    """Return the page of what `finlm plan` prints for a recipe with the form's values; plans one request at a time.

    `ask` has the name under `recipe`, and what Wanted.read() reads. Raises Missing for an unknown recipe, and UserError
    for values that cannot be used or planned.
    """
    wanted = Wanted.read(board, ask.get("recipe", ""), ask)
    path = find_recipe(wanted.name)
    with _PLANNING:
        loaded = recipes_.load(path, wanted.overrides)
        made, found, warnings = commands.consult(loaded.recipe, command_line.to_plan(wanted.options(), loaded.recipe))
    values = {
        "recipe": wanted.name,
        "wanted": wanted,
        "made": made,
        "rows": show.rows(made),
        "found": found,
        "means": advice.sentences(found.advice, made),
        "said": [*loaded.said, *(f"warning: {warning}" for warning in warnings)],
    }
    return Page("plan.html", "Plan", "recipes", values)


def diff(board: Board, one: str, other: str) -> Page:
    """Return the page of the differences of two recipes and of their plans; `one` and `other` are their names.

    Without differences while one of them is "", not yet chosen. Waits for other requests that plan. Raises Missing for
    an unknown recipe, and UserError for a recipe that cannot be used.
    """
    names = list(_recipes())
    values: dict[str, object] = {"names": names, "a": one, "b": other, "differences": None}
    if one and other:
        with _PLANNING:
            found, follows = commands.compare([find_recipe(one), find_recipe(other)], Wanted("").options())
        values |= {"differences": found, "follows": follows}
    return Page("diff.html", "Two recipes", "recipes", values)


# --- hosts


def hosts(board: Board) -> Page:
    """Return the page of hosts: the hostfile, and doctor's findings in the newest run that has hosts. Asks no host.

    Looks at the 20 newest runs. A hostfile with mistakes shows its error. Raises UserError for an unreadable
    hostfile.txt.
    """
    path = board.hostfile or cluster.default_hostfile()
    seen = [(run, Manifest.read(run), history.read_object(run.doctor)) for run in _newest(board)[:20]]
    of_run = next(((run, made, doctor) for run, made, doctor in seen if made and made.hosts), None)
    values: dict[str, object] = {"hostfile": path, "named": [], "wrong": None, "seen": None}
    if path is not None:
        try:
            named = cluster.load(path)
            kinds = (("", named.hosts), ("spare", named.spares))
            values["named"] = [(host.name, host.slots, kind) for kind, hosts in kinds for host in hosts]
        except UserError as error:
            values["wrong"] = error
    if of_run is not None:
        values |= {"seen": of_run[0].path.name, "manifest": of_run[1], "doctor": of_run[2]}
    return Page("hosts.html", "Hosts", "hosts", values)


def find_docs(name: str, lang: str) -> Path | None:
    """Return the path of a page of docs/ in this language; None for an unknown name, or if it is not installed."""
    if name not in _DOCS:
        return None
    return parents.shipped_file(Path("docs") / f"{name}{'.zh-CN' if lang == 'zh' else ''}.md")


def chat(board: Board, name: str) -> Page:
    """Return the page that chats with a run's model.

    Raises Missing for an unknown run, and UserError without --allow-actions or without an exported model.
    """
    found = find_run(board, name)
    if not board.allow_actions:
        raise UserError("this board reads only", fix="`finlm board --allow-actions` loads models and talks to them")
    if not (found.export / "config.json").is_file():
        raise UserError(f"{name} has no exported model yet", fix="wait until it has finished")
    return Page("chat.html", name, "runs", {"run": name})
