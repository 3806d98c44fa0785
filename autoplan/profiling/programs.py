"""The programs that are timed: each runs one operation several times over in a dependent chain, on all devices at once.

A chain shares the dispatch of its program. Where the result cannot be the next operand, one of its elements is written
into the operand in place: one more small operation, which `cost_models.profile` takes off again. Barriers keep XLA from
computing less than is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import math

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from ..cost_models import COLLECTIVE_KINDS, Cluster

_WINDOW = 3  # of the convolutions measured, in both dims


@dataclass(frozen=True)
class Task:
    """One measurement to make.

    Attributes:
      what, dtype, dims, axis_size, stride, bytes: as in `cost_models.Measurement`.
      chain: operations in one program.
    """

    what: str
    dtype: str
    dims: tuple[int, ...] = ()
    axis_size: int = 0
    stride: int = 0
    bytes: float = 0.0
    chain: int = 1

    @property
    def key(self) -> tuple:
        """As `Measurement.key`."""
        return (self.what, self.dtype, self.dims, self.axis_size, self.stride, float(self.bytes))


@dataclass(frozen=True)
class Sizes:
    """What to measure: every (m, k, n) of a grid, images, bytes, payloads, dtypes."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    dtypes: tuple[str, ...]
    images: tuple[tuple[int, int], ...]
    bytes_moved: tuple[int, ...]
    payloads: tuple[int, ...]
    repeats: int


def sizes(platform: str, quick: bool) -> Sizes:
    """What is measured on a platform. Simulated devices are slow and share a machine's memory: smaller sizes.

    `images` are pairs of (height and width, features in and out), eight images at a time.
    """
    dtypes = ("float32", "bfloat16")
    if platform == "cpu" and quick:
        bytes_moved, payloads = (2**13, 2**18, 2**23), (2**10, 2**16, 2**20, 2**22)
        return Sizes((16, 256), (8, 64, 512), dtypes, ((16, 16),), bytes_moved, payloads, 5)
    if platform == "cpu":
        bytes_moved = tuple(2**power for power in (13, 16, 18, 20, 22, 23, 24))
        payloads = tuple(2**power for power in (8, 12, 14, 16, 18, 20, 22, 24))
        return Sizes((8, 64, 512, 1024), (8, 32, 256, 1024), dtypes, ((16, 16), (32, 64)), bytes_moved, payloads, 9)
    if quick:
        bytes_moved, payloads = (2**13, 2**22, 2**28), (2**12, 2**20, 2**26)
        return Sizes((128, 4096), (512, 4096), dtypes, ((56, 64),), bytes_moved, payloads, 5)
    bytes_moved = tuple(2**power for power in (13, 18, 20, 22, 24, 26, 28, 30))
    payloads = tuple(2**power for power in (10, 14, 18, 20, 22, 24, 26, 28))
    images = ((56, 64), (28, 256), (14, 512))
    return Sizes((8, 128, 1024, 8192), (128, 1024, 8192), dtypes, images, bytes_moved, payloads, 9)


