"""Ask which host has which part of a run's checkpoints, and gather the parts of a checkpoint on this machine.

Without a shared file system every host keeps the shards of its own ranks, which is enough to resume: a run starts from
the newest step that all of its hosts have from a single save, and at step 0 only while none has ever been saved.

Export and evaluation need the files of all ranks, and so does a run whose host is lost (checkpoint.copies). rsync
fetches the files that the hosts' manifests list, every file that comes is checked against its sha256, and the manifest
here then lists all files. The hosts keep their copies.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from finlm.base import checkpoints, files, runs, screen
from finlm.base.checkpoints import MANIFEST, Manifest, Part, find_faults
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.units import format_bytes
from finlm.hosts import file_trees, ssh, sync
from finlm.hosts.file_trees import Started
from finlm.hosts.remote import receiver
from finlm.hosts.ssh import path_on_host
from finlm.recipe.cluster import Cluster, Host

THREADS = 8


class Incomplete(UserError):
    """Raised when a host does not give its part of a checkpoint, or this machine's own part is damaged."""


def gather_checkpoint(
    run: RunDir,
    hosts: Cluster,
    step: int,
    accept_new_keys: bool = False,
    *,
    started: Started = lambda _: None,
    spare_bytes: int = 0,
) -> Path:
    """Copy the other hosts' parts of the checkpoint of `step` to this machine, and return the checkpoint's directory.

    Does nothing when all hosts are this machine, or the checkpoint here has the files of all ranks, intact. Copies only
    files that are missing or damaged here. The directory stays as it is until all parts have come and match their
    sha256. A checkpoint in memory is replaced by a copy on disk; a host that does not give its part is skipped if the
    other hosts have the files of all ranks together. `started` is called with each rsync process. `spare_bytes` must
    stay free on this disk; if above 0, no summary is printed. Raises Incomplete when a part is missing, or damaged here
    and nowhere else; UserError when the parts do not fit on the disk, differ from their sha256 or come from different
    saves, or when rsync fails.
    """
    directory = run.checkpoint(step)
    here_too, remote = ssh.split_local(hosts.hosts)
    if not remote:
        return directory
    here = Manifest.read_if_readable(directory)
    if here is None and here_too and (directory / MANIFEST).exists():  # its ranks' part is nowhere else
        raise _damage_error(directory, f"{directory / MANIFEST} is not JSON")
    damaged = _list_damaged(directory, here.files) if here is not None else []
    if here is not None and here.is_whole and not damaged:
        return directory
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda host: _read_manifest(run, step, host, accept_new_keys, damaged), remote))
    parts = [each for each in answers if isinstance(each, Manifest)]
    every = [here, *parts] if here is not None else parts
    missing = [each for each in answers if isinstance(each, Incomplete)]
    lost = sorted({*damaged} - {name for part in parts for name in part.files})
    if lost or (missing and not is_whole_together(every)):
        raise missing[0] if missing else _damage_error(directory, f"missing or changed: {', '.join(lost[:5])}")
    remote = [host for host, each in zip(remote, answers, strict=True) if isinstance(each, Manifest)]
    layouts, saves = {part.layout for part in every}, {part.identity for part in every} - {""}
    if len(layouts) > 1 or len(saves) > 1:
        raise UserError(
            f"the hosts' parts of {directory.name} are of different runs, plans or saves",
            evidence=", ".join(sorted(map(str, layouts))),
            fix=f"on the host whose part is old: mv {directory} {directory}.old",
        )
    wanted = _choose_files(here, parts, damaged)
    size = sum(part.bytes for names in wanted for part in names.values())
    in_memory = here if directory.is_symlink() else None
    _check_room(run, directory, size + (in_memory.bytes if in_memory else 0), spare_bytes)
    aside = _begin_aside(directory, in_memory)
    with ThreadPoolExecutor(16) as pool:
        pairs = zip(remote, wanted, strict=True)
        list(pool.map(lambda one: _pull(aside, directory, one[0], one[1], accept_new_keys, started), pairs))
    listed = {name: part for names in (here.files if here is not None else {}, *wanted) for name, part in names.items()}
    manifest = dataclasses.replace(every[0], files=dict(sorted(listed.items())))
    _add_files(aside, directory, manifest, here is not None and in_memory is None)
    if not spare_bytes:  # else it is the thread of launch/copies.py, which records an event
        names = ", ".join(host.name for host, part in zip(remote, wanted, strict=True) if part)
        screen.say(f"step {step}: {format_bytes(size)} of checkpoint gathered from {names}")
    return directory


