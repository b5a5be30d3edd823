"""Sizes and counts as people write and read them."""

from __future__ import annotations

import pytest

from finlm.base import units


@pytest.mark.parametrize(
    ("text", "value"), [("16MB", 16_000_000), ("1.5 GiB", 3 * 2**29), ("4096", 4096), (7, 7), ("1_000 B", 1000)]
)
def test_bytes_are_read_as_written(text: str | int, value: int) -> None:
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize(("text", "value"), [("3.9M", 3_900_000), ("1.5B", 1_500_000_000), ("20k", 20_000), (5, 5)])
def test_counts_are_read_as_written(text: str | int, value: int) -> None:
    assert units.parse_count(text) == value


@pytest.mark.parametrize("text", ["16 XB", "-3", "", "many", -1, 2.5, True])
def test_anything_else_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        units.parse_bytes(text)  # type: ignore[arg-type]


def test_numbers_are_shown_in_the_unit_a_reader_expects() -> None:
    assert [units.format_bytes(v) for v in (10, 1536, 3 * 2**40)] == ["10 B", "1.5 KiB", "3.0 TiB"]
    assert [units.format_count(v) for v in (9999, 12_345, 6_394_000_000)] == ["9,999", "12.3k", "6.39B"]
    assert [units.format_count(v) for v in (999_997_440, 999_600)] == ["1B", "1M"]
    assert [units.format_rate(v) for v in (0.01234, 12.34, 312.5)] == ["0.012", "12", "312"]
    times = [units.format_duration(v) for v in (1.5, 600, 3 * 3600, 86400 * 3, 86400 * 365.25 * 11)]
    assert times == ["1.5 seconds", "10 minutes", "3 hours", "3 days", "11 years"]
