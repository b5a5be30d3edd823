"""Fingerprints of files on a host, so that doctor can tell a drifted copy. Doctor calls `look` here, too: one formula.

Sent beside probe.py under the same rules: Python 3.8 syntax, standard library only, never raises. Files up to
HASHED_BYTES are hashed, larger ones only measured, so that a look at 100 GB of shards takes no longer than one at code;
`finlm sync` hashes everything.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

HASHED_BYTES = 64 << 20


def look(tree: dict[str, Any]) -> dict[str, str | None]:
    """Relative name -> "sha256 ..." or "... bytes", null where there is no such file. Links count by their target."""
    return {name: fingerprint(Path(tree["path"], name), tree["follow"]) for name in tree["names"]}


def fingerprint(path: Path, follow: bool) -> str | None:
    """What a file is, short enough to send; the reason when it cannot be read."""
    try:
        if path.is_symlink() and not follow:
            return "link to " + os.readlink(path)  # noqa: PTH115 - Path.readlink is not in Python 3.8
        if not path.exists():
            return None
        if not path.is_file():
            return "not a file"
        size = path.stat().st_size
        return f"{size} bytes" if size > HASHED_BYTES else "sha256 " + hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return str(error.strerror)


def answer(request: str) -> None:
    """Print {role: {name: fingerprint}} for the JSON {role: tree}."""
    print(json.dumps({role: look(tree) for role, tree in json.loads(request).items()}))
