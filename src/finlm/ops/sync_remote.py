"""The far end of sync, piped to `ssh host python3 -`; sync itself imports its hash, so both ends have one formula.

One self-contained file, standard library only, Python 3.8 syntax: a bare host can run it. It answers with one line of
JSON after MARK, whatever a login script printed before. Paths travel as text with surrogate escapes and are used as
bytes, so a host's locale does not matter.

It does not copy anything (rsync does) and touches only files that an earlier sync recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
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


def digest(path: bytes, follow: bool) -> str | None:
    """Hex sha256 of a file's bytes, or of a symlink's target unless followed; None when there is no such file."""
    result = hashlib.sha256()
    try:
        if os.path.islink(path) and not follow:
            result.update(b"-> " + os.readlink(path))
        elif not os.path.isfile(path):
            return None
        else:
            with open(path, "rb") as file:  # noqa: PTH123 - bytes paths
                for block in iter(lambda: file.read(1 << 20), b""):
                    result.update(block)
    except FileNotFoundError:
        return None
    return result.hexdigest()


def digests(root: str, names: list[str], follow: bool) -> dict[str, str | None]:
    """digest() of every name under root; four at a time, since hashlib releases the interpreter lock."""
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda name: digest(os.path.join(encode(root), encode(name)), follow), names)
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
    root = encode(request["root"])
    if request["token"] and _read(os.path.join(root, encode(LOCK))) == encode(request["token"]):
        return {"state": "shared"}
    text = _read(os.path.join(root, encode(RECORD)))
    record = json.loads(text) if text else {"trees": {}}
    entries = sorted(decode(name) for name in os.listdir(root)) if os.path.isdir(root) else []
    strangers = [name for name in entries if name not in UNTOUCHED and not name.startswith(RECORD)]
    if not text and strangers:
        return {"state": "foreign", "names": strangers[:5], "count": len(strangers)}
    taken, gone, changed = [], {}, 0
    for tree in request["trees"]:
        former = set(record["trees"].get(tree["path"], {}).get("files", []))
        unsure = [name for name in tree["files"] if request["dry_run"] or name not in former]
        present = digests(tree["path"], unsure, False)
        other = [name for name in unsure if present[name] != tree["files"][name]]
        changed += len(other)
        taken += [os.path.join(tree["path"], n) for n in other if n not in former and _exists(tree["path"], n)]
        gone[tree["path"]] = sorted(former - set(tree["files"]))
    if taken:
        return {"state": "taken", "names": sorted(taken)[:5], "count": len(taken)}
    removed = sum(_is_ours(path, name) for path, names in gone.items() for name in names)
    if not request["dry_run"]:
        for path, names in gone.items():
            for name in names:
                _remove(path, name)
        for tree in request["trees"]:
            os.makedirs(encode(tree["path"]), exist_ok=True)
            _adopt_cut_transfers(tree["path"], list(tree["files"]))
        _write_record(request, record, None)  # before the first byte: a cut first sync may go on
    return {"state": "ready", "removed": removed, "changed": changed, "rsync": shutil.which("rsync") is not None}


def verify(request: dict[str, Any]) -> dict[str, Any]:
    """Hash what arrived; `trees` has a tree hash and the differing names for each path. Equal trees are recorded."""
    found = {}
    for tree in request["trees"]:
        present = digests(tree["path"], list(tree["files"]), tree["follow"])
        differing = sorted(name for name, value in present.items() if value != tree["files"][name])
        found[tree["path"]] = {"tree": tree_hash(present), "differing": differing}
    if request["record"] and not any(tree["differing"] for tree in found.values()):
        record = json.loads(_read(os.path.join(encode(request["root"]), encode(RECORD))) or b'{"trees": {}}')
        _write_record(request, record, found)
        for tree in request["trees"]:
            for folder in {os.path.dirname(name) for name in tree["files"]}:
                shutil.rmtree(os.path.join(encode(tree["path"]), encode(folder), encode(PARTIAL)), ignore_errors=True)
    return {"trees": found}


def _read(path: bytes) -> bytes | None:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - bytes paths
            return file.read()
    except FileNotFoundError:
        return None


def _exists(root: str, name: str) -> bool:
    return os.path.lexists(os.path.join(encode(root), encode(name)))


def _is_ours(root: str, name: str) -> bool:
    """A recorded file that may go: still a file, and still inside root even if a folder became a link elsewhere."""
    path = os.path.join(encode(root), encode(name))
    inside = os.path.realpath(os.path.dirname(path)) + b"/"
    is_file = os.path.islink(path) or os.path.isfile(path)
    return is_file and inside.startswith(os.path.realpath(encode(root)) + b"/")


def _remove(root: str, name: str) -> None:
    if not _is_ours(root, name):
        return
    os.unlink(os.path.join(encode(root), encode(name)))  # noqa: PTH108 - bytes paths
    folder = os.path.dirname(name)
    while folder and not os.listdir(os.path.join(encode(root), encode(folder))):
        os.rmdir(os.path.join(encode(root), encode(folder)))  # noqa: PTH106 - bytes paths
        folder = os.path.dirname(folder)


def _adopt_cut_transfers(root: str, names: list[str]) -> None:
    """Keep what a receiving rsync that was killed left under its temporary name, so that the next one goes on."""
    wanted = set(names)
    for folder in sorted({os.path.dirname(name) for name in names}):
        base = os.path.join(encode(root), encode(folder))
        for entry in sorted(os.listdir(base)) if os.path.isdir(base) else []:
            cut = re.fullmatch(rb"\.(.+)\.[A-Za-z0-9]{6}", entry, re.DOTALL)
            if cut is None or os.path.join(folder, decode(entry)) in wanted:
                continue
            if os.path.join(folder, decode(cut[1])) not in wanted:
                continue
            kept = os.path.join(base, encode(PARTIAL), cut[1])
            os.makedirs(os.path.dirname(kept), exist_ok=True)
            if os.path.exists(kept) and os.path.getsize(kept) >= os.path.getsize(os.path.join(base, entry)):
                os.unlink(os.path.join(base, entry))  # noqa: PTH108 - bytes paths
            else:
                os.replace(os.path.join(base, entry), kept)


def _write_record(request: dict[str, Any], record: dict[str, Any], found: dict[str, Any] | None) -> None:
    """Record the files of the request's trees, with their tree hash once proved; other trees' records stay."""
    for tree in request["trees"]:
        files = sorted(tree["files"])
        record["trees"][tree["path"]] = {"tree": found[tree["path"]]["tree"] if found else None, "files": files}
    record["source"] = request["source"]
    path = os.path.join(encode(request["root"]), encode(RECORD))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + b".tmp", "w", encoding="ascii") as file:  # noqa: PTH123 - bytes paths
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + b".tmp", path)


def answer(text: str) -> None:
    """Do one request and print the reply; what a host's disk refuses is an answer, not a traceback."""
    request = json.loads(text)
    try:
        reply = (verify if request["do"] == "verify" else prepare)(request)
    except (OSError, ValueError) as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(MARK + json.dumps(reply), flush=True)