def _damage_error(directory: Path, evidence: str) -> Incomplete:
    """Return, without raising it, the error that this machine's part of a checkpoint is damaged."""
    fix = f"mv {directory} {directory}.damaged   (an older checkpoint is used then)"
    return Incomplete(f"this machine's part of {directory.name} is damaged", evidence=evidence, fix=fix)


def _begin_aside(directory: Path, in_memory: Manifest | None) -> Path:
    """Create the directory .step-N.copying beside `directory` with the files of a part in memory, and return it."""
    aside = directory.with_name(f".{directory.name}.copying")
    aside.mkdir(parents=True, exist_ok=True)
    for name in in_memory.files if in_memory else ():
        shutil.copyfile(directory / name, aside / name)
    return aside


def is_whole_together(parts: Sequence[Manifest]) -> bool:
    """Return whether these parts of one checkpoint together have all ranks' files; at ZeRO stage 0 one part has."""
    owners = {part.rank for manifest in parts for part in manifest.files.values()}
    return any(manifest.is_whole or owners >= set(range(manifest.world_size)) for manifest in parts)


def _choose_files(here: Manifest | None, parts: Sequence[Manifest], damaged: Sequence[str]) -> list[dict[str, Part]]:
    """Return for each of `parts`, in order, {name: Part} of the files to copy from its host.

    No file comes twice, and none that `here` lists, unless it is in `damaged`.
    """
    listed = set(here.files if here is not None else ()) - set(damaged)
    wanted = []
    for part in parts:
        wanted.append({name: file for name, file in part.files.items() if name not in listed})
        listed |= part.files.keys()
    return wanted


def _check_room(run: RunDir, directory: Path, size: int, spare_bytes: int) -> None:
    """Raise UserError when `size` and `spare_bytes` together exceed the free bytes of the run's disk."""
    if (free := shutil.disk_usage(run.path).free) < size + spare_bytes:
        beside = f" beside {format_bytes(spare_bytes)} for the next checkpoint" * (spare_bytes > 0)
        raise UserError(
            f"the other hosts' parts of {directory.name} do not fit on this machine's disk",
            evidence=f"{format_bytes(size)} are needed{beside}, {format_bytes(free)} are free at {run.path}",
            fix="free space there, then run the same command again",
        )


def _add_files(aside: Path, directory: Path, manifest: Manifest, is_part_here: bool) -> None:
    """Move the files in `aside` into a checkpoint directory, then write `manifest`, which lists all of them.

    If `is_part_here`, the directory already has a part, to which the files are added; otherwise `aside` replaces the
    directory. `aside` is gone afterwards. Raises OSError when the directory is removed meanwhile.
    """
    if not is_part_here:
        files.write_json(aside / MANIFEST, manifest.to_json())
        checkpoints.remove(directory)
        aside.rename(directory)
        return
    for path in [path for path in aside.rglob("*") if path.is_file()]:
        target = directory / path.relative_to(aside)
        if target.parent != directory:
            target.parent.mkdir(exist_ok=True)
        path.replace(target)
    manifest_aside = aside / MANIFEST
    files.write_json(manifest_aside, manifest.to_json())
    manifest_aside.replace(directory / MANIFEST)
    shutil.rmtree(aside)


