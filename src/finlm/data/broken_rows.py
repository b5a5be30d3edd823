"""Too many rows that cannot be read: told before anything else where a source begins with them, else when all are read.

A wrong text_field or encoding breaks every row, and the beginning of each source shows it before hours of reading.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError
from finlm.data import cut_files, parsing, readers, steps
from finlm.data.sources import Input

_KEPT = 10_000  # rows of a source that are kept for a look: most often all are broken for one reason
_FIRST = 1000  # rows that a source is judged by
_ALMOST_ALL = 0.9
_SAMPLES = 3
_HOW = "mend the file (or set data.sources[i].text_field or .encoding), or raise data.max_broken_fraction"


def check_first(inputs: Sequence[Input], max_broken_fraction: float) -> None:
    """Raises UserError for the first source of several blocks whose first rows are almost all broken."""
    for item in inputs:
        blocks = list(itertools.islice(readers.blocks(item, steps.unseen), 2))
        if len(blocks) < 2 or blocks[0].cut:  # read in no time; all of its broken rows are told then
            continue
        rows = list(itertools.islice(parsing.rows(blocks[0], item), _FIRST))
        broken = [row for row in rows if row.broken]
        if len(broken) > max(_ALMOST_ALL, max_broken_fraction) * len(rows):
            raise UserError(
                f"source {item.source}: {len(broken):,} of its first {len(rows):,} rows cannot be read",
                evidence="\n".join(
                    _shown(str(row.path), row.line, row.broken, row.excerpt()) for row in broken[:_SAMPLES]
                ),
                fix=_how(broken[0].line, broken[0].excerpt()),
            )


def check(directory: Path, manifest: dict[str, Any], max_broken_fraction: float, keep: Path) -> None:
    """Raises UserError for the first source with more broken rows than allowed, and keeps them where they are found."""
    for item in manifest["inputs"]:
        kept = keep / f"broken-{item['source']}.jsonl"
        if cut_files.lost(item["rows"], item["broken"], bool(item["cut"])) <= max_broken_fraction * item["rows"]:
            kept.unlink(missing_ok=True)
            continue
        found, ends = list[dict[str, Any]](), list[dict[str, Any]]()
        for row in files.read_json_lines(directory / "broken.jsonl"):
            if row["source"] == item["source"]:
                found += [row] * (len(found) < _KEPT)
                ends += [row] * cut_files.is_cut(row["reason"])
        files.write_text(kept, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
        where = [(row["file"], row["line"], row["reason"]) for row in ends]
        cut_files.refuse(item["source"], where, item["rows"], item["broken"], max_broken_fraction)
        shown = [*ends[:1], *(row for row in found if row not in ends[:1])][:_SAMPLES]
        raise UserError(
            f"source {item['source']}: {item['broken']:,} of {item['rows']:,} rows cannot be read "
            f"({item['broken'] / item['rows']:.2%}); "
            f"data.max_broken_fraction allows {max_broken_fraction:.2%}",
            evidence="\n".join(_shown(row["file"], row["line"], row["reason"], row["start"]) for row in shown),
            fix=f"{'all' if item['broken'] <= _KEPT else f'the first {_KEPT:,}'} of them are in {kept}; "
            + _how(found[0]["line"], found[0]["start"]),
        )


def _how(line: int, start: str) -> str:
    """The way out, by the first broken row."""
    is_list = line == 1 and start.lstrip().startswith("[")
    return (
        f"it is one JSON list: write a row a line (jq -c '.[]' LIST.json > ROWS.jsonl), or {_HOW}" if is_list else _HOW
    )


def _shown(file: str, line: int, reason: str, start: str) -> str:
    return f"{file}:{line}: {reason}: {start[:60]!r}"
