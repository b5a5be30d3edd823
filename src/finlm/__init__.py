"""`finlm.load_recipe`, `finlm.make_plan`, `finlm.open_run`: loaded from finlm.api when they are asked for.

__init__.pyi beside it tells type checkers the names.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Run", "load_recipe", "make_plan", "open_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'finlm' has no attribute {name!r}")
    return getattr(importlib.import_module("finlm.api"), name)
