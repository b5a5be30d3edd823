"""Several hosts on one machine: each with its own network, processes, host name, disk, home and ssh server.

A host is one `unshare` of the network, mount, PID and UTS namespaces; a further network namespace holds the bridge
between them, so nothing reaches the real network. Up in about 0.2 s for three hosts. No namespace has a name in
/run/netns and every mount is private, so the kernel removes everything when the processes end, and they end with
their parent: their stdin closes, and unshare gets SIGKILL (pdeathsig).

Root only. Disk and CPU are shared with the real machine, /tmp too; what a host has of its own lies below /srv.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

NETWORK = "10.83.7"
INTERFACES = ("eno1", "ens5", "enp3s0", "eth7")  # another name on every host, as in real clusters
HOME = "/srv/home"
WORK = "/srv/job"
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "bridge", "ssh", "sshd", "ssh-keygen", "rsync", "git")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SSHD = """\
ListenAddress 0.0.0.0
HostKey {root}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
PidFile none
UsePAM no
UseDNS no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 200
KexAlgorithms curve25519-sha256
"""  # OpenSSH's default key exchange costs 0.1 s more a connection

# The life of a host. Line 1 out: its PID outside. Line in: the cable is plugged. Line 2 out: ssh answers.
_INIT = """\
set -eu
read -r pid _ < /proc/self/stat
echo "$pid"
read -r _
mount -t proc proc /proc
mount -t sysfs sysfs /sys
hostname {name}
mount --bind {root}/srv /srv
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
for file in hosts hostname passwd resolv.conf; do
    target=$(readlink -f /etc/$file || true)
    if [ -e "$target" ]; then mount --bind {root}/etc/$file "$target"; fi
done
ip link set lo up
cd /
/usr/sbin/sshd -D -e -f {root}/sshd_config < /dev/null > {root}/sshd.log 2>&1 &
for _ in $(seq 200); do
    if (exec 3<> /dev/tcp/127.0.0.1/22) 2> /dev/null; then echo up; break; fi
    sleep 0.02
