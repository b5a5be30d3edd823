"""What must be equal on every host: code, prepared data, a local model; and what differs there.

Compared by fingerprints (probe_files), within a second also for large data. It copies nothing: that is sync's job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finlm.ops import probe_files, sync_trees
from finlm.recipe import parents
from finlm.recipe.schema import Recipe

Role = Literal["code", "data", "model"]
RUNS = ("src/", "requirements")  # what ranks run; an edited recipe or hostfile takes effect from this machine alone
ANY = "any"  # instead of a fingerprint: the file must be there, and is not here to compare with


@dataclass(frozen=True)
class Tree:
    """Files below path by relative name, with their fingerprints on this machine."""

    role: Role
    path: Path
    files: Mapping[str, str | None]
    follow: bool

    def request(self, path: Path) -> dict[str, Any]:
        """What probe_files shall look at on a host where the tree lies at `path`."""
        return {"path": str(path), "names": list(self.files), "follow": self.follow}


def wanted(recipe: Recipe, root: Path | None, shards: Path | None) -> list[Tree]:
    """The repository's code, the prepared shards and the start weights, each where there is one here."""
    trees = []
    if root is not None:
        names = [name for name in sync_trees.code(root).files if name.startswith(RUNS)]
        trees.append(_tree("code", root, names, follow=False))
    if shards is not None:
        trees.append(_tree("data", shards, _below(shards), follow=True))
    model, named = model_path(recipe), recipe.model.init_from
    if model is not None:
        trees.append(_tree("model", model, _below(model), follow=True))
    elif named is not None and not parents.is_recipe(named) and parents.is_directory(named):
        trees.append(Tree("model", Path(named).absolute(), {"config.json": ANY}, follow=True))
    return trees


def model_path(recipe: Recipe) -> Path | None:
    """The directory of model.init_from; None for a Hub id and for a start from scratch."""
    named = recipe.model.init_from
    return Path(named).absolute() if named is not None and Path(named).is_dir() else None


def _below(path: Path) -> list[str]:
    names = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return sorted(name for name in names if not name.startswith("."))


def _tree(role: Role, path: Path, names: list[str], *, follow: bool) -> Tree:
    path = path.absolute()
    found = probe_files.look({"path": str(path), "names": names, "follow": follow})
    return Tree(role, path, found, follow)


def differences(tree: Tree, found: Mapping[str, str | None]) -> Iterator[str]:
    """`name: why` of every file that is not on the host what it is here."""
    for name, expected in tree.files.items():
        seen = found.get(name)
        if seen is None or expected not in (seen, ANY):
            yield f"{name}: " + ("missing" if seen is None else f"{_short(seen)}, here {_short(expected)}")


def _short(fingerprint: str | None) -> str:
    return "missing" if fingerprint is None else fingerprint[: len("sha256 ") + 12]
