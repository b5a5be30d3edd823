"""Record what a run was made of, before launch: code, data, packages, machine, command, environment.

Takes about 0.3 s, nearly all of it for listing the installed packages and asking git. The hashes let `reproduce` say
whether two runs had the same recipe, plan, code, tokenizer and shards.

Does not copy the whole environment: only variables that change a training run are kept, and values that look like
credentials are cut out (secrets.py). Files git does not track count as dirty and are covered by the code hash.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

import finlm
from finlm.base import files, runs
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.secrets import redact, redact_command, redact_environment, redact_text
from finlm.plan.plan import Plan
from finlm.recipe import cluster, parents
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Recipe

PACKAGE = Path(finlm.__file__).resolve().parent
MOST_DIFF_BYTES = 1 << 20


@dataclass(frozen=True)
class Git:
    """A git checkout: commit, remote, whether it has uncommitted changes, and the sha256 of their diff."""

    commit: str | None = None
    remote: str | None = None
    dirty: bool = False
    diff_sha256: str | None = None


@dataclass(frozen=True)
class Code:
    """The running package: its version, tree hash and checkout."""

    version: str | None = None
    code_sha256: str | None = None
    git: Git | None = None


@dataclass(frozen=True)
class RecipeHash:
    """The recipe's name, and the hash of the bytes of recipe.yaml."""

    name: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class PlanHash:
    """The hash of the object in plan.json, by files.sha256_json."""

    sha256: str | None = None


@dataclass(frozen=True)
class PreparedData:
    """The directory of prepared shards, the sha256 of its manifest.json, and the tokenizer's sha256 from there."""

    path: str
    sha256: str | None = None
    tokenizer_sha256: str | None = None


@dataclass(frozen=True)
class HostRecord:
    """A host of the plan; the fields after `gpu` are what doctor saw of it, empty if not known."""

    name: str
    slots: int
    gpu: str | None = None
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    gpus: list[str] = field(default_factory=list)
    drivers: list[str] = field(default_factory=list)
    platform: str | None = None
    cpu: str | None = None
    packages: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The machine that `finlm train` runs on."""

    hostname: str | None = None
    platform: str | None = None
    python: str | None = None
    executable: str | None = None
    cpus: int | None = None
    cpus_usable: int | None = None
    gpus: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Continued:
    """The run and step whose checkpoint this run goes on from, and the recipe keys that differ."""

    run: str
    step: int
    changed: list[str] = field(default_factory=list)


@functools.cache
def _reader() -> TypeAdapter[Any]:
    """Return the pydantic adapter that reads a Manifest; cached, as making it takes ten times as long as reading."""
    return TypeAdapter(Manifest)


@dataclass(frozen=True)
class Manifest:
    """The content of a run's manifest.json; fields that an earlier version did not write have their defaults."""

    created: str | None = None
    finlm: Code = Code()
    recipe: RecipeHash = RecipeHash()
    plan: PlanHash = PlanHash()
    start: Mapping[str, Any] | None = None  # parents.start_of
    shards: PreparedData | None = None
    seeds: dict[str, int] = field(default_factory=dict)
    hosts: list[HostRecord] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    directory: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    machine: Machine = Machine()
    packages: dict[str, str] = field(default_factory=dict)
    continues: Continued | None = None

    @classmethod
    def read(cls, run: RunDir) -> Self | None:
        """Return the run's manifest, with defaults for invalid fields; None if it is unreadable or no JSON object."""
        try:
            document = files.read_json(run.manifest)
        except (OSError, ValueError):
            return None
        if not isinstance(document, dict):
            return None
        reader = _reader()
        try:
            made: Self = reader.validate_python(document)
        except ValidationError as error:
            damaged = {each["loc"][0] for each in error.errors()}
            made = reader.validate_python({key: document[key] for key in document if key not in damaged})
        return made

    def to_json(self) -> dict[str, object]:
        """Return the content of manifest.json, without the hosts' empty fields and without an empty `continues`."""
        document = asdict(self)
        always = ("name", "slots", "gpu")
        document["hosts"] = [{k: v for k, v in host.items() if v or k in always} for host in document["hosts"]]
        if self.continues is None:
            del document["continues"]
        return document


def make(
    recipe: Recipe,
    plan: Plan,
    shards: Path | None,
    *,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    command: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Manifest:
    """Return the manifest of a run that is about to start; runs git and nvidia-smi and lists the installed packages.

    `shards` is the directory of prepared data, or None. `facts` maps host names to fields of HostRecord that doctor
    saw. `command` and `environment` default to this process's; credentials in them are replaced. Raises NotJson for
    damaged manifests of the shards or the start model.
    """
    start = parents.start_of(recipe)
    return Manifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        finlm=Code(version(), code_hash(), git_state(PACKAGE)),
        recipe=RecipeHash(recipe.name, hashlib.sha256(recipes.dump(recipe).encode()).hexdigest()),
        plan=PlanHash(files.sha256_json(plan.to_json())),
        # As a single text: a token or login may stand in any value, and in a key.
        start=None if start is None else json.loads(redact("", json.dumps(start.to_json()))),
        shards=_prepared_data(shards),
        seeds={
            "train.seed": recipe.train.seed,
            **{
                f"data.sources[{index}].synthetic.seed": source.synthetic.seed
                for index, source in enumerate(recipe.data.sources)
                if source.synthetic is not None
            },
        },
        hosts=[HostRecord(host.name, host.slots, host.gpu, **(facts or {}).get(host.name, {})) for host in plan.hosts],
        command=redact_command(sys.orig_argv if command is None else command),  # argv lacks the interpreter and -m
        directory=str(Path.cwd()),
        environment=redact_environment(os.environ if environment is None else environment),
        machine=_machine(),
        packages=packages(),
    )