def _read_manifest(
    run: RunDir, step: int, host: Host, accept_new_keys: bool, damaged: Sequence[str]
) -> Manifest | Incomplete:
    """Read the manifest of a host's part of a checkpoint over ssh, and return it.

    Returns an Incomplete error, not raised, when the host does not answer or the manifest is missing or not JSON; it
    names the `damaged` files here. Raises UserError when another version of finlm wrote the manifest, or it names files
    outside its directory.
    """
    far = path_on_host(run.checkpoint(step), host.access) / MANIFEST
    try:
        content = json.loads(ssh.run(host.destination, ["cat", str(far)], accept_new_keys=accept_new_keys).stdout)
    except (UserError, ValueError) as error:
        why = f"{error.problem}\n{error.evidence}" if isinstance(error, UserError) else f"{far} is not JSON: {error}"
        here = f"\nthe copy on this machine is damaged: {', '.join(damaged[:5])}" * bool(damaged)
        look = f"try `ssh {ssh.ssh_name(host.destination)} cat {far}`"
        first = error.fix if isinstance(error, UserError) else look
        return Incomplete(
            f"{host.name}'s part of step-{step} exists nowhere else, and {host.name} does not give it",
            evidence=why.rstrip() + here,
            fix="\n".join(filter(None, [first, way_out(run, [host.name], step if damaged else 0)])),
        )
    return Manifest.from_json(content, f"{host.name}:{far}")


def _pull(
    aside: Path, directory: Path, host: Host, wanted: Mapping[str, Part], accept_new_keys: bool, started: Started
) -> None:
    """Fetch with rsync, from a host's checkpoint, those `wanted` files that are missing or damaged in `aside`.

    `directory` is the checkpoint's path here. Raises UserError when rsync fails or a file differs from its sha256.
    """
    names = _list_damaged(aside, wanted)
    for name in names:
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
    far = path_on_host(directory, host.access)
    file_trees.fetch(host.destination, far, aside, names, accept_new_keys=accept_new_keys, started=started)
    wrong = _list_damaged(aside, {name: wanted[name] for name in names})
    if wrong:
        raise UserError(
            f"{len(wrong)} files of {directory.name} differ from what {host.name} wrote",
            evidence="\n".join(wrong[:10]),
            fix=f"run the same command again; the same files again mean a failing disk or memory on {host.name}",
        )


def _list_damaged(directory: Path, parts: Mapping[str, Part]) -> list[str]:
    """Return the names of the files that are missing in a directory, are links, or differ from their size or sha256."""
    return [name for name, part in parts.items() if find_faults(directory, {name: part}, THREADS)]


PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class Holding:
    """The checkpoints of a run that a host has, and the process that runs the run there.

    `parts` maps a checkpoint's folder to its manifest, None if unreadable; `damaged` lists folders set aside. `failure`
    is the error if the host could not be asked. `is_held` says that the process `holder` runs the run now.
    """

    host: Host
    parts: dict[str, Manifest | None]
    damaged: tuple[str, ...] = ()
    failure: UserError | None = None
    holder: str = ""  # pid and machine of the process that runs the run directory there, or ran it last
    is_held: bool = False
    source: str = ""  # from where sync brought the directory there; empty where the run was started

    @property
    def steps(self) -> dict[int, str]:
        """{step: identity of the save} of the host's checkpoints; "" for an unreadable manifest."""
        named = {int(PurePosixPath(folder).name[5:]): manifest for folder, manifest in self.parts.items()}
        return {step: manifest.identity if manifest else "" for step, manifest in sorted(named.items())}


def list_holdings(run: RunDir, hosts: Cluster, accept_new_keys: bool = False) -> list[Holding]:
    """Ask all hosts at once which checkpoints of the run they have, and return a Holding per host, in the same order.

    A host that cannot be asked gets a Holding with `failure`. The checkpoints in continued/ on this machine are added
    to every host. Raises UserError if another version of finlm wrote one of them.
    """
    continued: dict[str, Manifest | None] = {
        f"continued/{path.name}": Manifest.read_if_readable(path) for _, path in run.continued_checkpoints()
    }
    with ThreadPoolExecutor(16) as pool:
        holdings = pool.map(lambda host: _ask_host(run, host, accept_new_keys), hosts.hosts)
        # sync brings continued/ to every host before the ranks start.
        return [dataclasses.replace(each, parts=continued | each.parts) for each in holdings]


