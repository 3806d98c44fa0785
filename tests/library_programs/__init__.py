"""Steps made of public libraries, none of them written for autoplan: modules by library.

Each function of `NAMES` gives a `Case`. Sizes are small; batches are 24, which 8 and 6 devices divide.
"""

from __future__ import annotations

from collections.abc import Callable
import importlib

from .case import Case

MODULES = {
    "flax_linen": "flax",
    "flax_nnx": "flax",
    "optimizers": "optax",
    "equinox_steps": "equinox",
    "haiku_steps": "haiku",
    "science": "jax",
    "solvers": "diffrax",
    "inference": "blackjax",
    "graphs": "jraph",
}


def _steps(module: str) -> dict[str, Callable[[], Case]]:
    try:
        found = importlib.import_module(f"{__name__}.{module}")
    except ImportError:
        return {}
    return {
        f"{module}.{name}": make
        for name, make in vars(found).items()
        if callable(make)
        and getattr(make, "__module__", "") == found.__name__
        and not name.startswith("_")
        and not isinstance(make, type)
    }


CASES: dict[str, Callable[[], Case]] = {name: make for module in MODULES for name, make in _steps(module).items()}
MISSING = tuple(library for module, library in MODULES.items() if not _steps(module))


def load(name: str) -> Case:
    return CASES[name]()


__all__ = ["CASES", "MISSING", "Case", "load"]
