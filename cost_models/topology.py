"""How devices are wired, and what a mesh laid over the wires gives to each of its axes.

A topology is a sequence of levels, outermost first: slices or hosts on a network, then a torus, a switch, or
the shared memory of one machine. Levels have sizes; all sizes in order are the topology's dims, and devices
are numbered over them in row-major order. A mesh numbers its devices in row-major order too, so the last mesh
axis runs over neighbours.

`mesh_links` cuts every mesh axis into pieces: an axis of n devices at stride S covers, of a dim of d devices
at stride c, the part [max(S, c), min(S n, c d)). A piece may be a whole dim, its inner part (neighbours), or
its outer part (devices `stride` apart, whose groups interleave and share the wires between them). An axis
whose parts do not divide the dims (3 x 2 over two hosts of 3) is priced cautiously: as one chain over the
slowest wire it meets.

Ring rates (bytes per second that each device sends, against `collectives.wire_bytes`):
  torus piece of g devices at stride s: one direction of one link / s; twice that if it is a whole wrapped
    dim.
  torus axis over several dims: the sum of its pieces' (each dim carries a share of the payload).
  switch: the device's port.
  network, h hosts with g devices of the axis inside each: all g ports of a host carry its share, so the
    network needs
  B (h-1)/h / (g port) and the level inside B (g-1)/g / inside; at once if pipelined (NCCL's rings), else in
  sequence.
All-to-all is bounded by the bisection: a line of g devices at stride s needs s g B / (4 link), a ring half of
that (W. Dally, B. Towles: Principles and practices of interconnection networks, ch. 3; the scaling book's
all-to-all).
"""

from dataclasses import dataclass
from itertools import combinations
import math

import numpy as np

from .cpu import cpu_link
from .links import Link, MeshLinks


@dataclass(frozen=True)
class Level:
    """One level of a topology.

    Attributes:
      kind: "network" (hosts or slices, one size), "torus" (one size per dim), "switch" or "shared-memory"
        (one size).
      name: for reports, e.g. "ICI", "NVLink", "InfiniBand between hosts".
      sizes: devices (or hosts) along each dim of the level, outermost first.
      wraps: for each dim, whether it closes to a ring (only tori).
      bytes_per_s: achievable one-way rate of one torus link, or of one device's port; unused for shared
        memory.
      base_latency_s, latency_s: of a collective that uses the level, and of each of its steps.
      pipelined: on a network: whether a collective keeps this level and the one inside it busy at once.
      small_group_rates: pairs (largest group size, bytes_per_s) where small groups reach less than the full
        port.
      source: where the figures come from.
    """

    kind: str
    name: str
    sizes: tuple[int, ...]
    wraps: tuple[bool, ...]
    bytes_per_s: float
    base_latency_s: float
    latency_s: float
    source: str
    pipelined: bool = True
    small_group_rates: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("network", "torus", "switch", "shared-memory"):
            raise ValueError(f"unknown kind of level {self.kind!r}")
        if not self.sizes or min(self.sizes) < 1 or len(self.wraps) != len(self.sizes):
            raise ValueError(
                f"level {self.name}: needs sizes >= 1 and as many wraps, got {self.sizes}, {self.wraps}"
            )
        if self.kind != "torus" and len(self.sizes) != 1:
            raise ValueError(f"level {self.name}: a {self.kind} has one size, got {self.sizes}")
        if not self.bytes_per_s > 0 or self.base_latency_s < 0 or self.latency_s < 0:
            raise ValueError(f"level {self.name}: needs a positive rate and latencies that are not negative")


@dataclass(frozen=True)
class Piece:
    """The part of one topology dim that a mesh axis covers: `size` devices, `stride` apart within the dim."""

    level: Level
    dim: int
    size: int
    stride: int
    aligned: bool

    @property
    def whole(self) -> bool:
        return self.stride == 1 and self.size == self.level.sizes[self.dim]

    @property
    def stride_on_wire(self) -> int:
        """How many groups of the axis share one wire: those that interleave on a torus; a port has one."""
        return self.stride if self.level.kind == "torus" else 1

    @property
    def ring(self) -> bool:
        """Whether the piece closes over its dim's own wrap-around links."""
        covers = self.size * self.stride == self.level.sizes[self.dim]
        return self.aligned and covers and self.level.wraps[self.dim]


@dataclass(frozen=True)
class _Rates:
    """What a set of pieces offers, as seconds per byte of payload, and its latencies."""

    gather_s_per_byte: float
    exchange_s_per_byte: float
    shift_s_per_byte: float
    base_latency_s: float
    latency_s: float
    gather_latency_s: float


