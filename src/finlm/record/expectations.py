"""A recipe's `expect:` against what a run of it gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from finlm.base.rundir import RunDir
from finlm.recipe.schema_expect import Expect
from finlm.record import history
from finlm.record.history import History


@dataclass(frozen=True)
class Checked:
    """One number: what was promised, what came out (None = nothing), and whether that is near enough."""

    what: str
    expected: float
    found: float | None
    ok: bool


@dataclass(frozen=True)
class Outcome:
    """All of them; `elsewhere` says why none was looked at."""

    checked: tuple[Checked, ...]
    elsewhere: str = ""

    @property
    def ok(self) -> bool:
        """True unless a number is off."""
        return all(one.ok for one in self.checked)

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Outcome:
        """The inverse of to_json, from a row."""
        return Outcome(tuple(Checked(**one) for one in row["checked"]), row["elsewhere"])

    def to_json(self) -> dict[str, Any]:
        """The fields of the events.jsonl row."""
        return {"ok": self.ok, "elsewhere": self.elsewhere, "checked": [asdict(one) for one in self.checked]}

    def lines(self) -> list[str]:
        """For a person: one line when all is well, else one for each number that is off."""
        if self.elsewhere:
            return [f"expected        not checked: {self.elsewhere}"]
        if self.ok:
            return [f"expected        all {len(self.checked)} numbers of the recipe's expect: are met"]
        wrong = [one for one in self.checked if not one.ok]
        shown = [
            f"  {one.what}: {'nothing' if one.found is None else f'{one.found:.4f}'}, expected {one.expected:.4f}"
            for one in wrong
        ]
        return [f"expected        {len(wrong)} of {len(self.checked)} numbers of the recipe's expect: are off", *shown]


def check(run: RunDir, expect: Expect) -> Outcome:
    """Look at the run's numbers."""
    read = history.read(run)
    device = str((read.starts[-1] if read.starts else {}).get("device"))
    if not (expect.loss or expect.held_out or expect.suites):
        return Outcome((), "the recipe's expect: has numbers of `--toy` only")
    if expect.hardware and expect.hardware.lower() not in device.lower():
        return Outcome((), f"measured on {expect.hardware}, this is {device}")
    return Outcome(tuple(_checked(read, expect)))


def _checked(read: History, expect: Expect) -> Iterator[Checked]:
    losses = dict(read.points("loss"))
    for step, loss in expect.loss.items():
        yield _one(f"training loss at step {step:,}", loss, losses.get(step), expect.tolerance)
    last = read.evals[-1] if read.evals else {}
    for name, loss in expect.held_out.items():
        found = last.get("loss") if name == "all" else (last.get("sources") or {}).get(name, {}).get("loss")
        yield _one(f"held-out loss of {name}", loss, found, expect.tolerance)
    end = (read.end or {}).get("step")
    for name, share in expect.suites.items():
        rows = [row for row in read.suites if row["suite"] == name and row["step"] == end]
        yield _one(f"right answers in {name}", share, rows[-1]["micro"] if rows else None, expect.suite_tolerance)


def _one(what: str, expected: float, found: float | None, tolerance: float) -> Checked:
    return Checked(what, expected, found, found is not None and abs(found - expected) <= tolerance)