def tasks(cluster: Cluster, wanted: Sizes) -> tuple[Task, ...]:
    """All measurements of a cluster, in the order in which they are made."""
    found = [Task("dispatch", "float32", bytes=64)]
    found += [
        Task(what, "float32", bytes=moved, chain=32 if moved <= 2**16 else 8)
        for moved in wanted.bytes_moved
        for what in ("elementwise", "copy", "reduce")
    ]
    for dtype in wanted.dtypes:
        for dims in _grid(wanted):
            found.append(Task("matmul", dtype, dims, chain=_chain(dims)))
        for side, features in wanted.images:
            dims = (8 * side * side, _WINDOW * _WINDOW * features, features)
            found.append(Task("convolution", dtype, dims, chain=_chain(dims)))
    found += [
        Task(kind, "float32", axis_size=size, stride=stride, bytes=payload, chain=8 if payload <= 2**18 else 3)
        for size, stride in cluster.axes()
        for kind in COLLECTIVE_KINDS
        for payload in sorted({-(-payload // (4 * size)) * 4 * size for payload in wanted.payloads})
    ]
    return tuple(found)


def _grid(wanted: Sizes) -> list[tuple[int, int, int]]:
    return [(m, k, n) for m in wanted.rows for k in wanted.columns for n in wanted.columns]


def _chain(dims: tuple[int, ...]) -> int:
    return 16 if math.prod(dims) <= 2**22 else 3


def build(task: Task, devices: np.ndarray) -> tuple[Callable, tuple[jax.Array, ...]]:
    """A compiled program that runs the task's chain on all `devices`, and its arguments on them."""
    shape = (-1, task.axis_size, task.stride) if task.axis_size else (1, -1, 1)
    mesh = Mesh(devices.reshape(shape), ("outer", "group", "inner"))
    spec = PartitionSpec(("outer", "group", "inner"))
    step, shapes = _step(task)

    def body(x, *others):
        for _ in range(task.chain):
            x = lax.optimization_barrier(step(x, *others))
        return x

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec,) * len(shapes), out_specs=spec, check_vma=False))
    place = NamedSharding(mesh, spec)
    make = jax.jit(
        lambda: tuple(jax.numpy.full((shape[0] * devices.size, *shape[1:]), 1e-3, task.dtype) for shape in shapes),
        out_shardings=(place,) * len(shapes),
    )
    arguments = make()
    return run.lower(*arguments).compile(), arguments


def _step(task: Task) -> tuple[Callable, list[tuple[int, ...]]]:
    """One operation on each device, from its operands to its first operand again, and their shapes there."""
    if task.what == "matmul":
        m, k, n = task.dims
        return (lambda x, w: _hand_on(x, x @ w)), [(m, k), (k, n)]
    if task.what == "convolution":
        return _convolution(task)
    if task.axis_size:
        return _collective(task)
    elements = int(task.bytes) // 4
    if task.what == "reduce":
        return (lambda x: _hand_on(x, x.sum(keepdims=True))), [(elements,)]
    if task.what == "copy":  # of a layout to another, which no other operation absorbs
        return (lambda x: x.reshape(32, -1).T.reshape(-1)), [(elements // 2,)]
    if task.what == "dispatch":
        return (lambda x: x + 1), [(elements // 2,)]
    return (lambda x: x * 0.999 + 1e-6), [(elements // 2,)]


def _convolution(task: Task) -> tuple[Callable, list[tuple[int, ...]]]:
    positions, _, features = task.dims
    side = math.isqrt(positions // 8)

    def step(x, w):
        names = ("NHWC", "HWIO", "NHWC")
        return _hand_on(x, lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names))

    return step, [(8, side, side, features), (_WINDOW, _WINDOW, features, features)]


def _collective(task: Task) -> tuple[Callable, list[tuple[int, ...]]]:
    size, elements = task.axis_size, int(task.bytes) // 4
    if task.what == "all-reduce":
        return (lambda x: lax.psum(x, "group")), [(elements,)]
    if task.what == "all-gather":  # the payload is what comes out
        return (lambda x: _hand_on(x, lax.all_gather(x, "group", tiled=True))), [(elements // size,)]
    if task.what == "reduce-scatter":  # the payload is what goes in
        return (lambda x: _hand_on(x, lax.psum_scatter(x, "group", tiled=True))), [(elements,)]
    if task.what == "all-to-all":
        return (lambda x: lax.all_to_all(x, "group", 0, 0, tiled=True)), [(elements,)]
    ring = [(place, (place + 1) % size) for place in range(size)]
    return (lambda x: lax.ppermute(x, "group", ring)), [(elements,)]


def _hand_on(x: jax.Array, result: jax.Array) -> jax.Array:
    """`x` with one element of `result` in it: the next operation waits for all of this one."""
    first = lax.slice(lax.optimization_barrier(result), (0,) * result.ndim, (1,) * result.ndim)
    return lax.dynamic_update_slice(x, first.reshape((1,) * x.ndim), (0,) * x.ndim)
