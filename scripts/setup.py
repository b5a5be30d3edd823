"""Create .venv and install requirements.lock into it; a stamp written last makes the next call take milliseconds.

A profile (requirements-v100.txt) names another build of torch; it stays chosen until another one is named.

Standard library only: it runs before anything is installed. Checks first what would fail late: disk space, and the
compiler with which DeepSpeed builds its CPU optimizer at first use.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "finlm-setup.txt"
NEEDED_BYTES = 3 * 10**9  # measured: 1.6 GB installed with the CPU build of torch, and pip's unpacking beside it
INPUTS = ("requirements.txt", "requirements.lock", "pyproject.toml")
DEFAULT = "requirements.txt"


def main(arguments: list[str]) -> int:
    """Install unless the stamp says that exactly this was installed."""
    stamp = STAMP.read_text() if STAMP.exists() else ""
    profile = chosen(arguments, stamp)
    if not is_profile(profile):
        known = sorted(path.name for path in ROOT.glob("requirements*.txt") if is_profile(path.name))
        return fail(f"{profile} is no profile of the hardware", f"there are {', '.join(known)}", "name one of them")
    wanted = f"{sys.version_info[:2]} {profile} {fingerprint(profile)}"
    if stamp == wanted:
        return 0
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        return fail(
            "not enough disk space to install the packages",
            f"{free / 1e9:.1f} GB free in {ROOT}, {NEEDED_BYTES / 1e9:.0f} GB needed (8 GB with CUDA builds)",
            "free some space, or clone to another disk",
        )
    if shutil.which("g++") is None:
        return fail(
            "no C++ compiler: DeepSpeed builds its CPU optimizer (ZeRO-Offload) with g++ at first use",
            "g++ is not on PATH",
            "Debian/Ubuntu: apt-get install g++; RHEL: yum install gcc-c++; conda: conda install gxx_linux-64",
        )
    print(f"setting up {VENV.name} with Python {sys.version.split()[0]} (one to three minutes)", flush=True)
    if stamp:
        STAMP.write_text(chosen([], stamp))  # not complete, whatever happens now
    python = VENV / "bin" / "python"
    if not is_usable(python) or profile != chosen([], stamp):  # pip takes one build of a version for another
        venv.create(VENV, with_pip=True, clear=True)
    STAMP.write_text(profile)
    env = os.environ | {"DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    steps = installs(profile)
    for number, (name, arguments) in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] installing {name}", flush=True)
        result = subprocess.run(
            [python, "-m", "pip", "install", "-q", "--no-compile", *arguments],
            cwd=ROOT,
            env=env,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            return fail(
                f"pip could not install {name}",
                f"pip install {' '.join(arguments)} exited with {result.returncode}; its message is above",
                "check the network and the package index (pip config list), then run the same command again",
            )
    compile_packages(python)
    STAMP.write_text(wanted)
    print("done; next: source .venv/bin/activate", flush=True)
    return 0


def chosen(arguments: list[str], stamp: str) -> str:
    """The profile that is named now, or was named before, or the default."""
    before = [word for word in stamp.split() if word.endswith(".txt")]
    return [DEFAULT, *before, *arguments][-1]


def is_profile(name: str) -> bool:
    """Whether a file of the checkout says which torch to install."""
    path = ROOT / name
    return path.parent == ROOT and path.is_file() and any(line.startswith("torch==") for line in lines_of(path))


def lines_of(path: Path) -> list[str]:
    """The lines of a text file."""
    return path.read_text(encoding="utf-8").splitlines()


def fingerprint(profile: str) -> str:
    """Changes with everything that decides what is installed."""
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in sorted({*INPUTS, profile}))).hexdigest()


def installs(profile: str) -> list[tuple[str, list[str]]]:
    """Return (name, pip's arguments) of each step. Packages come before torch, so that torch finds what it needs at the
    locked versions; it is installed by its pin alone, because its builds differ by machine.
    """
    torch = ["torch==" + pin("torch")] if profile == DEFAULT else ["-r", profile]
    locked = ["--no-deps", "--require-hashes", "-r", "requirements.lock"]
    return [("packages", locked), ("torch", torch), ("finlm", ["--no-deps", "-e", "."])]


def compile_packages(python: Path) -> None:
    """Bytecode of everything but tests and most models of transformers, on all cores; pip would use one.

    What is left out Python compiles where somebody imports it, and so a file that does not compile says so then.
    """
    (libraries,) = VENV.glob("lib/python3.*/site-packages")
    rare = r"/tests?/|/transformers/models/(?!auto|llama)"
    subprocess.run([python, "-m", "compileall", "-qq", "-j", "0", "-x", rare, "."], cwd=libraries, check=False)


def is_usable(python: Path) -> bool:
    """Whether an interpreter of this version with pip is there; a killed set-up can leave one without."""
    code = f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    return python.exists() and subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def pin(package: str) -> str:
    """The version requirements.txt pins."""
    return next(line.split("==")[1].split()[0] for line in lines_of(ROOT / DEFAULT) if line.startswith(f"{package}=="))


def fail(problem: str, evidence: str, fix: str) -> int:
    """Print a mistake of the set-up and give its exit code."""
    print(f"error: {problem}\n  evidence: {evidence}\n  fix:      {fix}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
