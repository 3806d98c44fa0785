"""Resharding: the collectives that take a value from one layout to another, and their time.

`steps` is the one description of a reshard; costs (`reshard_time_s`) and reports (`collectives_between`)
both read it. The order keeps payloads small: slices first (free), then reduce-scatters, all-reduces,
all-to-alls, and all-gathers last. `path` gives the layouts between.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from . import layouts, lowering
from .cost_models import DeviceSpec, Link, MeshLinks, over_axes_s, wire_bytes
from .layouts import WHOLE


@dataclass(frozen=True)
class Machine:
    """One way to see a cluster: its device and the links of a mesh over it."""

    device: DeviceSpec
    mesh: MeshLinks

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mesh.shape

    @property
    def links(self) -> tuple[Link, ...]:
        return self.mesh.links


class Step(NamedTuple):
    """One collective for all pairs of layouts `[n, m]` for which `applies`, over the same axes.

    `scatters` is said of what completes sums onto dims, whatever its kind.
    """

    kind: str
    axes: tuple[int, ...]
    applies: np.ndarray
    payload_bytes: np.ndarray
    scatters: bool = False


class Transfer(NamedTuple):
    """One collective of one reshard. `exposed_s` is the part of `time_s` that the step waits for."""

    kind: str
    axes: tuple[int, ...]
    wire_bytes: float
    time_s: float
    exposed_s: float
    ring: bool


def steps(full_bytes: float, before: np.ndarray, after: np.ndarray, machine: Machine) -> Iterator[Step]:
    """The collectives between each layout of `before` `[n, axes]` and each of `after` `[m, axes]`, in order."""
    sizes = machine.shape
    p, q = before[:, None, :].astype(np.int8), after[None, :, :].astype(np.int8)
    p, q = np.broadcast_arrays(p, q)
    axes = range(len(sizes))
    local = np.broadcast_to((full_bytes / layouts.parts(before, sizes))[:, None], p.shape[:2])
    # 1. Slices, and sums that are completed, onto a dim or everywhere.
    first = _after_slices(p, q)
    for a in axes:
        local = local / np.where((p[..., a] == WHOLE) & (q[..., a] >= 0), sizes[a], 1)
    scatter = (p < WHOLE) & (q >= 0) & ~_joins_above(p, q)
    for group, applies in _groups(scatter):
        onto_one = functools.reduce(np.logical_and, (q[..., a] == q[..., group[0]] for a in group))
        kind = lowering.scatter_kind(machine.device.platform, machine.mesh, group)
        if (applies & onto_one).any():
            yield Step(kind, group, applies & onto_one, local, True)
        if (applies & ~onto_one).any():  # the compilers complete it everywhere, and slice
            yield Step("all-reduce", group, applies & ~onto_one, local)
    for a in axes:
        local = local / np.where(scatter[..., a], sizes[a], 1)
    for group, applies in _groups((p < WHOLE) & (q >= WHOLE) & ~scatter):
        yield Step("all-reduce", group, applies, local)
    for a in axes:
        local = local / np.where((p[..., a] < WHOLE) & (q[..., a] >= 0) & ~scatter[..., a], sizes[a], 1)
    yield from _permutes(p, first, local, axes)
    # 2. Axes that move from one dim to another, group by group.
    for now, then in _moves(first, q):
        for group, applies in _groups(then != now):
            yield Step("all-to-all", group, applies, local)
        yield from _permutes(now, then, local, axes)
        first = then
    # 3. Gathers, dim by dim; blocks change places before, when they are small.
    yield from _permutes(first, q, local, axes)
    gather = (first >= 0) & (q == WHOLE)
    for dim in reversed(range(int(first.max(initial=-1)) + 1)):
        here = gather & (first == dim)
        for a in axes:
            local = local * np.where(here[..., a], sizes[a], 1)
        for group, applies in _groups(here):
            yield Step("all-gather", group, applies, local)


def _groups(moves: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """(axes, the pairs `[n, m]` in which `moves` `[n, m, axes]` holds of these and of no other)."""
    used = [a for a in range(moves.shape[-1]) if moves[..., a].any()]
    for count in range(1, len(used) + 1):
        for group in itertools.combinations(used, count):
            applies = functools.reduce(np.logical_and, (moves[..., a] == (a in group) for a in used))
            if applies.any():
                yield group, applies


def path(before: Sequence[int], after: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The layouts on the way from `before` to `after`, the last being `after`.

    Asked for one after another, the partitioner makes the collectives of `steps`; asked for the last alone, it
    may gather the whole value.
    """
    p, q = np.array(before, np.int8), np.array(after, np.int8)
    way = [p, _after_sums(p, q), _after_slices(p, q)]
    way += [then for _, then in _moves(way[-1], q)]
    way = [tuple(layout.tolist()) for layout in (*way, q)]
    return tuple(layout for last, layout in zip(way, way[1:]) if layout != last)