def _ask_host(run: RunDir, host: Host, accept_new_keys: bool) -> Holding:
    """Return which checkpoints of the run a host has; a UserError on the way is kept as `failure`."""
    try:
        if ssh.is_this_machine(host.destination):
            held = receiver.read_run(run.path.absolute())
        else:
            request = receiver.Request("read", receiver.text(path_on_host(run.path, host.access)))
            held = receiver.Contents(**sync.ask(host.destination, request, PATIENCE_SECONDS, accept_new_keys))
    except UserError as error:
        return Holding(host, {}, failure=error)
    parts = {folder: _parse_manifest(content, f"{host.name}:{folder}") for folder, content in held.parts.items()}
    return Holding(host, parts, tuple(held.damaged), holder=held.holder, is_held=held.is_held, source=held.source)


def _parse_manifest(content: Any, where: str) -> Manifest | None:
    """Return the Manifest in a JSON value; None if it is invalid, which the ranks report."""
    try:
        return Manifest.from_json(content, where)
    except UserError:
        return None


def check_started_here(run: RunDir, hosts: Cluster, accept_new_keys: bool = False) -> None:
    """Raise UserError when the run was started on another host, from which sync copied its directory here.

    In that case asks all hosts, to name in the error the process that runs the run or ran it last.
    """
    here, root = os.uname().nodename, run.path.absolute()
    source = receiver.read_run(root).source
    node = source.partition(":")[0]
    if source in ("", f"{here}:{receiver.text(root)}"):
        return
    holder, is_held = "", False
    for holding in list_holdings(run, hosts, accept_new_keys):
        if not holding.source and holding.holder and not ssh.is_this_machine(holding.host.destination):
            node, holder, is_held = holding.host.name, holding.holder, holding.is_held
    if not is_held and (ranks := _find_lock_holder(run)):
        holder, is_held = f"{ranks} {here}", True
    raise sync.started_elsewhere(str(run.path), node, holder, is_held, source)


def _find_lock_holder(run: RunDir) -> str:
    """Return the pid of a process that holds a rank lock of the run, "of a rank" if unknown; "" without one."""
    for path in run.path.glob(".lock-*"):
        with path.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held = (line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines())
                ends = f":{path.stat().st_ino}"
                return next((fields[4] for fields in held if len(fields) > 5 and fields[5].endswith(ends)), "of a rank")
    return ""


def choose_step(run: RunDir, holdings: Sequence[Holding]) -> int:
    """Return the step that the ranks of all hosts resume from, 0 for a start from scratch; print the step of a resume.

    It is the newest step that all hosts have from a single save, or a newer step that is whole on this machine, which
    is linked into continued/ for sync. First gathers on this disk a newer checkpoint in memory whose parts are spread
    over the hosts. Prints which newer steps cannot be used. Raises UserError when a host could not be asked, when
    another host started the run, and when checkpoints were saved but no step is usable.
    """
    ours = f"{os.getpid()} {os.uname().nodename}"  # what the lock says where this directory is shared
    for holding in holdings:
        if holding.failure:
            error = holding.failure
            fix = "\n".join(filter(None, [error.fix, way_out(run, [holding.host.name])]))
            raise UserError(error.problem, evidence=error.evidence, fix=fix)
        is_foreign = holding.holder not in ("", ours) and not holding.source
        if is_foreign and not ssh.is_this_machine(holding.host.destination):
            raise sync.started_elsewhere(str(run.path), holding.host.name, holding.holder, holding.is_held)
    steps = {holding.host.name: holding.steps for holding in holdings}
    common, recorded = max(checkpoints.common_steps(list(steps.values())), default=0), run.recorded_checkpoint()
    _gather_from_memory(run, holdings, common)
    step = _link_newest_whole(run, common)
    if not step and (recorded or any(steps.values())):
        damaged = "; ".join(f"{each.host.name}: {', '.join(each.damaged)}" for each in holdings if each.damaged)
        raise checkpoints.missing_error(run.path, steps, recorded=recorded, damaged=damaged)
    newest = max((recorded, *(max(each, default=0) for each in steps.values())))
    if (lost := run.recorded_in_memory()) > max(step, newest):
        screen.say(f"the checkpoint in memory of step {lost:,} went with the memory of its hosts")
    if newest > step:
        without = ", ".join(name for name, each in steps.items() if newest not in each)
        screen.say(f"step {newest:,} cannot be used: {f'{without} without it' if without else 'parts of two saves'}")
    if step > common:
        without = ", ".join(name for name, each in steps.items() if step not in each)
        screen.say(f"{without or 'every host'} gets step {step:,} from this machine, which has the parts of all hosts")
    if step or any(run.read_events("start")):
        screen.say(f"resuming {run.path} from step {step:,} (--new starts afresh)")
    return step


