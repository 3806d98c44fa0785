"""Small training steps of the kinds that people write, with one interface: `load(name)` gives a `Program`.

A module per program, imported only when asked for. Sizes are tiny but divide by 8, 6 and 3: what costs time
in a test is compilation, which depends on the structure.
"""

from __future__ import annotations

import importlib

from .base import Program

_MODULES = {
    "mlp": "mlp",
    "mlp_odd": "mlp",
    "transformer": "transformer",
    "transformer_scan": "transformer_scan",
    "linen": "linen",
    "nnx_in_place": "nnx_modules",
    "nnx_returned": "nnx_modules",
    "resnet_group": "resnet",
    "resnet_batch": "resnet",
    "moe": "moe",
    "vit": "vit",
    "mixer": "mixer",
}
NAMES = tuple(_MODULES)


def load(name: str) -> Program:
    """The program of that name. Raises `KeyError` for a name not in `NAMES`."""
    return importlib.import_module(f"{__name__}.{_MODULES[name]}").PROGRAMS[name]()


__all__ = ["NAMES", "Program", "load"]
