"""The recipes that come with finlm, found from every directory: those of its checkout, or of what pip installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import finlm


def find(path: Path) -> Path:
    """The path itself where there is such a file; else, for recipes/..., the one that came with finlm, if any did."""
    if path.exists() or path.is_absolute() or path.parts[:1] != ("recipes",):
        return path
    in_checkout = Path(finlm.__file__).resolve().parents[2] / path
    if in_checkout.exists():
        return in_checkout
    try:
        installed = importlib.metadata.files("finlm") or []
    except importlib.metadata.PackageNotFoundError:
        return path
    wanted = f"/share/finlm/{path.as_posix()}"  # where pyproject.toml's data-files put them
    return next((Path(str(file.locate())).resolve() for file in installed if file.as_posix().endswith(wanted)), path)
