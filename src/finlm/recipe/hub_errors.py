"""What the client of the Hugging Face Hub raises, as a UserError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from finlm.base.errors import UserError


@contextmanager
def told(problem: str, fix: str) -> Iterator[None]:
    """Raises UserError for an id, a network or a file that fails; loads huggingface_hub (a quarter of a second)."""
    from huggingface_hub.errors import HfHubHTTPError

    # Errors of the connection, such as a proxy that refuses it, are those of its HTTP library: httpx, since 2.0 httpx2.
    of_connection: type[Exception] = HfHubHTTPError.__mro__[1]
    try:
        yield
    except (OSError, ValueError, of_connection) as error:  # ValueError: the id is none
        raise UserError(problem, evidence=" ".join(str(error).split())[:300], fix=fix) from None