def _gather_from_memory(run: RunDir, holdings: Sequence[Holding], common: int) -> None:
    """Gather on this disk the newest checkpoint of which the hosts together have all parts, if newer than `common`.

    Prints the reason when it cannot be gathered.
    """
    # Some hosts have lost their part, which a neighbour's memory has: with all parts it would be common.
    hosts = Cluster(tuple(holding.host for holding in holdings))
    step = whole_step_together(holdings)
    if step > common and step not in checkpoints.whole_checkpoints(run.complete_checkpoints()):
        try:
            gather_checkpoint(run, hosts, step)
        except UserError as error:
            screen.say(f"the checkpoint in memory of step {step:,} is not used: {error}")


def whole_step_together(holdings: Sequence[Holding]) -> int:
    """Return the newest step of which these hosts together have all parts from a single save; 0 when there is none."""
    saves: dict[tuple[int, str], list[Manifest]] = {}
    for holding in holdings:
        for manifest in holding.parts.values():
            if manifest is not None:
                saves.setdefault((manifest.step, manifest.identity), []).append(manifest)
    return max((step for (step, _), parts in saves.items() if is_whole_together(parts)), default=0)


def _link_newest_whole(run: RunDir, common: int) -> int:
    """Link the newest checkpoint that is whole and intact here into continued/ if it is newer than `common`.

    Returns its step, or `common` when there is none. Checks all files by sha256; prints and skips damaged checkpoints.
    Raises OSError when it cannot be linked or copied.
    """
    for step, directory in sorted(checkpoints.whole_checkpoints(run.complete_checkpoints()).items(), reverse=True):
        if step <= common:
            break
        if wrong := checkpoints.find_faults(directory, Manifest.read(directory).files, THREADS):
            screen.say(f"{directory} is damaged and not used: {'; '.join(wrong[:5])}")
            continue
        runs.link_checkpoint(directory, run.path / "continued" / directory.name)
        return step
    return common


def whole_step(run: RunDir, damaged: int = 0) -> int:
    """Return the newest step, except `damaged`, of which all parts lie on this machine; 0 if there is none."""
    whole = checkpoints.whole_checkpoints([*run.continued_checkpoints(), *run.complete_checkpoints()])
    return max(whole.keys() - {damaged}, default=0)


def way_out(run: RunDir, lost: Sequence[str], damaged: int = 0) -> str:
    """Return a clause to add behind an error's fix, often beginning with "or": what to do without the hosts `lost`.

    It names the checkpoint that is whole on this machine, except step `damaged`, or in a neighbour's memory. Reads the
    run's events, manifests and plan. Raises NotJson for a damaged plan.json.
    """
    names, them = " and ".join(lost), "it" if len(lost) == 1 else "them"
    in_memory, step = run.recorded_in_memory(), whole_step(run, damaged)
    recorded = max(run.recorded_checkpoint(), in_memory)
    without = f"without {them}: --exclude {'@'.join(lost)}"
    if in_memory > step and len(lost) == 1 and not damaged:
        return f"or go on from step {in_memory:,}, of which a neighbour's memory has the part of {names}, {without}"
    if step or not recorded:
        go_on = f"or go on from step {step:,} {without}" if step else f"or go on {without}"
        if step and files.read_json(run.plan)["offload_optimizer"] == "nvme":  # no other plan can take its states
            go_on = f"or put another machine in the place of {names}: the run goes on from step {step:,}"
        if step == recorded or not step:
            return go_on
        return f"bring {them} back: the part of step {recorded:,} that {names} holds exists nowhere else; {go_on}"
    return (
        f"bring {them} back with its disk: the part of step {recorded:,} that {names} holds exists nowhere else, and "
        f"no older checkpoint is complete here; or take {them} out of the hostfile and start from step 0 with --new "
        f"(checkpoint.copies: 1 would have kept a copy)"
    )
