"""One rsync of named files from a directory here to a host, or back.

A file appears under its final name only when it is whole; what a cut transfer brought waits in .finlm-partial beside
it, and the next one sends only the rest. `cd` runs before the far rsync, so no path is ever read by its own quoting
or wildcard rules, which changed between versions.

It never deletes on the far side and keeps no owner or group, as users differ between hosts.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from finlm.base.errors import UserError
from finlm.ops import ssh, sync_remote

SILENCE_SECONDS = 300  # ssh notices a dead host in 20 s; this is for a far disk that hangs
_BROKEN = (10, 12, 30, ssh.FAILED)  # socket, stream, timeout: what rsync says when ssh below it has ended


@dataclass(frozen=True)
class Sent:
    """What went over the wire: files that differed, and bytes of content the host did not have."""

    files: int = 0
    content_bytes: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.files + other.files, self.content_bytes + other.content_bytes)


def command(host: str, path: Path, *, follow_links: bool, whole: bool, accept_new: bool) -> list[str]:
    """The command line to the host's `path`; the names of the files, ended by NUL, go to its stdin."""
    return [
        *("rsync", "--copy-links" if follow_links else "--links", "--perms", "--times"),
        *(("--ignore-times",) if whole else ()),
        *("--files-from=-", "--from0", f"--partial-dir={sync_remote.PARTIAL}", f"--timeout={SILENCE_SECONDS}"),
        *("--info=progress2", "--stats", "--no-human-readable"),
        *("-e", shlex.join(["ssh", *ssh.options(accept_new), *ssh.port_option(host)])),
        *("--rsync-path", f"cd {shlex.quote(str(path))} && rsync"),
        *("--", "./", f"{ssh.login(host)}:./"),
    ]


def send(
    host: str,
    path: Path,
    names: list[str],
    *,
    there: Path | None = None,
    follow_links: bool,
    whole: bool,
    accept_new: bool,
    percent: Callable[[int], None],
) -> Sent:
    """Make the files equal on host, below the path `there`; `whole` distrusts sizes and times and compares contents.

    Calls percent(0..100) as it goes. Raises UserError with ssh's or rsync's reason.
    """
    if not names:
        return Sent()
    line = command(host, there or path, follow_links=follow_links, whole=whole, accept_new=accept_new)
    with tempfile.TemporaryFile() as listed, tempfile.TemporaryFile() as errors:
        listed.write(b"".join(sync_remote.encode(name) + b"\0" for name in names))
        listed.seek(0)
        with subprocess.Popen(
            line, cwd=path, stdin=listed, stdout=subprocess.PIPE, stderr=errors, env=ssh.environment()
        ) as process:
            assert process.stdout is not None
            output = b""
            while block := os.read(process.stdout.fileno(), 1 << 16):
                output = (output + block)[-(1 << 16) :]
                if found := re.findall(rb"(\d+)%", block):
                    percent(int(found[-1]))
        errors.seek(0)
        problem = errors.read().decode(errors="replace")
    if process.returncode:
        raise _explain(host, path, process.returncode, problem)
    return Sent(_number(rb"regular files transferred", output), _number(rb"Literal data", output))


def fetch(host: str, there: Path, path: Path, names: list[str], *, accept_new: bool) -> None:
    """Copy files below `there` on host to path here. Raises UserError with ssh's or rsync's reason."""
    if not names:
        return
    *settings, here, far = command(host, there, follow_links=True, whole=False, accept_new=accept_new)
    line = [*settings, far, here]
    listed = b"".join(sync_remote.encode(name) + b"\0" for name in names)
    done = subprocess.run(line, cwd=path, input=listed, capture_output=True, env=ssh.environment())
    if done.returncode:
        raise _explain(host, path, done.returncode, done.stderr.decode(errors="replace"))


def _number(label: bytes, output: bytes) -> int:
    found = re.search(label + rb": (\d+)", output)
    if found is None:
        raise AssertionError(f"rsync --stats printed no {label.decode()!r}: {output[-500:]!r}")
    return int(found[1])


def _explain(host: str, path: Path, code: int, stderr: str) -> UserError:
    if "your shell clean" in stderr:
        return UserError(
            f"login scripts on {host} print text where rsync expects none",
            evidence=ssh.last_lines(stderr),
            fix=f"this must print nothing: ssh {host} true   (guard echo in ~/.bashrc: [[ $- == *i* ]] || return)",
        )
    if code in _BROKEN and (reason := ssh.reason(host, stderr)):
        return reason
    if code in _BROKEN:
        problem = f"the connection to {host} broke off during rsync (code {code})"
    else:
        problem = f"rsync to {host} " + (f"was killed by signal {-code}" if code < 0 else f"failed with code {code}")
    return UserError(
        problem,
        evidence=ssh.last_lines(stderr) or f"no message; it was copying {path}",
        fix="run the same command again: it goes on where it stopped",
    )
