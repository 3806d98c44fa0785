"""Moves on connected pieces: all nodes of an induced forest at once, exactly, the others as they are.

The largest neighbourhood that a linear pass can search: dynamic programming over the trees of a random forest that
holds about half of the nodes (for grids: F. Hamze, N. de Freitas, "From fields to trees", 2004). Never worse than
the choice given, and with another forest every time hard to satisfy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .flat import Costs, Flat, argmin_pieces, first_of, ranges


@dataclass(frozen=True, eq=False)
class _Tier:
    """Nodes whose subtrees are done together, each below one parent.

    strategies: [k], the nodes' own, each node's from `first` [n + 1] on. Up: sorted_strategies, by class, classes
    from held_first on; `entries` of the parents' tables, each met by class held_of, rows from entry_first on;
    parent_strategies take the minima row_of. Down: a strategy's costs are in the table from `rows` [k] on, in the
    column that slot parent_slot + choice[parent] has.
    """

    nodes: np.ndarray
    strategies: np.ndarray
    first: np.ndarray
    sorted_strategies: np.ndarray
    held_first: np.ndarray
    entries: np.ndarray
    held_of: np.ndarray
    entry_first: np.ndarray
    row_of: np.ndarray
    parent_strategies: np.ndarray
    parent: np.ndarray
    parent_slot: np.ndarray
    rows: np.ndarray


class Forest:
    """One induced forest of a Flat, ready to be used with any costs. nodes: those in it, ascending."""

    def __init__(self, flat: Flat, rng: np.random.Generator) -> None:
        self.flat = flat
        arcs = flat.arcs
        inside = _random_forest(flat, rng)
        self.nodes = np.flatnonzero(inside)
        self._outward = np.flatnonzero(inside[arcs.own] & ~inside[arcs.other])
        lengths = np.diff(arcs.slot)[self._outward]
        slots = ranges(arcs.slot[self._outward], lengths)
        self._arc_of = np.repeat(np.arange(len(self._outward)), lengths)
        self._dest, self._row = arcs.dest[slots], arcs.row[slots]
        self._tiers, self._roots = _tiers(flat, inside)
        sizes = np.diff(flat.first)[self._roots]
        self._root_strategies, self._root_first = ranges(flat.first[self._roots], sizes), first_of(sizes)

    def improve(self, choice: np.ndarray, costs: Costs) -> np.ndarray:
        """The cheapest choice among those that differ from `choice` ([N]) within the forest only."""
        arcs, (unary, pairs, _) = self.flat.arcs, costs
        taken = arcs.column[arcs.slot[arcs.twin[self._outward]] + choice[arcs.other[self._outward]]]
        theta = unary + np.bincount(self._dest, pairs[self._row + taken[self._arc_of]], len(unary))
        for tier in self._tiers:
            low = np.minimum.reduceat(theta[tier.sorted_strategies], tier.held_first)
            message = np.minimum.reduceat(pairs[tier.entries] + low[tier.held_of], tier.entry_first)
            np.add.at(theta, tier.parent_strategies, message[tier.row_of])
        choice = choice.copy()
        choice[self._roots] = argmin_pieces(theta[self._root_strategies], self._root_first)
        for tier in reversed(self._tiers):
            column = arcs.column[tier.parent_slot + choice[tier.parent]]
            cost = theta[tier.strategies] + pairs[tier.rows + np.repeat(column, np.diff(tier.first))]
            choice[tier.nodes] = argmin_pieces(cost, tier.first)
        return choice


def _random_forest(flat: Flat, rng: np.random.Generator) -> np.ndarray:
    """A maximal set of nodes, bool [N], that induces no cycle."""
    count = len(flat.first) - 1
    around: list[list[int]] = flat.neighbours
    root = [-1] * count

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i in rng.permutation(count).tolist():
        tops = [find(j) for j in around[i] if root[j] >= 0]
        if len(tops) < 2 or len(set(tops)) == len(tops):
            root[i] = i
            for top in tops:
                root[top] = i
    return np.array(root) >= 0


def _tiers(flat: Flat, inside: np.ndarray) -> tuple[list[_Tier], np.ndarray]:
    """Leaves, then what is a leaf without them, and so on; and the nodes left, one of each tree."""
    arcs = flat.arcs
    left = np.flatnonzero(inside[arcs.own] & inside[arcs.other])  # arcs within, both directions
    degree = np.bincount(arcs.own[left], minlength=len(inside))
    tiers, done = [], ~inside
    while len(left):
        own, other = arcs.own[left], arcs.other[left]
        leaf = (degree[own] == 1) & ((degree[other] > 1) | (own < other))
        tiers.append(_tier(flat, left[leaf]))
        done[own[leaf]] = True
        degree = degree - np.bincount(other[leaf], minlength=len(inside))
        left = left[~(done[own] | done[other])]
    return tiers, np.flatnonzero(~done)


def _tier(flat: Flat, children: np.ndarray) -> _Tier:
    """children: arcs from the nodes to their parents."""
    arcs, first = flat.arcs, flat.first
    sizes = np.diff(first)
    nodes, up = arcs.own[children], arcs.twin[children]
    wide = arcs.wide[up]
    rows = np.diff(arcs.entry)[up] // wide
    held_first = first_of(wide)
    child_slots, parent_slots = sizes[nodes], sizes[arcs.own[up]]
    begin = first_of(child_slots)
    sorted_first = flat.sorted_first[up]
    held = ranges(arcs.held_first[up], wide)
    return _Tier(
        nodes=nodes,
        strategies=ranges(first[nodes], child_slots),
        first=begin,
        sorted_strategies=arcs.dest[arcs.sorted_slots[ranges(sorted_first, child_slots)]],
        held_first=arcs.held[held] - np.repeat(sorted_first - begin[:-1], wide),
        entries=ranges(arcs.entry[up], rows * wide).astype(np.int32),
        held_of=ranges(np.repeat(held_first[:-1], rows), np.repeat(wide, rows)).astype(np.int32),
        entry_first=first_of(np.repeat(wide, rows))[:-1],
        row_of=np.repeat(first_of(rows)[:-1], parent_slots) + arcs.column[ranges(arcs.slot[up], parent_slots)],
        parent_strategies=ranges(first[arcs.own[up]], parent_slots),
        parent=arcs.own[up],
        parent_slot=arcs.slot[up],
        rows=arcs.row[ranges(arcs.slot[children], child_slots)],
    )
