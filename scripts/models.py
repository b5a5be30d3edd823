"""Write the table of admitted types, recipe/models/model_types.json, and docs/models.md with its Chinese twin.

`python scripts/models.py TYPE ...` runs all cells on those types and writes their rows (minutes of two cores),
without a type it writes the pages from the rows, `--check` says whether these are current.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.recipe.models import traits

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = {"en": DOCS / "models.md", "zh": DOCS / "models.zh-CN.md"}
_WORDS = {"en": ("passed", "fails"), "zh": ("通过", "未通过")}


def page(lang: str) -> str:
    """Return the text of docs/models.md in this language ("en" or "zh"), from the rows that finlm ships."""
    rows = traits.shipped()
    names = list(dict.fromkeys(cell for row in rows.values() for cell in row.cells))
    passed, fails = _WORDS[lang]
    head = Path(__file__).with_name(f"models.{lang}.txt").read_text(encoding="utf-8")
    lines = [head, f"| model_type | {' | '.join(names)} |", f"| --- {'| --- ' * len(names)}|"]
    for name, row in sorted(rows.items()):
        words = ["–" if cell not in row.cells else fails if row.cells[cell] else passed for cell in names]
        lines.append(f"| `{name}` | {' | '.join(words)} |")
    failing = [(name, cell, why) for name, row in sorted(rows.items()) for cell, why in row.failing.items()]
    lines += ["", *(f"- `{name}`, {cell}: {why}" for name, cell, why in failing)] if failing else []
    return "\n".join(lines) + "\n"


def gate(names: Sequence[str]) -> None:
    """Run all cells on these types, print the results to stderr and write the rows to model_types.json.

    Rows of types that fail are written too; a type that no cell can check is skipped.
    """
    from finlm.admit import command

    with tempfile.TemporaryDirectory(prefix="finlm-admit-") as shared, command.Trainer(Path(shared)) as trainer:
        for name in names:
            try:
                row = command.make_row(name)
                found = dict(command.examine(command.read_config(name)[0], row, None, trainer))
            except UserError as error:
                screen.say(f"{name}: {error.problem}")
                continue
            screen.say(f"{name}: {'passed' if not any(found.values()) else {k: v for k, v in found.items() if v}}")
            traits.write_records(traits.shipped() | {name: dataclasses.replace(row, cells=found)}, traits.RECORD)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells on the named types, then write both pages; return 0.

    With --check write no page, and return 1 if a page is stale.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if names := [name for name in given if name != "--check"]:
        gate(names)
    return screen.write_pages({path: page(lang) for lang, path in PAGES.items()}, given, "python scripts/models.py")


if __name__ == "__main__":
    sys.exit(main())
