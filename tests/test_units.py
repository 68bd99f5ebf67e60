"""Sizes and times as people write and read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snugtune.units import GIB, KIB, MIB, format_bytes, format_seconds, parse_bytes

UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40, "K": KIB, "M": MIB, "G": GIB, "T": 1 << 40,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16_000_000_000), ("16GiB", 17_179_869_184), ("1500MB", 1_500_000_000), ("16G", 17_179_869_184),
        ("1.5 GiB", 1_610_612_736), (" 8gib ", 8 * GIB), (".5GiB", GIB // 2), ("2.GiB", 2 * GIB), ("123", 123),
        (123, 123),
        ("4.35GB", 4_350_000_000), ("1.1MB", 1_100_000), ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_a_size_reads_as_it_says(text, size):
    assert parse_bytes(text) == size


@settings(deadline=None)
@given(st.integers(1, 10**9), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_a_whole_number_of_any_unit_is_exact(number, unit, gap, lower):
    text = f"{number}{gap}{unit.lower() if lower else unit}"
    assert parse_bytes(text) == number * UNITS[unit]


@settings(deadline=None)
@given(st.integers(1, 2**62))
def test_bytes_are_taken_as_they_are(size):
    assert parse_bytes(size) == size == parse_bytes(str(size))


@settings(deadline=None)
@given(st.integers(1, 2**50))
def test_what_is_written_for_people_reads_back_within_its_rounding(size):
    written = format_bytes(size)
    assert re.fullmatch(r"\d+ [KM]iB|\d+\.\d\d GiB", written)
    unit = {"KiB": KIB, "MiB": MIB, "GiB": GIB}[written.split()[1]]
    if written != "0 KiB":
        assert abs(parse_bytes(written) - size) <= (0.005 if unit == GIB else 0.5) * unit + 1


@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "16 gibibytes", "1,5GB", "-1", "-1GiB", "1e9", "0x10", "16GB!", "1.2.3GB", "nan"]
)
def test_what_is_no_size_is_refused_with_itself_and_an_example(text):
    with pytest.raises(ValueError) as refused:
        parse_bytes(text)
    assert f"'{text}'" in str(refused.value) and "16GiB" in str(refused.value)


@pytest.mark.parametrize("size", [0, -1, "0", "0GiB", "0.0001KB"])
def test_a_size_of_less_than_a_byte_is_refused(size):
    with pytest.raises(ValueError, match="must be positive"):
        parse_bytes(size)


def test_a_size_without_a_unit_is_in_whole_bytes():
    with pytest.raises(ValueError, match="write its unit"):
        parse_bytes("1.5")


def test_a_truth_value_is_no_size():
    with pytest.raises(ValueError, match="'True' is not a size"):
        parse_bytes(True)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 KiB"), (3 * KIB, "3 KiB"), (MIB, "1 MiB"), (GIB // 2 - MIB, "511 MiB"), (GIB // 2, "0.50 GiB"),
        (1.5 * GIB, "1.50 GiB"), (-2 * GIB, "-2.00 GiB"),
    ],
)  # fmt: skip
def test_sizes_are_written_for_people(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (3.14, "3.1 s"), (9.96, "10.0 s"), (48, "48 s"), (59.4, "59 s"), (59.6, "1 min 00 s"),
        (185, "3 min 05 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h 00 min"), (7800, "2 h 10 min"),
    ],
)  # fmt: skip
def test_times_are_written_for_people(seconds, text):
    assert format_seconds(seconds) == text
