"""What a program of a library is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Case:
    """`step(state, *inputs)` gives (new state, anything) or, if `stateless`, anything.

    `inputs(i)` are those of step i. NNX steps change the state in place and give anything (`in_place`).
    `make_state` makes the first state anew. Values may differ by `tolerance` of the largest of their array.
    """

    step: Callable[..., Any]
    make_state: Callable[[], Any]
    inputs: Callable[[int], tuple]
    stateless: bool = False
    in_place: bool = False
    donate: bool = True
    tolerance: float = 1e-3
    static_argnums: tuple[int, ...] = ()


def draws(i: int) -> np.random.Generator:
    return np.random.default_rng(100 + i)


def normal(i: int, *shape: int) -> np.ndarray:
    return draws(i).normal(size=shape).astype(np.float32)


def integers(i: int, high: int, *shape: int) -> np.ndarray:
    return draws(i).integers(0, high, shape).astype(np.int32)


def key(i: int = 0) -> jax.Array:
    return jax.random.key(i)
