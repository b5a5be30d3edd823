"""The base of every part of a recipe, and the number types its keys share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from finlm.base.units import parse_bytes, parse_count

Auto = Literal["auto"]


def _integral(value: Any) -> Any:
    """YAML reads 1e6 as a float; a whole one is an integer to its author."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bytes(value: Any) -> Any:
    return parse_bytes(_integral(value))


def _count(value: Any) -> Any:
    return parse_count(_integral(value))


Int = Annotated[int, BeforeValidator(_integral)]
Positive = Annotated[int, BeforeValidator(_integral), Field(gt=0)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Count = Annotated[int, BeforeValidator(_count), Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A frozen part of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)
