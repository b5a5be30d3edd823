"""The far end of sync, piped to `ssh host python3 -`; sync itself imports its hash, so both ends have one formula.

One self-contained file, standard library only, Python 3.8: a bare host can run it. It answers with one line of JSON
after MARK, whatever a login script printed before. Paths travel as UTF-8 text with surrogate escapes, so that neither
a host's locale nor a name that is not UTF-8 matters.

It does not copy anything (rsync does) and removes only files that an earlier sync recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RECORD = ".finlm-sync.json"  # on a target: the files that sync put there
LOCK = ".finlm-sync.lock"  # on the source: held during a sync; a target that sees it shares the source's disk
PARTIAL = ".finlm-partial"  # beside a file whose transfer was cut: what has arrived
UNTOUCHED = (".venv", "cache", "runs")  # a host's own; never part of the code
MARK = "finlm-sync:"


def encode(text: str) -> bytes:
    """A path as the bytes the file system holds."""
    return text.encode("utf-8", "surrogateescape")


def decode(path: bytes) -> str:
    """A path's bytes as text that JSON can carry."""
    return path.decode("utf-8", "surrogateescape")


def local(*parts: str) -> Path:
    """The path of such texts in this host's own encoding."""
    return Path(*(os.fsdecode(encode(part)) for part in parts))


def text(path: str | Path) -> str:
    """A path of this host as such text."""
    return decode(os.fsencode(path))


def digest(path: Path, follow: bool) -> str | None:
    """Hex sha256 of a file's bytes, or of a symlink's target unless followed; None when there is no such file."""
    result = hashlib.sha256()
    try:
        if path.is_symlink() and not follow:
            result.update(b"-> " + os.fsencode(os.readlink(path)))  # noqa: PTH115 - not in Python 3.8
        elif not path.is_file():
            return None
        else:
            with path.open("rb") as file:
                for block in iter(lambda: file.read(1 << 20), b""):
                    result.update(block)
    except FileNotFoundError:
        return None
    return result.hexdigest()


def digests(root: str, names: list[str], follow: bool) -> dict[str, str | None]:
    """digest() of every name under root; four at a time, since hashlib releases the interpreter lock."""
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda name: digest(local(root, name), follow), names)
        return dict(zip(names, found))  # noqa: B905 - `strict` is not in Python 3.8


