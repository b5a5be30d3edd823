"""Make the import of transformers cheaper, for every process that finlm starts.

`import transformers` reads its 1,700 files of models twice to list what they define; installed files do not change, so
the list is kept. Where torchao, scipy and scikit-learn are installed, it imports them with every model. Without both, a
rank imports for 4 CPU seconds instead of 5, and where those packages are large it saves more.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from finlm.base import files

_TABLE = "transformers.utils.import_utils"
# The package that a module imports for what finlm does not use; the losses of detectors (loss.loss_*) import scipy.
# finlm imports torchao itself (fp8, lora.quantize), and refuses models that torchao has quantised.
_LEFT_OUT = {
    "transformers.quantizers.quantizer_torchao": "torchao",
    "transformers.generation.candidate_generator": "sklearn",  # by transformers 5.17
}
Table = dict[frozenset[str], dict[str, set[str]]]  # names that modules define, by the packages that they need


def hasten_transformers() -> None:
    """Change how transformers is imported later in this process. Does nothing if it is imported, or when repeated."""
    if "transformers" not in sys.modules and not any(isinstance(finder, _Hastened) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Hastened())


class _Hastened(importlib.abc.MetaPathFinder):
    """Finds the modules of transformers that load otherwise than they would."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a module whose loading is changed, None for any other."""
        left_out = "scipy" if name.startswith("transformers.loss.loss_") else _LEFT_OUT.get(name)
        if left_out is None and name != _TABLE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            change = functools.partial(_execute_without, left_out) if left_out else _keep_table
            setattr(spec.loader, "exec_module", functools.partial(change, spec.loader.exec_module))  # noqa: B010 - mypy
        return spec


def _keep_table(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute transformers.utils.import_utils, then let its table of models come from a file."""
    execute(module)
    scan: Callable[..., Table] = module.define_import_structure
    models = Path(module.__file__ or "").parents[1] / "models"

    def define_import_structure(module_path: str | Path, prefix: str | None = None) -> Table:
        if Path(module_path) not in (models, models / "__init__.py"):
            return scan(module_path, prefix)
        table = _read_table(models, lambda: scan(models))
        return {
            needs: {f"{prefix}.{name}" if prefix else name: names for name, names in modules.items()}
            for needs, modules in table.items()
        }

    module.define_import_structure = define_import_structure  # type: ignore[attr-defined]


def _read_table(models: Path, scan: Callable[[], Table]) -> Table:
    """Return what scan() returned when it was last called for this installed directory; call it the first time.

    A directory outside of site-packages, where someone may edit the files, is scanned every time.
    """
    if not {"site-packages", "dist-packages"} & set(models.parts):
        return scan()
    state = [(str(path), path.stat().st_mtime_ns) for path in (models, models / "__init__.py", models.parent)]
    version = sorted(path.name for path in models.parents[1].glob("transformers-*.dist-info"))
    home = Path(os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '')}/.cache")
    kept = home / "finlm" / f"transformers-models-{files.sha256_json([version, *state])[:16]}.json"
    with contextlib.suppress(OSError, files.NotJson, ValueError, TypeError):
        return {frozenset(needs): {name: set(names) for name, names in rows} for needs, rows in files.read_json(kept)}
    table = scan()
    rows = [
        (sorted(needs), [(name, sorted(names)) for name, names in modules.items()]) for needs, modules in table.items()
    ]
    with contextlib.suppress(OSError):  # a home that cannot be written
        files.write_text(kept, json.dumps(rows))
    return table


def _execute_without(package: str, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute a module of transformers as if a package were not installed; what needs it there refuses to work."""
    utils: Any = sys.modules["transformers.utils"]
    name = f"is_{package}_available"
    known = getattr(utils, name)
    setattr(utils, name, lambda *_: False)
    try:
        execute(module)
    finally:
        setattr(utils, name, known)