done
cat > /dev/null
"""


def why_not() -> str:
    """Why clusters cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "needs root: hosts are network namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    trial = "ip link add vetha type veth peer name vethb && mount -t sysfs sysfs /sys"
    done = _call("unshare", "--net", "--mount", "--pid", "--uts", "--fork", "sh", "-c", trial, check=False)
    return f"namespaces are not usable here: {done.stderr.strip()}" if done.returncode else ""


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes that were listed a moment ago; some may have ended since."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Host:
    """One host. Its files below /srv lie in `srv` on the real machine."""

    def __init__(self, index: int, base: Path) -> None:
        self.index = index
        self.name = f"n{index}"
        self.address = f"{NETWORK}.{index + 1}"
        self.interface = INTERFACES[index % len(INTERFACES)]
        self.root = base / self.name
        self.srv = self.root / "srv"
        self.home = self.srv / "home"
        self.work = self.srv / "job"
        self.pid = 0
        self.process: subprocess.Popen[str] | None = None

    def argv(self, command: Sequence[str], *, cwd: str = WORK, env: Mapping[str, str] | None = None) -> list[str]:
        """The real machine's command line for a command typed at this host's console."""
        own = {"HOME": HOME, "USER": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8", "PATH": _PATH} | dict(env or {})
        pairs = [f"{name}={value}" for name, value in own.items()]
        enter = ["nsenter", "-t", str(self.pid), "--net", "--mount", "--pid", "--uts"]
        return [*enter, "env", "-i", *pairs, "sh", "-c", 'cd "$0" && exec "$@"', cwd, *command]

    def run(
        self,
        *command: str,
        cwd: str = WORK,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host; with `check`, AssertionError with its output when it fails."""
        return _call(*self.argv(command, cwd=cwd, env=env), timeout=timeout, check=check)

    def popen(self, *command: str, cwd: str = WORK, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on this host; its stdout and stderr together are in the pipe `stdout`."""
        argv = self.argv(command, cwd=cwd, env=env)
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def pids(self, program: str) -> list[int]:
        """This host's processes of a program, by their PIDs on the real machine."""
        mine, found = Path(f"/proc/{self.pid}/ns/pid").readlink(), []
        for entry in Path("/proc").iterdir():
            try:
                inside = entry.name.isdigit() and (entry / "ns/pid").readlink() == mine
                if inside and (entry / "comm").read_text() == f"{program[:15]}\n":
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile
                continue
        return found

    def kill(self, program: str) -> int:
        """kill -9 every process of a program here; how many there were."""
        pids = self.pids(program)
        signal_all(pids, signal.SIGKILL)
        return len(pids)

    def power_off(self) -> None:
        """Everything on this host ends at once; its address stops answering."""
        assert self.process is not None
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(10)

    def wait_up(self) -> None:
        """Wait until it answers ssh."""
        assert self.process is not None and self.process.stdout is not None
        if self.process.stdout.readline() != "up\n":
            logs = "".join(path.read_text() for path in self.root.glob("*.log"))
            raise RuntimeError(f"{self.name} did not start:\n{logs}")

    def new_host_key(self) -> None:
        """As after a new installation: the ssh server shows another key from now on."""
        for path in (self.root / "host_key", self.root / "host_key.pub"):
            path.unlink()
        _keygen(self.root / "host_key")
        self.kill("sshd")
        self.run("/usr/sbin/sshd", "-f", str(self.root / "sshd_config"), cwd="/")


class Cluster:
    """Context manager: `hosts` hosts n0, n1, ... that reach each other by name and by ssh without a password."""

    def __init__(self, hosts: int, base: Path) -> None:
        self.base = base
        self.hosts = [Host(index, base) for index in range(hosts)]
        self._switch: subprocess.Popen[str] | None = None
        self._switch_pid = 0

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __enter__(self) -> Cluster:
        try:
            self._write_files()
            log = self.base / "switch.log"
            self._switch, self._switch_pid = _start(["--net"], "echo $$; cat > /dev/null", log)
            self._at_switch("ip link add br0 type bridge forward_delay 0 && ip link set br0 up")
            for host in self.hosts:
                self._boot(host)
            for host in self.hosts:
                host.wait_up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._down()

    def replace(self, host: Host) -> None:
        """Switch a host off, put an empty disk into it, and start it again: same name, address and keys."""
        if host.process is not None and host.process.poll() is None:
            host.power_off()
        shutil.rmtree(host.work)
        host.work.mkdir()
        self.power_on(host)

    def power_on(self, host: Host) -> None:
        """Start a host that was switched off, with its disk."""
        self._boot(host)
        host.wait_up()
        for other in self.hosts:
            other.run("ip", "neigh", "flush", "all", cwd="/")  # its card has another address

    def _boot(self, host: Host) -> None:
        script = _INIT.format(name=host.name, root=shlex.quote(str(host.root)))
        spaces = ["--net", "--mount", "--pid", "--uts", "--fork", "--kill-child"]
        host.process, host.pid = _start(spaces, script, host.root / "init.log")
        self._plug(host)

    def cable(self, host: Host, plugged: bool) -> None:
        """Pull or plug the cable at the switch; the host sees its carrier go."""
        self._at_switch(f"ip link set p{host.index} {'up' if plugged else 'down'}")

    def black_hole(self, host: Host, on: bool = True) -> None:
        """Frames to and from the host vanish while both ends keep their carrier."""
        self._at_switch(f"bridge link set dev p{host.index} state {0 if on else 3}")

    def _at_switch(self, script: str) -> None:
        _call("nsenter", "-t", str(self._switch_pid), "--net", "sh", "-c", script)

    def _plug(self, host: Host) -> None:
        port, nic = f"p{host.index}", host.interface
        self._at_switch(
            f"ip link add {port} type veth peer name {nic} netns {host.pid} && ip link set {port} master br0 up"
        )
        address = f"ip addr add {host.address}/24 dev {nic} && ip link set {nic} up"
        _call("nsenter", "-t", str(host.pid), "--net", "sh", "-c", address)
        assert host.process is not None and host.process.stdin is not None
        host.process.stdin.write("plugged\n")
        host.process.stdin.flush()

    def _write_files(self) -> None:
        _keygen(_made(self.base) / "user_key")
        for host in self.hosts:
            _keygen(_made(host.root) / "host_key")
        known = "".join(f"{host.name},{host.address} {(host.root / 'host_key.pub').read_text()}" for host in self.hosts)
        names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        users = [line.split(":") for line in Path("/etc/passwd").read_text(encoding="utf-8").splitlines()]
        passwd = "".join(":".join([*u[:5], HOME, *u[6:]] if u[0] == "root" else u) + "\n" for u in users)
        for host in self.hosts:
            _made(host.work)
            ssh, etc = _made(host.home / ".ssh"), _made(host.root / "etc")
            shutil.copy(self.base / "user_key", ssh / "id_ed25519")  # keeps mode 0600
            shutil.copy(self.base / "user_key.pub", ssh / "authorized_keys")
            (ssh / "known_hosts").write_text(known)
            (etc / "hosts").write_text(names)
            (etc / "hostname").write_text(f"{host.name}\n")
            (etc / "passwd").write_text(passwd, encoding="utf-8")
            (etc / "resolv.conf").write_text("")
            (host.root / "sshd_config").write_text(_SSHD.format(root=host.root, home=HOME))

    def _down(self) -> None:
        for host in self.hosts:
            if host.process is not None:
                _stop(host.process, host.pid)
        if self._switch is not None:
            _stop(self._switch, self._switch_pid)


def _start(namespaces: list[str], script: str, log: Path) -> tuple[subprocess.Popen[str], int]:
    """A shell in new namespaces that ends with this process, and the PID it says it has."""
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "bash", "-c", script]
    pipe = subprocess.PIPE
    with log.open("w") as errors:  # unshare 2.38 grumbles about its signal mask whenever its child is killed
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, start_new_session=True)
    assert process.stdout is not None
    pid = process.stdout.readline()
    if not pid:
        process.wait(10)
        raise RuntimeError(f"{shlex.join(command[:-1])}: {log.read_text()}")
    return process, int(pid)


def _stop(process: subprocess.Popen[str], pid: int) -> None:
    if process.poll() is None:
        os.kill(pid, signal.SIGKILL)
        process.wait(10)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _keygen(path: Path) -> None:
    _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "netcluster", "-f", str(path))


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _call(*command: str, timeout: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise AssertionError(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done


if __name__ == "__main__":  # a shell on n0 of a fresh cluster: python tests/cluster/netcluster.py DIRECTORY [HOSTS]
    with Cluster(int(sys.argv[2]) if len(sys.argv) > 2 else 2, Path(sys.argv[1]).resolve()) as cluster:
        began = time.monotonic()
        subprocess.run(cluster[0].argv(["bash", "-i"], env={"TERM": os.environ.get("TERM", "dumb")}))
        print(f"{time.monotonic() - began:.0f} s")
