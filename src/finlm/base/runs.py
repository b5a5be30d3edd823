"""Act on runs from outside: list, reserve, lock; record an event; check hashes of checkpoints and export; apply env."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finlm.base import checkpoints, files, screen
from finlm.base.checkpoints import MODEL_MANIFEST, THREADS, VERSION, Manifest, Part, find_faults, is_inside, sha256
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, complete_checkpoints, host_name, open_run
from finlm.base.units import format_bytes

CARD = "README.md"
COMPLETION = "completion"  # the manifest's key that names finished.json; runs of earlier versions lack both
PERMISSIONS = "change its owner or permissions, or give another path"  # fix for what cannot be written
QUIET_SECONDS = 1.0  # proving for longer is shown
_proved: set[tuple[Any, ...]] = set()  # names, sizes and times of the files that this process has proved


def check_parts(directory: Path, parts: Mapping[str, Part], other: str, fix: str) -> None:
    """Compare every file in `directory` with its Part by size and sha256; raise UserError that names those that differ.

    Skips the work if this process has compared them before and they have not changed since. After a second shows a
    progress bar, and at the end prints the time to stderr. `other` is one more line of evidence, "" for none; `fix` is
    the error's fix.
    """
    state = (directory.resolve(), *((name, part, _state(directory / name)) for name, part in sorted(parts.items())))
    if state in _proved:
        return
    total = sum(max(1, -(-part.bytes // checkpoints.BLOCK_BYTES)) for part in parts.values())
    began, done = time.monotonic(), 0
    with contextlib.ExitStack() as stack:
        show: screen.Advance | None = None

        def advance() -> None:
            """Count a hashed block; show the progress bar once proving takes longer than QUIET_SECONDS."""
            nonlocal done, show
            done += 1
            if show is not None:
                show(1)
            elif time.monotonic() - began > QUIET_SECONDS:
                show = stack.enter_context(screen.progress(f"proving {directory.name}", total))
                show(done)

        wrong = find_faults(directory, parts, THREADS, advance)
    if (seconds := time.monotonic() - began) > QUIET_SECONDS:
        size = format_bytes(sum(part.bytes for part in parts.values()))
        screen.say(f"{directory}: {size} compared with their sha256 in {seconds:.1f} s")
    if wrong:
        evidence = [*wrong[:5], *([f"and {len(wrong) - 5} more"] if wrong[5:] else []), *filter(None, [other])]
        problem = f"{directory} is damaged: {len(wrong)} of its {len(parts)} files are not what was written"
        raise UserError(problem, evidence="\n".join(evidence), fix=fix)
    _proved.add(state)


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return (inode, bytes, mtime in ns) of a file, which change when it is written again; None if unreadable."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def seal_model(directory: Path, **origin: Any) -> None:
    """Write finlm.json into a finished model directory: `origin`, and size and sha256 of all its files but README.md.

    Sets the mode of all files as the umask says. Files in subdirectories are not listed. Raises OSError.
    """
    paths = sorted(path for path in directory.iterdir() if path.is_file() and path.name != CARD)
    parts = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest} for path, digest in sha256(paths, THREADS).items()
    }
    files.write_json(directory / MODEL_MANIFEST, {"version": VERSION, **origin, "files": parts})
    umask = os.umask(0)  # which can only be read by setting it
    os.umask(umask)
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner can read


def prove_model(directory: Path) -> None:
    """Compare a model directory's files with its finlm.json by size and sha256; do nothing without that file.

    Raises UserError if finlm.json is damaged or a file differs. Ignores names that lead outside the directory. Skips
    the work if this process has compared the files before and they have not changed since. Shows and prints to stderr
    what takes more than a second.
    """
    path = directory / MODEL_MANIFEST
    if not path.is_file():
        return
    fix = f"restore it from a copy, or write it again; if you changed it on purpose, remove {path}"
    try:
        parts = {
            name: Part(int(part["bytes"]), str(part["sha256"]), 0)
            for name, part in files.read_json(path)["files"].items()
        }
    except (files.NotJson, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged", evidence=str(error), fix=fix) from None
    check_parts(directory, {name: part for name, part in parts.items() if is_inside(name)}, "", fix)


_held: set[Path] = set()  # run directories that this process has locked


def check_place(runs: Path) -> None:
    """Raise UserError if no run can be made in the directory `runs`: it is a file or cannot be written.

    It need not exist.
    """
    existing = runs
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"--runs: {existing} is a file", fix="give a directory, which is made where it is missing")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--runs: {existing} cannot be written", fix=PERMISSIONS)


@contextmanager
def reserve_run(runs: Path, stem: str) -> Iterator[Path]:
    """Make and yield an empty directory runs/<stem>, or <stem>.2 and so on if it exists; makes `runs` too.

    When the block raises, removes the directory if it is empty. Raises OSError if it cannot be made.
    """
    for count in itertools.count(1):
        path = runs / (stem if count == 1 else f"{stem}.{count}")
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise


def record_event(run: RunDir, kind: str, **fields: Any) -> None:
    """Append an event to events.jsonl (RunDir.append_event); if it cannot be written, print it and why, and go on."""
    try:
        run.append_event(kind, **fields)
    except OSError as error:  # the disk is full, which may be what the event is about
        words = "; ".join(f"{name}: {value}" for name, value in fields.items())
        screen.say(f"{run.events} was not written: {error}\n{kind}: {words}")


def is_finished(run: RunDir) -> bool:
    """Return whether `finlm train` did all steps of the run: finished.json exists.

    Earlier versions wrote no finished.json. A run of theirs, which has no manifest or one without the key `completion`,
    is finished if events.jsonl has a `prediction`. Raises NotJson for a damaged manifest of such a run.
    """
    if run.finished.exists():
        return True
    if not any(run.read_events("prediction")):
        return False
    return not run.manifest.exists() or COMPLETION not in files.read_json(run.manifest)


def list_runs(runs: Path, name: str = "") -> list[RunDir]:
    """Return the run directories below `runs`: all, or those whose name begins with `<name>-`.

    Sorted by directory name in reverse: of one recipe, the newest first. The name `quickstart` also selects the runs of
    a recipe quickstart-sft, so the caller compares the name in recipe.yaml.
    """
    paths = sorted(runs.glob(f"{name}-*" if name else "[!.]*"), reverse=True)
    return [RunDir(path) for path in paths if (path / "recipe.yaml").exists()]


def newest_runs(runs: Path) -> list[RunDir]:
    """Return the run directories below `runs`, the newest recipe.yaml first."""
    return sorted(list_runs(runs), key=lambda run: float(run.recipe.stat().st_mtime), reverse=True)


def newest_checkpoint(run: RunDir) -> Path:
    """Return the directory of the newest complete checkpoint with all ranks' files, else of the newest complete one.

    Prints to stderr which newer ones it passes over: those with parts on other hosts, if there is a whole one, and
    those with a damaged manifest. Returns a checkpoint of another version, for its reader to explain. Raises UserError
    when there is none.
    """
    complete = run.complete_checkpoints()
    if not complete:
        raise UserError(
            f"{run.path} has no checkpoint yet", evidence=f"nothing complete in {run.checkpoints}", fix="train it first"
        )
    parts: list[str] = []
    for _, directory in reversed(complete):
        try:
            if Manifest.read(directory).is_whole:
                if parts:
                    names = " and ".join(parts)
                    screen.say(f"{directory.name} is the newest whole one: parts of {names} are on other hosts only")
                return directory
            parts.append(directory.name)
        except checkpoints.Unreadable as error:
            screen.say(f"{directory.name} is passed over: {error.problem}")
        except UserError:  # its reader says what is wrong
            return directory
    return complete[-1][1]


def run_of_checkpoint(path: Path) -> RunDir:
    """Return the run that the checkpoint runs/<run>/checkpoints/step-N belongs to; step-N may be a link into memory.

    Raises UserError when it lies in no run directory.
    """
    return open_run(path.parent.resolve().parent)


def complete_checkpoint(path: Path) -> Path:
    """Return the checkpoint at `path`, or the newest one if `path` is a run, after comparing its files' hashes.

    Raises UserError when it is not complete, is of another version, has files on other hosts only, or is damaged. Skips
    the comparison if this process has made it before and the files have not changed since. Prints to stderr what takes
    more than a second, and newer checkpoints that it passes over.
    """
    if (path / "plan.json").is_file():
        path = newest_checkpoint(RunDir(path))
    names = [beside.name for _, beside in complete_checkpoints(path.parent) if beside.name != path.name]
    others, fix = f"complete ones beside it: {', '.join(names) or 'none'}", "give runs/<run>/checkpoints/step-N"
    is_set_aside = path.name.endswith(".damaged")
    if is_set_aside or not (path / checkpoints.MANIFEST).is_file():
        why = "set aside as damaged by a launch" if is_set_aside else f"no {checkpoints.MANIFEST} in it"
        if path.is_symlink() and not path.exists():
            why = f"it was in this host's memory, at {path.readlink()}, and is gone"
        raise UserError(
            f"{path} is not a complete checkpoint", evidence=f"{why}; {others}", fix=f"{fix}, or a run that has one"
        )
    manifest = Manifest.read(path)
    if not manifest.is_whole:
        ranks = sorted({part.rank for part in manifest.files.values()})
        raise UserError(
            f"{path} is a part of a checkpoint: the rest is on other hosts",
            evidence=f"it has the files of rank {', '.join(map(str, ranks))} of {manifest.world_size} ranks; {others}",
            fix="train to the end, which gathers the parts; checkpoint.copies: 1 does so at every checkpoint",
        )
    restore = f"{fix} of another one" if names else "restore these files from a copy"
    check_parts(path, manifest.files, others, restore)
    return path


@contextmanager
def lock_run(run: RunDir) -> Iterator[None]:
    """Lock the run (its file .lock) in the block, without waiting; do nothing if this process holds the lock already.

    Writes this process's pid and host into .lock. Raises UserError with the pid of the process that holds the lock. The
    ranks hold another lock, .lock-<host> (hold_lock).
    """
    path = run.path.resolve()
    if path in _held:
        yield
        return
    with (run.path / ".lock").open("a+") as file:  # not "w", which would empty it before the lock is ours
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, host = lock_holder(run)
            raise UserError(
                f"{run.path} is running now",
                evidence=f"process {pid} on {host} holds its lock",
                fix=f"wait for it, end it with `kill {pid}` on {host}, or start another run with --new",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} {os.uname().nodename}\n")
        file.flush()
        _held.add(path)
        try:
            yield
        finally:
            _held.remove(path)


def lock_holder(run: RunDir) -> tuple[str, str]:
    """Return (pid, machine's name) of the process that last locked the run, from .lock; ("", "") if nobody did."""
    try:
        pid, _, node = (run.path / ".lock").read_text(encoding="utf-8").strip().partition(" ")
    except FileNotFoundError:
        return "", ""
    return pid, node


def is_held(run: RunDir) -> bool | None:
    """Return whether a process of this machine holds the run's lock; None if .lock or /proc/locks cannot be read.

    Includes this process.
    """
    try:
        inode = (run.path / ".lock").stat().st_ino
        # Without the device: of btrfs and overlayfs /proc/locks has another one than stat.
        return f":{inode} " in Path("/proc/locks").read_text()
    except OSError:
        return None


class RunFailed(UserError):
    """Training ended before the last step; exit_code is that of the first rank that failed, 128 + N for signal N.

    `host` is where it failed, "" if unknown. `is_final` means that starting the run again would fail again.
    `is_certain` means that the cause was measured, so the logs need no search. `cause` is its id in
    diagnose/signatures.yaml, empty when the logs show none. `is_gone` means that the host does not answer.
    """

    cause = ""
    is_gone = False
    is_certain = False

    def __init__(
        self,
        problem: str,
        *,
        evidence: str = "",
        fix: str = "",
        exit_code: int = 1,
        host: str = "",
        is_final: bool = False,
    ) -> None:
        """Make the error; `problem`, `evidence` and `fix` are those of UserError."""
        super().__init__(problem, evidence=evidence, fix=fix)
        self.exit_code, self.host, self.is_final = exit_code, host, is_final


def link_checkpoint(directory: Path, target: Path) -> None:
    """Hard-link, else copy, a checkpoint's listed files and its manifest into target, which is emptied first.

    Raises UserError or FileNotFoundError if the manifest cannot be read (Manifest.read), OSError for a missing file.
    """
    shutil.rmtree(target, ignore_errors=True)
    for name in [*Manifest.read(directory).files, checkpoints.MANIFEST]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(directory / name, target / name)
        except OSError:
            shutil.copyfile(directory / name, target / name)


def tree_hash(root: Path, paths: Iterable[Path]) -> str:
    """Return the hex sha256 over (relative path, sha256) of the files, independent of their order."""
    lines = sorted(f"{path.relative_to(root).as_posix()} {files.sha256_file(path)}" for path in paths)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tree_bytes(directory: Path) -> int:
    """Return the total size in bytes of all files below a directory; 0 if there is none."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def write_host_env(run: RunDir, host: str, env: Mapping[str, str]) -> None:
    """Write the run's env/<host>.env atomically, one NAME=VALUE a line, sorted; values must not contain line breaks."""
    files.write_text(run.env / f"{host}.env", "".join(f"{name}={value}\n" for name, value in sorted(env.items())))


def hold_lock(run: RunDir) -> int | None:
    """Take a shared lock on this host's lock file until this process ends; return its descriptor.

    Returns None if the lock cannot be taken. Programs that this process executes do not inherit the descriptor.
    """
    try:
        lock = os.open(run.host_lock(host_name()), os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return None
    return lock


def apply_host_env(run_path: Path) -> None:
    """Set os.environ from the run's env/<host>.env for this host, if there is one, before torch is imported."""
    file = run_path / "env" / f"{host_name()}.env"
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").split("\n"):
        name, separator, value = line.partition("=")
        if separator and not name.startswith("#"):
            os.environ[name.strip()] = value
