"""Resharding: the collectives that take a value from one layout to another, and their time.

`steps` is the one description of a reshard; costs (`reshard_time_s`) and reports (`collectives_between`)
both read it. The order keeps payloads small: slices first (free), then reduce-scatters, all-to-alls,
all-reduces, and all-gathers last.
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
    axes = range(len(sizes))
    pending = p < WHOLE
    local = np.broadcast_to((full_bytes / layouts.parts(before, sizes))[:, None], (len(before), len(after))).copy()
    for a in axes:
        local /= np.where((p[..., a] == WHOLE) & (q[..., a] >= 0), sizes[a], 1)
    for a in axes:
        scatter = pending[..., a] & (q[..., a] >= 0)
        yield Step("reduce-scatter", a, scatter, local)
        local = local / np.where(scatter, sizes[a], 1)
    for a in axes:
        yield Step("all-to-all", a, (p[..., a] >= 0) & (q[..., a] >= 0) & (p[..., a] != q[..., a]), local)
    share = local
    for a in sorted(axes, key=lambda a: -machine.links[a].bytes_per_s):
        # Over several axes: reduce-scatter down the fast axes, all-reduce the rest, all-gather back up.
        reduce = pending[..., a] & (q[..., a] == WHOLE)
        yield Step("all-reduce", a, reduce, share)
        share = share / np.where(reduce, sizes[a], 1)
    for a in reversed(axes):
        gather = (p[..., a] >= 0) & (q[..., a] == WHOLE)
        local = local * np.where(gather, sizes[a], 1)
        yield Step("all-gather", a, gather, local)
    for a in axes:
        yield Step("collective-permute", a, _misordered(p, q, a), local)


def _misordered(p: np.ndarray, q: np.ndarray, axis: int) -> np.ndarray:
    """Whether `axis` joins or leaves a dim in which a more minor axis stays: blocks then change places."""
    moved = np.zeros(np.broadcast_shapes(p.shape, q.shape)[:2], bool)
    for minor in range(axis + 1, p.shape[-1]):
        stays = (p[..., minor] == q[..., minor]) & (p[..., minor] >= 0)
        leaves = (p[..., axis] == p[..., minor]) & (q[..., axis] != p[..., axis])
        joins = (q[..., axis] == q[..., minor]) & (q[..., axis] != p[..., axis])
        moved |= stays & (leaves | joins)
    return moved


def impossible(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Pairs `[n, m]` with no reshard: a pending sum cannot be made from a finished value."""
    p, q = before[:, None, :], after[None, :, :]
    return ((q < WHOLE) & (p != q)).any(axis=-1)


def reshard_time_s(full_bytes: float, before: np.ndarray, after: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds from each layout of `before` `[n, axes]` to each of `after` `[m, axes]`; inf if impossible."""
    time_s = np.zeros((len(before), len(after)))
    for step in steps(full_bytes, before, after, machine):
        if step.applies.any():
            time_s += np.where(step.applies, collective_time_s(
                step.kind, machine.links[step.axis], machine.shape[step.axis], step.payload_bytes), 0.0)
    changed = (before[:, None, :] != after[None, :, :]).any(axis=-1)
    # Every reshard also writes its result once.
    written = full_bytes / layouts.parts(after, machine.shape) / machine.device.memory_bytes_per_s
    time_s += np.where(changed, written[None, :], 0.0)
    return np.where(impossible(before, after), np.inf, time_s)


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