def changes() -> str:
    """Return the uncommitted changes of finlm's checkout as a diff without credentials; "" if none or no checkout.

    Cuts the diff after 1 MiB; a last line then says how long it was.
    """
    diff = _git(PACKAGE, "diff", "HEAD", "--no-color", "--no-ext-diff") or b""
    text = redact_text(diff[: 2 * MOST_DIFF_BYTES].decode("utf-8", errors="replace"))
    if len(diff) <= MOST_DIFF_BYTES:
        return text
    kept = text.encode()[:MOST_DIFF_BYTES].decode("utf-8", errors="ignore")  # after redacting: none is cut in two
    return f"{kept}\n[cut: {len(diff):,} bytes in all]\n"


def version() -> str:
    """Return finlm's version from the checkout's pyproject.toml, else from the installed package, else "unknown"."""
    project = PACKAGE.parents[1] / "pyproject.toml"
    if project.exists():
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    try:
        return importlib.metadata.version("finlm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def copy_code(destination: Path) -> str:
    """Copy the package to destination/finlm (so that `destination` goes on PYTHONPATH); return the copy's tree hash.

    Raises OSError.
    """
    for path in _source_files():
        target = destination / "finlm" / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    copied = [path for path in (destination / "finlm").rglob("*") if path.is_file()]
    return runs.tree_hash(destination / "finlm", copied)


def copy_rewards(recipe: Recipe, run: RunDir) -> None:
    """Copy the files of grpo.reward's functions into the run, rewards/<sha256>.py; do nothing without any.

    Raises UserError for a file that has changed since the recipe was loaded, and OSError if it is gone.
    """
    for term in recipe.grpo.reward if recipe.grpo else ():
        if term.rule != "function":
            continue
        copied = run.reward_file(str(term.sha256))
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(term.file, copied)
        if files.sha256_file(copied) != term.sha256:
            raise UserError(f"grpo.reward: {term.file} changed while the run was prepared", fix="start it again")


def code_hash() -> str:
    """Return the tree hash of the running package, equal to what copy_code returns."""
    return runs.tree_hash(PACKAGE, _source_files())


def _source_files() -> list[Path]:
    """Return the package's files, sorted, without __pycache__, .pyc, .so, hidden files and backups (~)."""
    sources = []
    for path in PACKAGE.rglob("*"):
        parts = path.relative_to(PACKAGE).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if path.is_file() and not hidden and path.suffix not in (".pyc", ".so") and not path.name.endswith("~"):
            sources.append(path)
    return sorted(sources)


def git_state(directory: Path) -> Git | None:
    """Return the Git of the checkout that a package's directory lies in; None if none tracks its __init__.py."""
    tracked = _git(directory, "ls-files", "--error-unmatch", "__init__.py")
    commit = _git(directory, "rev-parse", "HEAD")
    if tracked is None or commit is None:  # a venv inside somebody else's checkout is not our history
        return None
    changes = _git(directory, "status", "--porcelain") or b""
    diff = _git(directory, "diff", "HEAD", "--binary") or b""
    remote = _git(directory, "remote", "get-url", "origin")
    return Git(
        commit.decode().strip(),
        redact_text(remote.decode().strip()) if remote else None,
        bool(changes.strip()),
        hashlib.sha256(diff).hexdigest() if diff else None,
    )


def _git(directory: Path, *arguments: str) -> bytes | None:
    """Return git's stdout for these arguments in the directory; None if git fails, is missing or takes over 30 s."""
    try:
        return subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _prepared_data(directory: Path | None) -> PreparedData | None:
    """Return a shards directory's PreparedData; None for None. It has only the path if there is no manifest.json.

    Raises NotJson, a UserError, for a damaged manifest.
    """
    if directory is None:
        return None
    file = directory / "manifest.json"
    if not file.exists():
        return PreparedData(str(directory))
    return PreparedData(str(directory), files.sha256_file(file), files.read_json(file).get("tokenizer_sha256"))


def packages() -> dict[str, str]:
    """Return {name: version} of every distribution installed in this environment, sorted by name."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata  # parsed anew each time
        if (name := metadata["Name"]) and name not in versions:  # the first one on sys.path is the one that is imported
            versions[name] = metadata["Version"]
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def _machine() -> Machine:
    """Return the Machine record of this machine: names, Python, cores, GPUs."""
    return Machine(
        hostname=platform.uname().node,
        platform=platform.platform(),
        python=platform.python_version(),
        executable=sys.executable,
        cpus=os.cpu_count(),
        cpus_usable=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        gpus=cluster.ask_gpus("name", "driver_version", "memory.total", "uuid"),
    )


def recipe_values(run: RunDir) -> Mapping[str, Any]:
    """Return {dotted key: value} of a run's recipe with defaults; {} when the recipe is missing or invalid."""
    try:
        loaded = recipes.load(run.recipe).recipe
    except UserError:
        return {}
    return dict(_leaves(loaded.model_dump(mode="json"), ""))


def unchecked_recipe_values(run: RunDir) -> Mapping[str, Any]:
    """Return {dotted key: value} of a run's recipe.yaml as written, without checks; {} when missing or not YAML."""
    try:
        return dict(_leaves(YAML(typ="safe", pure=True).load(run.recipe), ""))
    except (OSError, YAMLError):
        return {}


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf; lists without dicts, and empty dicts, are leaves."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{index}]")
    else:
        yield key, value