_NOTHING = _Rates(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def topology_dims(levels: tuple[Level, ...]) -> tuple[int, ...]:
    """All sizes of all levels, outermost first."""
    return tuple(size for level in levels for size in level.sizes)


def mesh_links(levels: tuple[Level, ...], shape: tuple[int, ...]) -> MeshLinks:
    """The links of a mesh of `shape` laid over `levels` in row-major order (see the module's text).

    Raises:
      ValueError: `shape` has a size below 1 or does not hold exactly the topology's devices.
    """
    count = math.prod(topology_dims(levels))
    whole = all(isinstance(size, int | np.integer) and size >= 1 for size in shape)
    if not shape or not whole or math.prod(shape) != count:
        raise ValueError(f"mesh shape {shape} does not fit {count} devices: the product must be {count}")
    shape = tuple(int(size) for size in shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    links = (axis_link(levels, size, stride) for size, stride in zip(shape, strides, strict=True))
    real = [axis for axis, size in enumerate(shape) if size > 1]
    every = (axes for count in range(2, len(real) + 1) for axes in combinations(real, count))
    groups = ((axes, link) for axes in every if (link := group_link(levels, shape, axes)) is not None)
    return MeshLinks(shape, tuple(links), tuple(groups))


def group_link(levels: tuple[Level, ...], shape: tuple[int, ...], axes: tuple[int, ...]) -> Link | None:
    """What several axes of a mesh of `shape` are together; None if a collective over them goes axis by axis."""
    size = math.prod(shape[axis] for axis in axes)
    strides = [math.prod(shape[axis + 1 :]) for axis in axes]
    if axes == tuple(range(axes[0], axes[-1] + 1)):
        return axis_link(levels, size, strides[-1])
    if levels[-1].kind == "shared-memory":
        return cpu_link(levels[-1].sizes[0], size)
    pieces = [p for axis, stride in zip(axes, strides, strict=True) for p in axis_pieces(levels, shape[axis], stride)]
    one_dim_each = len({piece.dim for piece in pieces}) == len(pieces)
    if one_dim_each and all(piece.level.kind == "torus" and piece.aligned for piece in pieces):
        return _link(size, tuple(pieces))
    return None


def axis_pieces(levels: tuple[Level, ...], size: int, stride: int) -> tuple[Piece, ...]:
    """The pieces of topology dims that an axis of `size` devices, `stride` apart, covers; outermost first.

    All are aligned, or none is; then they say how many coordinates of each dim one group can touch.
    """
    pieces, aligned = [], True
    inner = math.prod(topology_dims(levels))
    for level in levels:
        for dim, extent in enumerate(level.sizes):
            inner //= extent
            low, high = max(stride, inner), min(stride * size, inner * extent)
            if low < high:
                aligned &= low % inner == 0 and high % low == 0 and inner * extent % high == 0
                pieces.append(Piece(level, dim, high // low, low // inner, True))
    if aligned and math.prod(piece.size for piece in pieces) == size:
        return tuple(pieces)
    return _crossing_pieces(levels, size, stride)


def _crossing_pieces(levels: tuple[Level, ...], size: int, stride: int) -> tuple[Piece, ...]:
    """`axis_pieces` of an axis that does not divide the topology's dims, by looking at all its groups."""
    dims = topology_dims(levels)
    groups = np.arange(math.prod(dims)).reshape(-1, size, stride)
    extents = [(level, dim) for level in levels for dim in range(len(level.sizes))]
    pieces = []
    for index, coordinates in enumerate(np.unravel_index(groups, dims)):
        level, dim = extents[index]
        touched = int(1 + (np.diff(np.sort(coordinates, axis=1), axis=1) != 0).sum(axis=1).max())
        apart = min(dims[index], -(-stride // math.prod(dims[index + 1 :])))
        if touched > 1:
            pieces.append(Piece(level, dim, touched, apart, False))
    return tuple(pieces)


def axis_link(levels: tuple[Level, ...], size: int, stride: int) -> Link:
    """The link of one mesh axis of `size` devices, `stride` apart in the topology's row-major order."""
    if size == 1:
        return Link(1, math.inf, math.inf, math.inf, 0.0, 0.0, 0.0, False, "one device")
    if levels[-1].kind == "shared-memory":
        return cpu_link(levels[-1].sizes[0], size)
    return _link(size, axis_pieces(levels, size, stride))


def _link(size: int, pieces: tuple[Piece, ...]) -> Link:
    aligned = all(piece.aligned for piece in pieces)
    if aligned:
        rates = _inside([piece for piece in pieces if piece.level.kind != "network"])
        for piece in reversed([piece for piece in pieces if piece.level.kind == "network"]):
            rates = _across(piece, rates, size)
    else:
        rates = _crossing(pieces, size)
    description = ", ".join(_describe(piece) for piece in pieces)
    fraction = (size - 1) / size
    return Link(
        size=size,
        bytes_per_s=fraction / rates.gather_s_per_byte,
        exchange_bytes_per_s=fraction / rates.exchange_s_per_byte,
        shift_bytes_per_s=1 / rates.shift_s_per_byte,
        base_latency_s=rates.base_latency_s,
        latency_s=rates.latency_s,
        gather_latency_s=rates.gather_latency_s,
        wraps=len(pieces) == 1 and pieces[0].ring,
        description=description if aligned else f"{description} (not aligned with the wiring)",
        torus=_whole_torus(pieces),
        extents=tuple(piece.size for piece in pieces),
    )


def _whole_torus(pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    """The sizes above 1 of the dims of a torus that an axis covers alone and whole."""
    level = pieces[0].level
    dims = tuple(size for size in level.sizes if size > 1)
    alone = level.kind == "torus" and all(piece.level is level for piece in pieces)
    return dims if alone and math.prod(piece.size for piece in pieces) == math.prod(dims) else ()


def _crossing(pieces: tuple[Piece, ...], size: int) -> _Rates:
    """Rates of an axis that does not divide the dims: one one-way chain over the slowest wire it meets."""
    wire_s = max(piece.stride_on_wire / piece.level.bytes_per_s for piece in pieces)
    gather_s = (size - 1) / size * wire_s
    line = max(piece.size for piece in pieces) if any(piece.level.kind == "torus" for piece in pieces) else 0
    latency_s = max(piece.level.latency_s * piece.stride_on_wire for piece in pieces)
    return _Rates(
        gather_s_per_byte=gather_s,
        exchange_s_per_byte=max(gather_s, line * wire_s / 4),
        shift_s_per_byte=wire_s,
        base_latency_s=max(piece.level.base_latency_s for piece in pieces),
        latency_s=latency_s,
        gather_latency_s=latency_s * (size - 1),
    )


def _inside(pieces: list[Piece]) -> _Rates:
    """Rates of the part of an axis inside one slice, host or machine."""
    if not pieces:
        return _NOTHING
    return _torus(pieces) if pieces[0].level.kind == "torus" else _switch(pieces[0])


def _torus(pieces: list[Piece]) -> _Rates:
    level = pieces[0].level
    link_s = 1 / level.bytes_per_s
    size = math.prod(piece.size for piece in pieces)
    directions = sum((2 if piece.ring else 1) / piece.stride for piece in pieces)
    gather_s = (size - 1) / size * link_s / directions
    bisection_s = max(p.size * p.stride * link_s / (8 if p.ring else 4) for p in pieces)
    hops = [p.stride * (p.size // 2 if p.ring else p.size - 1) for p in pieces]
    return _Rates(
        gather_s_per_byte=gather_s,
        exchange_s_per_byte=max(gather_s, bisection_s),
        shift_s_per_byte=link_s * max(p.stride for p in pieces),
        base_latency_s=level.base_latency_s,
        latency_s=level.latency_s * max(p.stride for p in pieces),
        gather_latency_s=level.latency_s * sum(hops),
    )


def _switch(piece: Piece) -> _Rates:
    level = piece.level
    small = (rate for largest, rate in level.small_group_rates if piece.size <= largest)
    rate = next(small, level.bytes_per_s)
    gather_s = (piece.size - 1) / piece.size / rate
    steps_s = level.latency_s * (piece.size - 1)
    return _Rates(gather_s, gather_s, 1 / rate, level.base_latency_s, level.latency_s, steps_s)


def _across(piece: Piece, inside: _Rates, size: int) -> _Rates:
    """Rates of an axis of `size` devices that spans `piece.size` hosts, with `inside` in each.

    Over the network a collective takes ceil(log2 h) steps: NCCL's trees (all-reduce, since 2.4) and PAT
    (all-gather and reduce-scatter, since 2.23), whose volume is that of a ring.
    """
    level, hosts = piece.level, piece.size
    per_host = size // hosts
    port_s = 1 / level.bytes_per_s
    remote = (hosts - 1) / hosts
    gather_s = remote * port_s / per_host
    exchange_s = remote * port_s
    at_once = level.pipelined
    return _Rates(
        gather_s_per_byte=_combine(gather_s, inside.gather_s_per_byte, at_once),
        exchange_s_per_byte=_combine(exchange_s, inside.exchange_s_per_byte, at_once),
        shift_s_per_byte=max(port_s, inside.shift_s_per_byte),
        base_latency_s=max(level.base_latency_s, inside.base_latency_s),
        latency_s=max(level.latency_s, inside.latency_s),
        gather_latency_s=inside.gather_latency_s + level.latency_s * math.ceil(math.log2(hosts)),
    )


def _combine(outer_s: float, inner_s: float, at_once: bool) -> float:
    return max(outer_s, inner_s) if at_once else outer_s + inner_s


def _describe(piece: Piece) -> str:
    level = piece.level
    if level.kind != "torus":
        return f"{level.name} ({piece.size} of {level.sizes[0]})"
    part = f"{piece.size} of {level.sizes[piece.dim]}" if not piece.whole else f"{piece.size}"
    form = "ring" if piece.ring else "line"
    apart = f", stride {piece.stride}" if piece.stride > 1 else ""
    return f"{level.name} torus dim {piece.dim} ({part}, {form}{apart})"
