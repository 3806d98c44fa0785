"""What the compilers make of planned collectives: found by compiling, for each platform.

A sum that is split over several dims at once is an all-reduce, of which each device keeps its part.

XLA:CPU forms no reduce-scatters: it reduces, then slices. It reduces every pending sum where it is made.

XLA:TPU (libtpu 0.0.40 and newer, seen on v4, v5e, v5p and v6e slices of 4 to 256 chips):

- A reduce-scatter over all chips of a slice is an all-reduce, of which each keeps its part, where the slice is a
  cuboid or a square of 4 x 4 and more; over part of a slice, over 2 x 4 or 4 x 8, and the like, it is one.
- The sum that a contraction leaves pending is passed around in a ring while its blocks are computed (a *windowed
  einsum*), if computing takes longer than sending would: `RING_INTENSITY` FLOPs or more per byte of the result, over
  at most `RING_DEVICES` devices, more than two, and not 2 x 2. A ring passes n + 1 blocks of n, both ways around. Batch
  dims prevent it, and axes that split nothing of the contraction, or dims of the operand to whose dim the sum goes.
- Gathers of what does not depend on the contractions so far start early, and are waited for `EXPOSED` of their time in
  the median; gathers of activations, all-reduces, reduce-scatters and all-to-alls are waited for.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from .cost_models import MeshLinks

RING_INTENSITY = {"v4": 4192.0, "v5e": 4192.0, "v5p": 4192.0, "v6e": 10240.0}
"""FLOPs per byte of result from which a contraction's reduce-scatter is a ring: bisected with libtpu to 4 %."""

TILES = {"tpu": (8, 128)}
"""Rows and columns of the tiles in which arrays lie in memory, by platform."""

RING_DEVICES = 32
EXPOSED = 0.25


def scatter_kind(platform: str, mesh: MeshLinks, axes: tuple[int, ...]) -> str:
    """What a reduce-scatter over these axes becomes."""
    if platform == "cpu":
        return "all-reduce"
    link = mesh.together(axes)
    dims = link.torus if link is not None else ()
    square = len(dims) == 2 and dims[0] == dims[1] and dims[0] >= 4
    return "all-reduce" if platform == "tpu" and (square or len(dims) > 2) else "reduce-scatter"


def carries(platform: str) -> bool:
    """Whether the sum of two pending sums is reduced once. XLA:CPU reduces both."""
    return platform != "cpu"


def hidden_share(platform: str) -> float:
    """The share of a gather beside contractions that the step does not wait for."""
    return 1 - EXPOSED if platform == "tpu" else 0.0


def rings(mesh: MeshLinks, axes: tuple[int, ...]) -> bool:
    """Whether there are windowed einsums over these axes."""
    link = mesh.together(axes)
    small = link is not None and link.extents in ((2,), (2, 2))
    return not small and math.prod(mesh.shape[a] for a in axes) <= RING_DEVICES


def ring_bytes(mesh: MeshLinks, axes: tuple[int, ...], payload_bytes: ArrayLike) -> np.ndarray:
    """Bytes that each device sends when a pending sum of `payload_bytes` goes around."""
    size = math.prod(mesh.shape[a] for a in axes)
    return np.asarray(payload_bytes, np.float64) * (size + 1) / size


def ring_time_s(mesh: MeshLinks, axes: tuple[int, ...], payload_bytes: ArrayLike) -> np.ndarray:
    """Seconds that it occupies the links, half of the blocks in each direction."""
    size = math.prod(mesh.shape[a] for a in axes)
    slowest = min((mesh.links[a] for a in axes), key=lambda link: link.shift_bytes_per_s)
    link = mesh.together(axes) or slowest
    blocks_s = (size + 1) / 2 * (link.base_latency_s + link.latency_s)
    return blocks_s + ring_bytes(mesh, axes, payload_bytes) / 2 / link.shift_bytes_per_s
