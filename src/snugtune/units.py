"""Sizes and times: bytes and seconds inside, GiB and minutes where a person reads or writes."""

from __future__ import annotations

import re
from decimal import Decimal

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNIT_BYTES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40,
    "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Bytes of `16GB` (10^9), `16GiB` (2^30), `1500MB`, `16G` (2^30) or a plain number of bytes.

    Raises:
        ValueError: where the text is no size, or the size is not a positive number of whole bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = _SIZE.fullmatch(str(text))
        if not match or match[2].lower() not in _UNIT_BYTES:
            raise ValueError(f"'{text}' is not a size; write it as 16GiB, 16GB or 1500MB")
        if "." in match[1] and _UNIT_BYTES[match[2].lower()] == 1:
            raise ValueError(f"'{text}' is no whole number of bytes; write its unit, as in 16GiB")
        size = int(Decimal(match[1]) * _UNIT_BYTES[match[2].lower()])
    if size <= 0:
        raise ValueError(f"a size must be positive, not '{text}'")
    return size


def format_bytes(size_bytes: float) -> str:
    """`1.50 GiB` from half a GiB on, else `12 MiB`, else `3 KiB`."""
    if abs(size_bytes) >= GIB / 2:
        return f"{size_bytes / GIB:.2f} GiB"
    if abs(size_bytes) >= MIB:
        return f"{size_bytes / MIB:.0f} MiB"
    return f"{size_bytes / KIB:.0f} KiB"


def format_seconds(seconds: float) -> str:
    """`48 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