def tree_hash(files: dict[str, str | None]) -> str:
    """Hex sha256 over the lines `path sha256`, sorted."""
    lines = sorted(f"{name} {value or 'missing'}" for name, value in files.items())
    return hashlib.sha256(encode("\n".join(lines))).hexdigest()


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Decide whether this host may be written to, remove what left the source, claim what will come.

    `state`: "ready", "shared" (the source's own disk), "foreign" (a directory sync did not write) or "taken" (files
    in the way that sync did not put there). With `dry_run` nothing is written and `changed` counts the differing files.
    """
    root = local(request["root"])
    if _is_shared(request):
        return {"state": "shared"}
    record = _record(root)
    entries = sorted(text(name) for name in os.listdir(root)) if root.is_dir() else []
    strangers = [name for name in entries if name not in UNTOUCHED and not name.startswith(RECORD)]
    if record is None and strangers:
        return {"state": "foreign", "names": strangers[:5], "count": len(strangers)}
    record = record or {"trees": {}}
    taken, gone, changed = [], [], 0
    for tree in request["trees"]:
        path, files = tree["path"], tree["files"]
        former = set(record["trees"].get(path, {}).get("files", []))
        unsure = [name for name in files if request["dry_run"] or name not in former]
        present = digests(path, unsure, False)
        other = [name for name in unsure if present[name] != files[name]]
        changed += len(other)
        leaving = [name for name in sorted(former - set(files)) if _may_go(path, name)]
        taken += [text(local(path, n)) for n in other if n not in former and _in_the_way(path, n, set(leaving))]
        gone += [(path, name) for name in leaving]
    if taken:
        return {"state": "taken", "names": sorted(taken)[:5], "count": len(taken)}
    if not request["dry_run"]:
        for path, name in gone:
            _remove(path, name)
        for tree in request["trees"]:
            local(tree["path"]).mkdir(parents=True, exist_ok=True)
            _adopt_cut_transfers(tree["path"], set(tree["files"]))
        _write_record(request, record, None)  # before the first byte: a cut first sync may go on
    return {"state": "ready", "removed": len(gone), "changed": changed, "rsync": shutil.which("rsync") is not None}


def verify(request: dict[str, Any]) -> dict[str, Any]:
    """Hash what arrived; `trees` has a tree hash and the differing names for each path. Equal trees are recorded."""
    found = {}
    for tree in request["trees"]:
        present = digests(tree["path"], list(tree["files"]), tree["follow"])
        differing = sorted(name for name, value in present.items() if value != tree["files"][name])
        found[tree["path"]] = {"tree": tree_hash(present), "differing": differing}
    if not _is_shared(request) and not any(tree["differing"] for tree in found.values()):
        _write_record(request, _record(local(request["root"])) or {"trees": {}}, found)
        for tree in request["trees"]:
            for folder in {local(tree["path"], name).parent for name in tree["files"]}:
                shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    return {"trees": found}


def _is_shared(request: dict[str, Any]) -> bool:
    """True when this host sees the very directory the files come from, on a shared disk."""
    lock = local(request["root"], LOCK)
    return bool(request["token"]) and lock.exists() and lock.read_text(encoding="ascii") == request["token"]


def _record(root: Path) -> dict[str, Any] | None:
    path = root / RECORD
    return json.loads(path.read_text(encoding="ascii")) if path.exists() else None


def _in_the_way(root: str, name: str, leaving: set[str]) -> bool:
    """Something is at this path; a folder of nothing but files that are about to go is not in the way."""
    path = local(root, name)
    if path.is_dir() and not path.is_symlink():
        below = (Path(folder) / file for folder, _, files in os.walk(path) for file in files)
        return not {text(file.relative_to(local(root))) for file in below} <= leaving
    return os.path.lexists(path)


def _may_go(root: str, name: str) -> bool:
    """A recorded file that is still a file, and still inside root even if a folder became a link elsewhere."""
    path = local(root, name)
    inside = os.path.commonpath([path.parent.resolve(), local(root).resolve()]) == str(local(root).resolve())
    return inside and (path.is_symlink() or path.is_file())


def _remove(root: str, name: str) -> None:
    """Remove a file and the folders it leaves empty."""
    path = local(root, name)
    path.unlink()
    folder = path.parent
    while folder != local(root) and not os.listdir(folder):
        folder.rmdir()
        folder = folder.parent


def _adopt_cut_transfers(root: str, names: set[str]) -> None:
    """Keep what a receiving rsync that was killed left under its temporary name, so that the next one goes on."""
    wanted = {local(root, name) for name in names}
    for folder in sorted({path.parent for path in wanted if path.parent.is_dir()}):
        for entry in sorted(folder.iterdir()):
            cut = re.fullmatch(r"\.(.+)\.[A-Za-z0-9]{6}", entry.name, re.DOTALL)
            if cut is None or entry in wanted or folder / cut[1] not in wanted:
                continue
            kept = folder / PARTIAL / cut[1]
            kept.parent.mkdir(exist_ok=True)
            if kept.exists() and kept.stat().st_size >= entry.stat().st_size:
                entry.unlink()
            else:
                entry.replace(kept)


def _write_record(request: dict[str, Any], record: dict[str, Any], found: dict[str, Any] | None) -> None:
    """Record the files of the request's trees, with their tree hash once proved; other trees' records stay."""
    for tree in request["trees"]:
        proved = found[tree["path"]]["tree"] if found else None
        record["trees"][tree["path"]] = {"tree": proved, "files": sorted(tree["files"])}
    record["source"] = request["source"]
    path = local(request["root"], RECORD)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(RECORD + ".tmp")
    with temporary.open("w", encoding="ascii") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def answer(line: str) -> None:
    """Do one request and print the reply; what a host's disk refuses is an answer, not a traceback."""
    request = json.loads(line)
    try:
        reply = (verify if request["do"] == "verify" else prepare)(request)
    except (OSError, ValueError) as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(MARK + json.dumps(reply), flush=True)