def _joins_above(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Pending axes that `q` has in a dim that a more minor axis splits: such a sum is completed everywhere first.

    The partitioner, asked for it at once, would gather operands instead.
    """
    joins = np.zeros(p.shape, bool)
    for a in range(p.shape[-1]):
        for minor in range(a + 1, p.shape[-1]):
            joins[..., a] |= (p[..., a] < WHOLE) & (q[..., a] >= 0) & (p[..., minor] == q[..., a])
    return joins


def _after_sums(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """`p`, but where sums are completed everywhere before they are split (`_joins_above`), with all completed."""
    joins = _joins_above(p, q)
    done = np.where(p < WHOLE, np.where(joins, WHOLE, q), p)
    return np.where(joins.any(axis=-1, keepdims=True), done, p)


def _after_slices(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """`p` with its whole and pending axes as `q` wants them."""
    return np.where(p < 0, q, p)


def _moves(p: np.ndarray, q: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(layouts before, layouts after) of each all-to-all that brings the split axes of `p` `[..., axes]` to the dims
    that they split in `q`.

    Axes with the same way go together. The order is such that none has to pass under a more minor one: minor axes
    leave a dim first and join one last; where that cannot be, blocks change places.
    """
    axes = range(p.shape[-1])
    for _ in axes:
        moving = (p >= 0) & (q >= 0) & (p != q)
        if not moving.any():
            return
        mates = (moving[..., :, None] & moving[..., None, :] & (p[..., :, None] == p[..., None, :])
                 & (q[..., :, None] == q[..., None, :]))
        blocked = ~moving
        for a in axes:
            for b in axes:
                passes = (p[..., b] == p[..., a]) | (p[..., b] == q[..., a]) if b > a else \
                    moving[..., b] & (q[..., b] == q[..., a])
                blocked[..., a] |= passes & ~mates[..., a, b]
        blocked = (mates & blocked[..., None, :]).any(axis=-1) | ~moving
        last_free = p.shape[-1] - 1 - np.argmax(~blocked[..., ::-1], axis=-1)
        leader = np.where(blocked.all(axis=-1), np.argmax(moving, axis=-1), last_free)
        chosen = np.take_along_axis(mates, leader[..., None, None], axis=-2)[..., 0, :]
        then = np.where(chosen, q, p)
        yield p, then
        p = then


def _permutes(start: np.ndarray, end: np.ndarray, local: np.ndarray, axes: Sequence[int]) -> Iterator[Step]:
    """Blocks change places, once, where an axis joins or leaves a dim in which a more minor axis stays."""
    already = np.zeros(start.shape[:2], bool)
    for a in axes:
        moved = np.zeros(start.shape[:2], bool)
        changes = end[..., a] != start[..., a]
        for minor in range(a + 1, start.shape[-1]):
            stays = start[..., minor] == end[..., minor]
            leaves = (start[..., a] >= 0) & (start[..., minor] == start[..., a])
            joins = (end[..., a] >= 0) & (end[..., minor] == end[..., a])
            moved |= changes & stays & (leaves | joins)
        yield Step("collective-permute", (a,), moved & ~already, local)
        already |= moved


def impossible(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Pairs `[n, m]` with no reshard: a pending sum cannot be made from a finished value."""
    p, q = before[:, None, :], after[None, :, :]
    return ((q < WHOLE) & (p != q)).any(axis=-1)


class Ring(NamedTuple):
    """Where the compiler sends a pending sum around while it computes it, by strategy of what makes it.

    `dims[s, d]` says whether completing the sum onto dim d is such a ring, and `beside_s[s]` how long computing takes,
    beside which it runs.
    """

    dims: np.ndarray
    beside_s: np.ndarray


def reshard_time_s(full_bytes: float, before: np.ndarray, after: np.ndarray, machine: Machine,
                   unit_steps: Sequence[Step] | None = None, *, hidden: float = 0.0, ring: Ring | None = None
                   ) -> np.ndarray:
    """Seconds that a step waits from each layout of `before` `[n, axes]` to each of `after` `[m, axes]`; inf if
    impossible.

    Args:
      unit_steps: the `steps` of one byte, where they are known already.
      hidden: the share of gathers that runs beside other work.
      ring: of the value, with a row per layout of `before`.
    """
    time_s = np.zeros((len(before), len(after)))
    for step in applying_steps(before, after, machine) if unit_steps is None else unit_steps:
        payload = full_bytes * step.payload_bytes[step.applies]
        wait_s = over_axes_s(step.kind, machine.mesh, step.axes, payload)
        if step.kind == "all-gather":
            wait_s = (1 - hidden) * wait_s
        if ring is not None and step.scatters and lowering.rings(machine.mesh, step.axes):
            round_s = lowering.ring_time_s(machine.mesh, step.axes, payload)
            rows = np.nonzero(step.applies)[0]
            turns = _turns(ring, after, step)
            wait_s = np.where(turns, np.maximum(round_s - ring.beside_s[rows], 0.0), wait_s)
        time_s[step.applies] += wait_s
    changed = (before[:, None, :] != after[None, :, :]).any(axis=-1)
    # Every reshard also writes its result once.
    written = full_bytes / layouts.parts(after, machine.shape) / machine.device.memory_bytes_per_s
    time_s += np.where(changed, written[None, :], 0.0)
    return np.where(impossible(before, after), np.inf, time_s)


def _turns(ring: Ring, after: np.ndarray, step: Step) -> np.ndarray:
    """By pair for which a scattering step applies: whether it is a ring."""
    rows, columns = np.nonzero(step.applies)
    return np.logical_and.reduce([ring.dims[rows, after[columns, a]] for a in step.axes])


def applying_steps(before: np.ndarray, after: np.ndarray, machine: Machine) -> tuple[Step, ...]:
    """The `steps` of one byte that any pair of layouts takes."""
    return tuple(step for step in steps(1.0, before, after, machine) if step.applies.any())


def collectives_between(full_bytes: float, before: Sequence[int], after: Sequence[int], machine: Machine, *,
                        hidden: float = 0.0, ring: Ring | None = None) -> list[Transfer]:
    """The collectives of one reshard, in order. `ring` has one row."""
    p, q = np.array([before]), np.array([after])
    out = []
    for step in steps(full_bytes, p, q, machine):
        if not step.applies[0, 0]:
            continue
        payload = float(step.payload_bytes[0, 0])
        turns = ring is not None and step.scatters and lowering.rings(machine.mesh, step.axes) \
            and bool(_turns(ring, q, step)[0])
        if turns:
            time_s = float(lowering.ring_time_s(machine.mesh, step.axes, payload))
            sent, exposed_s = lowering.ring_bytes(machine.mesh, step.axes, payload), time_s - float(ring.beside_s[0])
            out.append(Transfer("collective-permute", step.axes, float(sent), time_s, max(exposed_s, 0.0), True))
            continue
        time_s = float(over_axes_s(step.kind, machine.mesh, step.axes, payload))
        size = math.prod(machine.shape[a] for a in step.axes)
        sent, exposed_s = float(wire_bytes(step.kind, size, payload)), time_s
        if step.kind == "all-gather":
            exposed_s *= 1 - hidden
        out.append(Transfer(step.kind, step.axes, sent, time_s, exposed_s, False))
    return out
