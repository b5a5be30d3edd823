"""A recipe as it may leave the house: what says how to train, without credentials, addresses and names of machines."""

from __future__ import annotations

from finlm.recipe.schema import Recipe


def published(recipe: Recipe) -> Recipe:
    """For model cards and trackers: no environment, no way to a host, no endpoint; hosts are host1, host2, ...

    It is a valid recipe for the same training. Paths of data and models are left as they are.
    """
    aliases: dict[str, str] = {}

    def alias(name: str) -> str:
        return aliases.setdefault(name, f"host{len(aliases) + 1}")

    hosts = tuple(host.model_copy(update={"name": alias(host.name)}) for host in recipe.hardware.hosts)
    rows, kinds = recipe.batch.micro_batch, {host.gpu for host in hosts}
    if isinstance(rows, dict):
        rows = {name if name in kinds else alias(name): count for name, count in rows.items()}
    return recipe.model_copy(
        update={
            "hardware": recipe.hardware.model_copy(update={"hosts": hosts}),
            "batch": recipe.batch.model_copy(update={"micro_batch": rows}),
            **{"env": {}, "hosts": {}, "self_qa": None},
        }
    )
