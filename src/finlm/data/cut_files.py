"""Files that end too early: an archive cut short by a download, a damaged table. What follows the cut is lost.

How much that is cannot be counted, so it stands for a share of the rows at least: the default limit refuses it, and a
limit raised on purpose accepts it, which is said with the counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from finlm.base.errors import UserError

SHARE = 0.01  # of the source's rows
# How the reason of such a row begins.
ARCHIVE_SHORT = "the archive is cut short"
ARCHIVE_DAMAGED = "the archive is damaged"
FILE_DAMAGED = "the file is damaged"


def is_cut(reason: str) -> bool:
    """Whether a row is broken because its file ends there."""
    return reason.startswith((ARCHIVE_SHORT, ARCHIVE_DAMAGED, FILE_DAMAGED))


def lost(rows: int, broken: int, has_cut: bool) -> float:
    """The rows that count as lost of a source that has `broken` ones, and cut files or not."""
    return max(SHARE * rows, broken) if has_cut else broken


def refuse(source: str, found: Sequence[tuple[str, int, str]], rows: int, broken: int, allowed: float) -> None:
    """Raises UserError when a source's cut files, as (file, row, reason), are more than data.max_broken_fraction.

    Not when the broken rows are too many without them: that is another mistake.
    """
    counted = lost(rows, broken, has_cut=True)
    if not found or counted <= allowed * rows or broken - len(found) > allowed * rows:
        return
    file, _, reason = found[0]
    what = "ends early" if reason.startswith(ARCHIVE_SHORT) else "is damaged"
    more = f", as {'do' if what == 'ends early' else 'are'} {len(found) - 1:,} more" if len(found) > 1 else ""
    needed = math.ceil(round(counted / rows * 1000, 6)) / 1000
    raise UserError(
        f"source {source}: {Path(file).name} {what}{more}",
        evidence="\n".join(
            (
                *(f"{name}:{row}: {why}; what follows is lost" for name, row, why in found[:3]),
                f"how much is unknown: it counts as {counted / rows:.2%} of the rows, of which "
                f"data.max_broken_fraction allows {allowed:.2%}",
            )
        ),
        fix="fetch it again (compare its size or checksum), "
        f"or set data.max_broken_fraction={needed:g}, which leaves out the rest of the file",
    )


def accepted(found: Sequence[str]) -> str:
    """What is said of the cut files that were accepted, to follow the counts."""
    names = ", ".join(Path(file).name for file in found[:3]) + (", ..." if len(found) > 3 else "")
    return f"; {names}: cut, the rest not read" if found else ""
