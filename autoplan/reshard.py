"""Resharding: the collectives that take a value from one layout to another, and their time.

`steps` is the one description of a reshard; costs (`reshard_time_s`) and reports (`collectives_between`)
both read it. The order keeps payloads small: slices first (free), then reduce-scatters, all-reduces,
all-to-alls, and all-gathers last. `path` gives the layouts between.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from . import layouts
from .cost_models import DeviceSpec, Link, MeshLinks, collective_time_s, wire_bytes
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
    """One collective over one axis for all pairs of layouts `[n, m]` for which `applies`."""

    kind: str
    axis: int
    applies: np.ndarray
    payload_bytes: np.ndarray


class Transfer(NamedTuple):
    """One collective of one reshard, over one or several axes."""

    kind: str
    axes: tuple[int, ...]
    wire_bytes: float
    time_s: float


def steps(full_bytes: float, before: np.ndarray, after: np.ndarray, machine: Machine) -> Iterator[Step]:
    """The collectives between each layout of `before` `[n, axes]` and each of `after` `[m, axes]`, in order."""
    sizes = machine.shape
    p, q = before[:, None, :].astype(np.int8), after[None, :, :].astype(np.int8)
    p, q = np.broadcast_arrays(p, q)
    axes = range(len(sizes))
    local = np.broadcast_to((full_bytes / layouts.parts(before, sizes))[:, None], p.shape[:2])
    # 1. Slices, and sums that are completed onto a dim. XLA:CPU forms no reduce-scatters: it reduces, then slices.
    scatter_kind = "all-reduce" if machine.device.platform == "cpu" else "reduce-scatter"
    first = _after_slices(p, q)
    for a in axes:
        local = local / np.where((p[..., a] == WHOLE) & (q[..., a] >= 0), sizes[a], 1)
    for a in axes:
        scatter = (p[..., a] < WHOLE) & (q[..., a] >= 0)
        yield Step(scatter_kind, a, scatter, local)
        local = local / np.where(scatter, sizes[a], 1)
    share = local
    for a in sorted(axes, key=lambda a: -machine.links[a].bytes_per_s):
        # Over several axes: reduce-scatter down the fast axes, all-reduce the rest, all-gather back up.
        reduce = (p[..., a] < WHOLE) & (q[..., a] == WHOLE)
        yield Step("all-reduce", a, reduce, share)
        share = share / np.where(reduce, sizes[a], 1)
    yield from _permutes(p, first, local, axes)
    # 2. Axes that move from one dim to another, group by group.
    for now, then in _moves(first, q):
        for a in axes:
            moves = then[..., a] != now[..., a]
            payload = local
            for other in range(a):  # those that move together are one all-to-all
                payload = payload / np.where(moves & (then[..., other] != now[..., other]), sizes[other], 1)
            yield Step("all-to-all", a, moves, payload)
        yield from _permutes(now, then, local, axes)
        first = then
    # 3. Gathers; blocks change places before, when they are small.
    yield from _permutes(first, q, local, axes)
    for a in reversed(axes):
        gather = (first[..., a] >= 0) & (q[..., a] == WHOLE)
        local = local * np.where(gather, sizes[a], 1)
        yield Step("all-gather", a, gather, local)


def path(before: Sequence[int], after: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The layouts on the way from `before` to `after`, the last being `after`.

    Asked for one after another, the partitioner makes the collectives of `steps`; asked for the last alone, it
    may gather the whole value.
    """
    p, q = np.array(before, np.int8), np.array(after, np.int8)
    way = [p, _after_slices(p, q)]
    way += [then for _, then in _moves(way[-1], q)]
    way = [tuple(layout.tolist()) for layout in (*way, q)]
    return tuple(layout for last, layout in zip(way, way[1:]) if layout != last)


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
        yield Step("collective-permute", a, moved & ~already, local)
        already |= moved


def impossible(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Pairs `[n, m]` with no reshard: a pending sum cannot be made from a finished value."""
    p, q = before[:, None, :], after[None, :, :]
    return ((q < WHOLE) & (p != q)).any(axis=-1)


def reshard_time_s(full_bytes: float, before: np.ndarray, after: np.ndarray, machine: Machine,
                   unit_steps: Sequence[Step] | None = None) -> np.ndarray:
    """Seconds from each layout of `before` `[n, axes]` to each of `after` `[m, axes]`; inf if impossible.

    `unit_steps` are the `steps` of one byte, where they are known already.
    """
    time_s = np.zeros((len(before), len(after)))
    for step in applying_steps(before, after, machine) if unit_steps is None else unit_steps:
        link, size = machine.links[step.axis], machine.shape[step.axis]
        time_s[step.applies] += collective_time_s(step.kind, link, size, full_bytes * step.payload_bytes[step.applies])
    changed = (before[:, None, :] != after[None, :, :]).any(axis=-1)
    # Every reshard also writes its result once.
    written = full_bytes / layouts.parts(after, machine.shape) / machine.device.memory_bytes_per_s
    time_s += np.where(changed, written[None, :], 0.0)
    return np.where(impossible(before, after), np.inf, time_s)


def applying_steps(before: np.ndarray, after: np.ndarray, machine: Machine) -> tuple[Step, ...]:
    """The `steps` of one byte that any pair of layouts takes."""
    return tuple(step for step in steps(1.0, before, after, machine) if step.applies.any())


def collectives_between(full_bytes: float, before: Sequence[int], after: Sequence[int], machine: Machine
                        ) -> list[Transfer]:
    """The collectives of one reshard; those of one kind are one collective over several axes."""
    found: dict[str, list[Step]] = {}
    for step in steps(full_bytes, np.array([before]), np.array([after]), machine):
        if step.applies[0, 0]:
            found.setdefault(step.kind, []).append(step)
    out = []
    for kind, same in found.items():
        sent = sum(float(wire_bytes(kind, machine.shape[s.axis], s.payload_bytes[0, 0])) for s in same)
        time = sum(float(collective_time_s(kind, machine.links[s.axis], machine.shape[s.axis], s.payload_bytes[0, 0]))
                   for s in same)
        out.append(Transfer(kind, tuple(sorted(s.axis for s in same)), sent, time))
    return out
