"""Bytes and seconds, as people write and read them."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from anybatch.errors import InputError
from anybatch.units import format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10GiB", 10 << 30),
        ("10 gib", 10 << 30),
        ("1.5 GB", 1_500_000_000),
        ("512M", 512 << 20),
        ("512MiB", 512 << 20),
        ("512MB", 512_000_000),
        ("64k", 64 << 10),
        ("64kB", 64_000),
        ("2T", 2 << 40),
        ("2tb", 2 * 10**12),
        ("100", 100),
        ("100B", 100),
        (".5K", 512),
        ("1e3", 1000),
        ("1e3 M", 1000 << 20),
        (" 7 ", 7),
        (4096, 4096),
        (1.9, 1),
        ("1.0000001K", 1024),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "much", "GiB", "-1G", "10 G i B", "10Gi", "10XB", "1,5G", "10GiBs", "0x10", "1_000", "+1"],
)
def test_what_is_no_size(text):
    with pytest.raises(InputError, match=r"budget is .* not a size: write a size above zero"):
        parse_bytes(text, name="budget")


@pytest.mark.parametrize("text", ["0", "0GiB", 0, -5, 0.5, math.inf, math.nan, "1e999"])
def test_what_leaves_no_room(text):
    with pytest.raises(InputError, match="leaves no room"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [True, None, [], b"1G", 1j])
def test_what_is_not_even_text(value):
    with pytest.raises(InputError, match="not a size"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10239, "10.0 KiB"),
        (1024 * 100, "100 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (1 << 20, "1.00 MiB"),
        (49493811, "47.2 MiB"),
        (10 << 30, "10.0 GiB"),
        (1 << 50, "1024 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_sizes_for_people(count, expected):
    assert format_bytes(count) == expected


@given(st.integers(1, 1 << 50))
def test_a_size_that_was_printed_can_be_read(count):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=6e-3)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0.0 us"),
        (2e-6, "2.0 us"),
        (3.5e-4, "350 us"),
        (9.99e-4, "999 us"),
        (9.9999e-4, "1.0 ms"),
        (4.2e-3, "4.2 ms"),
        (0.25, "250 ms"),
        (0.9999, "1.0 s"),
        (1.3, "1.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (-1.3, "-1.3 s"),
    ],
)
def test_seconds_for_people(seconds, expected):
    assert format_seconds(seconds) == expected


def test_counts_for_people():
    assert format_count(1234567) == "1,234,567"
