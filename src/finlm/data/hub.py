"""Files of a data set on the Hugging Face Hub at one commit, fetched once and then found in the Hub's own cache.

Only files of the kinds that prepare reads are fetched. A branch or tag moves, so the recipe must name the commit; with
the files in the cache no network is needed (HF_HUB_OFFLINE=1).
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.data import sources
from finlm.data.steps import NotPrepared
from finlm.recipe import hub_errors
from finlm.recipe.schema_data import Source


def files(source: Source, key: str, *, fetch: bool) -> list[Path]:
    """The chosen files of source.dataset at source.revision, sorted.

    Raises UserError when they cannot be had; without `fetch`, for files that are not in the cache, NotPrepared.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    assert source.dataset is not None
    if not re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        raise UserError(
            f"{key}: {source.dataset} needs the commit to read",
            evidence=f"revision: {source.revision}",
            fix=f"set {key}.revision to the 40 digits under 'Files and versions' of huggingface.co/datasets/"
            f"{source.dataset}",
        )
    if fetch:
        screen.say(f"{source.dataset} at {source.revision}")
    problem = f"{key}: {source.dataset} at {source.revision} cannot be fetched"
    with hub_errors.told(
        problem, "check the id, the commit and the network; a set behind a licence needs `hf auth login`"
    ):
        try:
            found = snapshot_download(
                source.dataset,
                repo_type="dataset",
                revision=source.revision,
                allow_patterns=source.files or [f"*{suffix}" for suffix in sources.READABLE],
                local_files_only=not fetch,
            )
        except LocalEntryNotFoundError:
            if fetch:
                raise
            raise NotPrepared("sources") from None
    root = Path(found)
    paths = sorted(path for path in root.rglob("*") if path.is_file() and sources.readable(path.name))
    chosen = [path for path in paths if source.files is None or fnmatch(str(path.relative_to(root)), source.files)]
    named = [path for path in chosen if re.search(rf"(^|[^a-z]){re.escape(source.split)}([^a-z]|$)", path.name)]
    if source.files is None and named:
        chosen = named
    if not chosen and not fetch:
        raise NotPrepared("sources")
    if not chosen:
        listed = ", ".join(str(path.relative_to(root)) for path in paths[:10])
        raise UserError(
            f"{key}: {source.dataset} has no file to read",
            evidence=f"files {source.files}, split {source.split}; it holds {listed or 'none that prepare reads'}",
            fix=f"set {key}.files to a glob such as data/*.parquet",
        )
    return chosen
