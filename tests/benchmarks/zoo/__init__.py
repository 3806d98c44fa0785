"""Training steps as people write them, in two sizes: `load(name, size)` gives a `Program`.

`large` fills accelerators (hundreds of millions of parameters, or activations of gigabytes) and is only ever
compiled; `small` trains on simulated CPU devices in a fraction of a second per step. A module per model,
imported only when asked for.
"""

from __future__ import annotations

import importlib

from .base import Program

_MODULES = {
    "gpt": "gpt",
    "gpt_scan": "gpt",
    "llama": "llama",
    "moe": "moe",
    "resnet": "resnet",
    "vit": "vit",
    "mixer": "mixer",
    "unet": "unet",
}
NAMES = tuple(_MODULES)
SIZES = ("large", "small")


def load(name: str, size: str) -> Program:
    """The program of that name and size. Raises `KeyError` for a name not in `NAMES` or a size not in `SIZES`."""
    return importlib.import_module(f"{__name__}.{_MODULES[name]}").program(name, size)


__all__ = ["NAMES", "SIZES", "Program", "load"]
