"""Where things of this machine lie on a host: the same path, or below the host's work_dir."""

from __future__ import annotations

import sys
from pathlib import Path

from finlm.recipe.schema import HostAccess


def there(path: Path, access: HostAccess) -> Path:
    """Where a path of this machine lies on a host: hosts.<name>.work_dir stands for the working directory."""
    path, here = path.absolute(), Path.cwd()
    if access.work_dir is None or not path.is_relative_to(here):
        return path
    return Path(access.work_dir) / path.relative_to(here)


def python(access: HostAccess) -> str:
    """The interpreter of a host's ranks: hosts.<name>.python, else this one's place there."""
    return access.python or str(there(Path(sys.executable), access))
