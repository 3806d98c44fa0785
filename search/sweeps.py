"""Dual ascent over whole levels of nodes at a time: the method of ascent.py (see there) for large problems.

Nodes of one level are not neighbours, so what a sweep does to each does not depend on the others. A greedy colouring
has few levels (4 or 5 on the contest's instances, where the order of the program has some 900): a sweep is a
handful of passes over the arrays, and its bound is as good after the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .flat import Costs, Flat, argmin_pieces, first_of, ranges


@dataclass(frozen=True, eq=False)
class _Side:
    """The arcs of one level's nodes whose other ends are all before it, or all after it.

    arcs, slots, entries, held: slices of what Arcs has. dest: [slots], strategies as places within the level's.
    entry_first, held_of: rows of the tables begin there, an entry meets that class of the other end; sorted_slots by
    those classes, which begin at held_first; row_of: [slots], the row of each.
    """

    arcs: slice
    slots: slice
    entries: slice
    dest: np.ndarray
    entry_first: np.ndarray
    held_of: np.ndarray
    sorted_slots: np.ndarray
    held_first: np.ndarray
    row_of: np.ndarray


@dataclass(frozen=True, eq=False)
class _Level:
    """Nodes [n] that no edge joins, their strategies (each node's from `first` on), and the share of what a node
    has that it hands to each outgoing arc, by strategy, and keeps itself [n]: forward, backward.
    """

    nodes: np.ndarray
    strategies: np.ndarray
    first: np.ndarray
    before: _Side
    after: _Side
    share: np.ndarray
    kept: tuple[np.ndarray, np.ndarray]


class Sweeps:
    """The messages of a problem. They give a bound at any costs; at the same costs a sweep never lowers it."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.messages = np.zeros(len(flat.arcs.dest))
        self._levels = _levels(flat)

    def sweep(self, costs: Costs, *, forward: bool) -> tuple[float, np.ndarray]:
        """One pass over the levels: (lower bound on what any choice costs, the choice it suggests [N])."""
        messages, total = self.messages, costs.constant
        choice = np.zeros(len(self.flat.first) - 1, dtype=np.int64)
        for level in self._levels if forward else reversed(self._levels):
            into, out = (level.before, level.after) if forward else (level.after, level.before)
            theta = costs.unary[level.strategies]
            theta = theta + np.bincount(out.dest, messages[out.slots], len(theta))
            choice[level.nodes] = argmin_pieces(theta + self._said(into, costs, choice, len(theta)), level.first)
            if len(into.dest):
                held = np.maximum.reduceat(messages[into.sorted_slots], into.held_first)
                least = np.minimum.reduceat(costs.pairs[into.entries] - held[into.held_of], into.entry_first)
                messages[into.slots] = least[into.row_of]
                theta = theta + np.bincount(into.dest, messages[into.slots], len(theta))
            if len(out.dest):
                messages[out.slots] -= (theta * level.share)[out.dest]
            total += float(level.kept[not forward] @ np.minimum.reduceat(theta, level.first[:-1]))
        return total, choice

    def _said(self, side: _Side, costs: Costs, choice: np.ndarray, count: int) -> np.ndarray:
        """What the choices at the other ends cost a level's strategies, [count]."""
        arcs = self.flat.arcs
        column = arcs.column[arcs.slot[arcs.twin[side.arcs]] + choice[arcs.other[side.arcs]]]
        at = arcs.row[side.slots] + column[arcs.owner[side.slots] - side.arcs.start]
        return np.bincount(side.dest, costs.pairs[at], count)


def _levels(flat: Flat) -> list[_Level]:
    arcs, first, level = flat.arcs, flat.first, flat.level
    count, levels = len(level), int(level.max(initial=-1)) + 1
    later = level[arcs.other] > level[arcs.own]
    before, after = (np.bincount(arcs.own[side], minlength=count) for side in (~later, later))
    share = 1.0 / np.maximum(1, np.maximum(before, after))
    place = np.zeros(first[-1], dtype=np.int64)
    out = []
    start = [0, int(np.sum(~later))]
    for n in range(levels):
        nodes = np.flatnonzero(level == n)
        sizes = np.diff(first)[nodes]
        strategies = ranges(first[nodes], sizes)
        place[strategies] = np.arange(len(strategies))
        sides = []
        for side, many in enumerate((before, after)):
            stop = start[side] + int(many[nodes].sum())
            sides.append(_side(flat, slice(start[side], stop), place))
            start[side] = stop
        kept = (1.0 - share[nodes] * after[nodes], 1.0 - share[nodes] * before[nodes])
        out.append(_Level(nodes, strategies, first_of(sizes), *sides, np.repeat(share[nodes], sizes), kept))
    return out


def _side(flat: Flat, part: slice, place: np.ndarray) -> _Side:
    arcs = flat.arcs
    cut = lambda first: slice(int(first[part.start]), int(first[part.stop]))  # noqa: E731
    slots, entries, held, listed = map(cut, (arcs.slot, arcs.entry, arcs.held_first, flat.sorted_first))
    wide = arcs.wide[part]
    rows = np.diff(arcs.entry)[part] // wide
    held_first = arcs.held_first[part] - held.start
    return _Side(
        arcs=part,
        slots=slots,
        entries=entries,
        dest=place[arcs.dest[slots]],
        entry_first=first_of(np.repeat(wide, rows))[:-1],
        held_of=ranges(np.repeat(held_first, rows), np.repeat(wide, rows)),
        sorted_slots=arcs.sorted_slots[listed],
        held_first=arcs.held[held] - listed.start,
        row_of=first_of(rows)[arcs.owner[slots] - part.start] + arcs.column[slots],
    )
