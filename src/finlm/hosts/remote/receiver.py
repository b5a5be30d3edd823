"""Answer sync's requests on a host, piped to `ssh host python3 -`; sync imports its hash, so both ends use the same.

One self-contained file, standard library only, Python 3.8: a bare host can run it. It answers with a line of JSON after
MARK, whatever a login script printed before. Paths travel as UTF-8 text with surrogate escapes, so that neither a
host's locale nor a name that is not UTF-8 matters.

It does not copy anything (rsync does) and removes only files that an earlier sync recorded. Doctor sends it too, for
fingerprints that tell a drifted copy: a look at 100 GB of shards takes no longer than a look at code.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RECORD = ".finlm-sync.json"  # on a target: the files that sync put there
LOCK = ".finlm-sync.lock"  # on the source: held during a sync; a target that sees it shares the source's disk
PARTIAL = ".finlm-partial"  # beside a file whose transfer was cut: what has arrived
UNTOUCHED = (".venv", "cache", "runs")  # a host's own; never part of the code
RUN = (".lock", "events.jsonl", "checkpoints", "plan.json")  # any of them makes a directory a run
MARK = "finlm-sync:"
HASHED_BYTES = 64 << 20  # for doctor larger files are only measured; sync hashes everything


@dataclass
class Tree:
    """The files to have below `path` here: sha256 by relative name. `follow`: a link counts as what it leads to."""

    path: str
    files: dict[str, str]
    follow: bool


@dataclass
class Request:
    """A request of sync: `do` is "prepare", "verify", or "read" (a run directory), which needs only `root`."""

    do: str
    root: str
    source: str = ""
    token: str = ""
    dry_run: bool = False
    trees: list[Tree] = field(default_factory=list)


@dataclass
class Prepared:
    """The reply to "prepare": whether this host may be written to.

    `state` is "ready", "shared" (this is the source's own disk), "foreign" (sync did not write the directory) or
    "taken" (files that sync did not put there are in the way). `names` are the first of the `count` files in the way.
    `is_run`, `holder` and `is_held` describe a foreign run directory. `removed` and `changed` count files.
    """

    state: str
    names: list[str] = field(default_factory=list)
    count: int = 0
    is_run: bool = False
    holder: str = ""
    is_held: bool = False
    removed: int = 0
    changed: int = 0
    rsync: bool = False


@dataclass
class Proof:
    """The hash of a tree as it is on this host, and the names of the files that differ from the request."""

    tree: str
    differing: list[str]


@dataclass
class Contents:
    """The content of a run directory on this host.

    `parts` maps the folder of every complete checkpoint to the JSON of its manifest, None if that is unreadable.
    `damaged` lists folders that were set aside. `source` is where sync copied the directory from, or "". `holder` is
    "pid machine" of the process that runs the run or ran it last, or ""; `is_held` says that it runs now.
    """

    parts: dict[str, Any]
    damaged: list[str]
    source: str
    holder: str
    is_held: bool


@dataclass
class Recorded:
    """The files that sync put below a path. `tree` is their tree hash, None until it was verified."""

    tree: str | None = None
    files: list[str] = field(default_factory=list)


@dataclass
class Record:
    """The content of RECORD, the file that sync leaves on a host: files by tree path, and the source they came from."""

    trees: dict[str, Recorded]
    source: str = ""


def encode(text: str) -> bytes:
    """Return a path's text as the bytes that the file system holds."""
    return text.encode("utf-8", "surrogateescape")


def decode(path: bytes) -> str:
    """Return a path's bytes as text that JSON can carry."""
    return path.decode("utf-8", "surrogateescape")


def local(*parts: str) -> Path:
    """Return the Path of these parts, which are texts of text() or decode(), in this host's file system encoding."""
    return Path(*(os.fsdecode(encode(part)) for part in parts))


def text(path: str | Path) -> str:
    """Return a path of this host as text that JSON can carry."""
    return decode(os.fsencode(path))


def digest(path: Path, follow: bool) -> str | None:
    """Return the hex sha256 of a file, or of a link's target path if not `follow`; None if there is no such file.

    Raises OSError when the file cannot be read.
    """
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
    """Return {name: hex sha256, None if there is no such file} of every name below root. Hashes four files at a time.

    Raises OSError for unreadable files. With `follow`, hashes what a link leads to, otherwise its target path.
    """
    with ThreadPoolExecutor(4) as pool:
        values = pool.map(lambda name: digest(local(root, name), follow), names)
        return dict(zip(names, values))  # noqa: B905 - `strict` is not in Python 3.8


def tree_hash(files: dict[str, str | None]) -> str:
    """Return hex sha256 over the sorted lines `path sha256`; a missing file counts as `path missing`."""
    lines = sorted(f"{name} {value or 'missing'}" for name, value in files.items())
    return hashlib.sha256(encode("\n".join(lines))).hexdigest()


def fingerprints(path: str, names: list[str], follow: bool) -> dict[str, str | None]:
    """Return {name: fingerprint} of every name below path; None for a missing file.

    A fingerprint is "sha256 <hex>", or "<n> bytes" above 64 MiB. If not `follow`, a link has "link to <target>".
    """
    return {name: fingerprint(Path(path, name), follow) for name in names}


def fingerprint(path: Path, follow: bool) -> str | None:
    """Return "sha256 <hex>" of a file, or "<n> bytes" if it is larger than 64 MiB; None if there is no such file.

    Returns "link to <target>" for a link if not `follow`, "not a file" for a directory, and the system's message when
    the file cannot be read.
    """
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


def prepare(request: Request) -> Prepared:
    """Decide whether this host may be written to, and if so ("ready") prepare its trees for what will come.

    Removes files that an earlier sync recorded and the source no longer has, creates directories, keeps what a cut
    rsync left, and records the files to come. With `dry_run`, changes nothing. `changed` counts the files that differ;
    without `dry_run`, only those that were not recorded before. Raises OSError, and ValueError for a damaged record.
    """
    root = local(request.root)
    if _is_shared(request):
        return Prepared("shared")
    record = _read_record(root)
    entries = sorted(text(name) for name in os.listdir(root)) if root.is_dir() else []
    strangers = [name for name in entries if name not in (*UNTOUCHED, LOCK) and not name.startswith(RECORD)]
    if record is None and strangers:
        is_run = any((root / name).exists() for name in RUN)
        return Prepared("foreign", strangers[:5], len(strangers), is_run, *_read_holder(root))
    record = record or Record({})
    taken, gone, changed = [], [], 0
    for tree in request.trees:
        former = set(record.trees.get(tree.path, Recorded()).files)
        unsure = [name for name in tree.files if request.dry_run or name not in former]
        present = digests(tree.path, unsure, False)
        other = [name for name in unsure if present[name] != tree.files[name]]
        changed += len(other)
        leaving = [name for name in sorted(former - set(tree.files)) if _may_go(tree.path, name)]
        blocked = [n for n in other if n not in former and _is_in_the_way(tree.path, n, set(leaving))]
        taken += [text(local(tree.path, name)) for name in blocked]
        gone += [(tree.path, name) for name in leaving]
    if taken:
        return Prepared("taken", sorted(taken)[:5], len(taken))
    if not request.dry_run:
        for path, name in gone:
            _remove(path, name)
        for tree in request.trees:
            local(tree.path).mkdir(parents=True, exist_ok=True)
            _adopt_cut_transfers(tree.path, set(tree.files))
        _write_record(request, record, {})  # before the first byte: a cut first sync may go on
    return Prepared("ready", removed=len(gone), changed=changed, rsync=shutil.which("rsync") is not None)


def verify(request: Request) -> dict[str, Proof]:
    """Hash the request's files on this host, and return a Proof by tree path. Raises OSError.

    If all files are equal, also writes the record with the tree hashes and removes the remains of cut transfers, except
    on a shared disk.
    """
    proofs = {}
    for tree in request.trees:
        present = digests(tree.path, list(tree.files), tree.follow)
        differing = sorted(name for name, value in present.items() if value != tree.files[name])
        proofs[tree.path] = Proof(tree_hash(present), differing)
    if not _is_shared(request) and not any(proof.differing for proof in proofs.values()):
        _write_record(request, _read_record(local(request.root)) or Record({}), proofs)
        for tree in request.trees:
            for folder in {local(tree.path, name).parent for name in tree.files}:
                shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    return proofs


def read_run(root: Path) -> Contents:
    """Return the checkpoints, source and lock of a run directory; writes nothing. ValueError for a damaged record."""
    parts = {}
    for path in sorted(root.glob("checkpoints/step-*/manifest.json")):
        if path.parent.name[5:].isdigit():
            parts[text(path.parent.relative_to(root))] = _read_json(path)
    damaged = [path.name for path in sorted(root.glob("checkpoints/step-*.damaged"))]
    record = _read_record(root)
    return Contents(parts, damaged, record.source if record else "", *_read_holder(root))


def _read_json(path: Path) -> Any:
    """Return a file's JSON; None when it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _read_holder(root: Path) -> tuple[str, bool]:
    """Return ("pid machine" in the run's .lock, whether the lock is held now); ("", False) without a lock."""
    try:
        with (root / ".lock").open(encoding="utf-8") as lock:
            holder = lock.read().strip()
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return holder, True
            return holder, False
    except OSError:
        return "", False


def _is_shared(request: Request) -> bool:
    """Return whether this host sees the source's own directory: the lock file in it has the request's token."""
    lock = local(request.root, LOCK)
    return bool(request.token) and lock.exists() and lock.read_text(encoding="ascii") == request.token


def _read_record(root: Path) -> Record | None:
    """Return the Record that sync left in a directory; None when there is none. ValueError when it is not JSON."""
    path = root / RECORD
    if not path.exists():
        return None
    fields = json.loads(path.read_text(encoding="ascii"))
    return Record({name: Recorded(**tree) for name, tree in fields["trees"].items()}, fields.get("source", ""))


def _is_in_the_way(root: str, name: str, leaving: set[str]) -> bool:
    """Return whether something is at this path. A folder is not in the way if all files in it are in `leaving`."""
    path = local(root, name)
    if path.is_dir() and not path.is_symlink():
        below = (Path(folder) / file for folder, _, files in os.walk(path) for file in files)
        return not {text(file.relative_to(local(root))) for file in below} <= leaving
    return os.path.lexists(path)


def _may_go(root: str, name: str) -> bool:
    """Return whether a recorded file still exists inside root, not behind a folder that has become a link elsewhere."""
    path = local(root, name)
    inside = os.path.commonpath([path.parent.resolve(), local(root).resolve()]) == str(local(root).resolve())
    return inside and (path.is_symlink() or path.is_file())


def _remove(root: str, name: str) -> None:
    """Remove a file, and the folders that it leaves empty below `root`."""
    path = local(root, name)
    path.unlink()
    folder = path.parent
    while folder != local(root) and not os.listdir(folder):
        folder.rmdir()
        folder = folder.parent


def _adopt_cut_transfers(root: str, names: set[str]) -> None:
    """Move what a killed rsync left under a temporary name to its partial file, which the next rsync continues.

    Looks only at temporary names of the files `names`; of two partial files the larger stays. Skips files that a
    process has open: two runs may send the same data to a host.
    """
    wanted = {local(root, name) for name in names}
    written: set[str] | None = None
    for folder in sorted({path.parent for path in wanted if path.parent.is_dir()}):
        for entry in sorted(folder.iterdir()):
            cut = re.fullmatch(r"\.(.+)\.[A-Za-z0-9]{6}", entry.name, re.DOTALL)
            if cut is None or entry in wanted or folder / cut[1] not in wanted:
                continue
            written = _list_open_files() if written is None else written
            if os.path.realpath(entry) in written:
                continue
            kept = folder / PARTIAL / cut[1]
            kept.parent.mkdir(exist_ok=True)
            if kept.exists() and kept.stat().st_size >= entry.stat().st_size:
                entry.unlink()
            else:
                entry.replace(kept)


def _list_open_files() -> set[str]:
    """Return the paths that processes of this user have open; empty where there is no /proc."""
    paths = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            paths.add(os.readlink(link))  # noqa: PTH115 - not in Python 3.8
        except OSError:  # ended meanwhile, or another user's
            continue
    return paths


def _write_record(request: Request, record: Record, proofs: dict[str, Proof]) -> None:
    """Put the request's trees with their hashes into `record`, and write it to RECORD atomically. Raises OSError.

    `proofs` is empty before the files have come: the hashes are None then.
    """
    for tree in request.trees:
        record.trees[tree.path] = Recorded(proofs[tree.path].tree if proofs else None, sorted(tree.files))
    record.source = request.source
    path = local(request.root, RECORD)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(RECORD + ".tmp")
    with temporary.open("w", encoding="ascii") as file:
        json.dump(asdict(record), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def answer(line: str) -> None:
    """Do the request in a line of JSON, and print MARK and the reply as JSON, {"error": why} when it fails."""
    fields = json.loads(line)
    trees = [Tree(**tree) for tree in fields.pop("trees", ())]
    request = Request(trees=trees, **fields)
    try:
        reply: Any
        if request.do == "read":
            reply = read_run(local(request.root))
        else:
            reply = prepare(request) if request.do == "prepare" else {"trees": verify(request)}
    except (OSError, ValueError) as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(MARK + json.dumps(reply, default=vars), flush=True)


def answer_fingerprints(line: str) -> None:
    """Print as JSON {role: {name: fingerprint}} for `line`, the JSON of {role: {path, names, follow}}."""
    print(json.dumps({role: fingerprints(**tree) for role, tree in json.loads(line).items()}))
