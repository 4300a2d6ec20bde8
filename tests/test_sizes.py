"""Sizes in text and in bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmem.errors import UsageError
from xmem.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("1.5gib", 3 * 2**29),
        ("512 MB", 512 * 10**6),
        ("64MiB", 64 * 2**20),
        ("1000", 1000),
        (" 7 B ", 7),
        (".5KiB", 512),
        (12, 12),
        (0, 0),
    ],
)
def test_a_size_is_read(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "wrong", ["", "GiB", "-1", -1, "8 GiBs", "1e9", "0.3B", "١GiB", True, 1.5, None, "8G8"]
)
def test_what_is_no_size_is_named_with_the_remedy(wrong):
    with pytest.raises(UsageError):
        parse_size(wrong)


@given(st.integers(min_value=0, max_value=2**60))
def test_bytes_come_back_as_they_were(size_bytes):
    assert parse_size(size_bytes) == size_bytes
    assert parse_size(f"{size_bytes}B") == size_bytes


@given(st.integers(min_value=0, max_value=2**50))
def test_a_rendered_size_is_within_its_digits(size_bytes):
    rendered = format_size(size_bytes, digits=6)
    number, unit = rendered.split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert abs(float(number) * factor - size_bytes) <= factor * 1e-6


def test_unknown_is_a_dash_and_never_a_number():
    assert format_size(None) == "-"
    assert format_size(0) == "0 B"
