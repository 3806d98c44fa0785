"""Quantities as people write and read them. Inside, everything is SI: bytes, seconds, bytes per second."""

import math
import re

from .errors import PlanError

_WRITE_SIZE = "Write a whole number of bytes or a size with its unit, such as '80GiB' or '16GB'"
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_BYTES = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgtp]?)(i?)b)?\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float) -> int:
    """A number of bytes from "80GiB" (2**30), "16 GB" (10**9), "512MiB", "4096" or a number.

    Raises:
      PlanError: it is no positive number of bytes.
    """
    if isinstance(text, str):
        match = _BYTES.fullmatch(text)
        size = None
        if match and not (match[3] and not match[2]):
            size = float(match[1]) * (1024 if match[3] else 1000) ** _PREFIXES[(match[2] or "").lower()]
    elif isinstance(text, bool) or not isinstance(text, int | float):
        size = None
    else:
        size = text
    if size is None or not math.isfinite(size):
        raise PlanError("a memory size must be a number of bytes", got=repr(text), action=_WRITE_SIZE)
    if size < 1:
        raise PlanError("a memory size must be at least one byte", got=repr(text), action=_WRITE_SIZE)
    return round(size)


def format_bytes(size_bytes: float) -> str:
    """Binary units, three digits: "512 B", "9.77 GiB", "16 GiB"; "unknown" if infinite."""
    if math.isinf(size_bytes):
        return "unknown"
    return _scaled(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_bandwidth(bytes_per_s: float) -> str:
    """Decimal units, as data sheets have them: "450 GB/s"."""
    return _scaled(bytes_per_s, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"))


def format_time(time_s: float) -> str:
    """Three digits: "850 ns", "12.4 us", "3.07 ms", "1.50 s", "2 min 5 s"; "unknown" if infinite."""
    if math.isinf(time_s):
        return "unknown"
    if time_s == 0:
        return "0 s"
    if round(time_s) >= 120:
        minutes, seconds = divmod(round(time_s), 60)
        return f"{minutes} min {seconds} s"
    if time_s >= 0.9995:
        return f"{_three_digits(time_s)} s"
    return _scaled(time_s * 1e9, 1000, ("ns", "us", "ms"))


def _scaled(value: float, base: int, names: tuple[str, ...]) -> str:
    index = 0
    while index < len(names) - 1 and value >= (999.5 if base == 1000 else 1023.5):
        value, index = value / base, index + 1
    return f"{_three_digits(value)} {names[index]}"


def _three_digits(value: float) -> str:
    """Three significant digits, and no decimals if the value is whole: "9.77", "16", "1023", "0.05"."""
    if value == int(value):
        return str(int(value))
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f}"
