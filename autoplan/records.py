"""Fields of frozen records. Each check returns the value in its immutable, JSON-able type.

All raise ValueError naming the field, what was expected and what was there.
"""

import math
import operator
from typing import Any


def freeze(record: Any, **values: Any) -> None:
    """Sets fields of a frozen dataclass in its `__post_init__`."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def freeze_numbers(record: Any, *fields: str, infinite: bool = False) -> None:
    """`number` on fields of a record under construction."""
    freeze(record, **{name: number(name, getattr(record, name), infinite=infinite) for name in fields})


def text(name: str, value: Any, *, empty: bool = False) -> str:
    """A string."""
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"{name}: expected a {'' if empty else 'non-empty '}string, got {value!r}")
    return value


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """One of a few strings."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")


def integer(name: str, value: Any, *, least: int = 0) -> int:
    """A whole number, also one of NumPy's."""
    try:
        result = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: expected an integer, got {value!r}") from None
    if result < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {result}")
    return result


def number(name: str, value: Any, *, infinite: bool = False) -> float:
    """A float that is not negative, also from NumPy."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a number, got {value!r}") from None
    if not result >= 0 or (math.isinf(result) and not infinite):
        raise ValueError(
            f"{name}: expected a {'' if infinite else 'finite '}number of at least 0, got {result!r}"
        )
    return result


def names(name: str, value: Any) -> tuple[str, ...]:
    """A tuple of strings."""
    if isinstance(value, str):
        raise ValueError(f"{name}: expected a tuple of names, got the string {value!r}")
    return tuple(text(name, item) for item in value)


def instance(name: str, value: Any, kind: type) -> Any:
    """A value of a type."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected {kind.__name__}, got {value!r}")
    return value
