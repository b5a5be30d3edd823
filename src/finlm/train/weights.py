"""Existing weights, all of them: what a file lacks transformers draws at random, and only says so in the log."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from safetensors import SafetensorError

from finlm.base.errors import UserError


def load(kind: Any, source: Any, fix: str, may_lack: Collection[str] = (), **given: Any) -> Any:
    """kind.from_pretrained(source, **given), where may_lack names the weights that are made here instead.

    Raises UserError with the fix where the files cannot be read, or a weight is missing or has another shape.
    """
    try:
        # As a warning a shape comes back with its name; as an error it only stands in the log.
        model, found = kind.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **given)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the model in {source} cannot be loaded", evidence=str(error).strip().splitlines()[0], fix=fix
        ) from None
    shapes = {name: f"has {list(there)} there, {list(here)} here" for name, there, here in found["mismatched_keys"]}
    lines = {name: "is missing" for name in found["missing_keys"] if name not in may_lack} | shapes
    if lines:
        evidence = [f"{name} {lines[name]}" for name in sorted(lines)[:3]]
        raise UserError(
            f"the files of {source} lack {len(lines)} of the model's weights", evidence="\n".join(evidence), fix=fix
        )
    return model
