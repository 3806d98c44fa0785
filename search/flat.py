"""A problem as flat arrays, for passes that are vectorised over many nodes at once.

All strategies lie in a row of K (node i's are first[i] .. first[i + 1]). An edge is two arcs, each seen from its own
end: arc a's table holds, for every distinct row of its own end, the costs at the other end's distinct rows, so that
a minimum over the other end is one over neighbours in memory. An arc's slots are its own end's strategies. Nodes
are ordered by levels in which no two are neighbours; arcs lie by direction and level, so that a level is a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import networkx as nx
import numpy as np
import scipy.sparse as sp

from .model import base_model, zero_table
from .problem import Problem
from .tables import Table, align, compress


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ...: int64 [sum of lengths]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + lengths, lengths)


def first_of(lengths: np.ndarray) -> np.ndarray:
    """Where each of some pieces in a row begins, and where the last ends: int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Arcs:
    """Both directions of every edge, by (direction, level, own node). All int64.

    own, other: [A]; twin: [A], the same edge's other arc; once: [E], one arc of every edge; entry: [A + 1], where each
    table begins; wide: [A], its columns (the other end's classes); slot: [A + 1], where its own end's strategies begin.
    dest: [slots], strategy of each slot; row: [slots], where its row of the table begins; column: [slots], its class
    as the twin's column; owner: [slots], the arc.
    sorted_slots: [slots], per arc the twin's slots by class; held: [H + 1], per arc and class of the other end where
    those begin; held_first: [A + 1].
    """

    own: np.ndarray
    other: np.ndarray
    twin: np.ndarray
    once: np.ndarray
    entry: np.ndarray
    wide: np.ndarray
    slot: np.ndarray
    dest: np.ndarray
    row: np.ndarray
    column: np.ndarray
    owner: np.ndarray
    sorted_slots: np.ndarray
    held: np.ndarray
    held_first: np.ndarray


class Costs(NamedTuple):
    """unary: [K]; pairs: the entries of all arcs' tables; constant: what every choice pays."""

    unary: np.ndarray
    pairs: np.ndarray
    constant: float


class Flat:
    """The arrays of one problem; `cap` stands for what is not allowed.

    first: [N + 1]; edges: [E, 2]; neighbours: per node; level: [N]; sorted_first: [A + 1], where each arc's
    sorted_slots begin. `unary` and `pairs` are the costs at no price.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.first = first_of(problem.num_strategies)
        self.edges, tables = _edges(problem)
        graph = nx.empty_graph(problem.num_nodes)
        graph.add_edges_from(self.edges.tolist())
        self.neighbours = [list(graph[i]) for i in graph]
        level = nx.greedy_color(graph, strategy="largest_first")
        self.level = np.array([level[i] for i in graph], dtype=np.int64)
        self.arcs, cores = _arcs(self.edges, tables, self.level, self.first)
        self.sorted_first = first_of(np.diff(self.arcs.slot)[self.arcs.twin])
        self.cap = _cap(problem, [parts[0] for parts in cores])
        unary, pairs = _joined(list(problem.node_costs)), _joined([parts[0].reshape(-1) for parts in cores])
        self._forbidden = np.flatnonzero(~np.isfinite(unary)), np.flatnonzero(~np.isfinite(pairs))
        unary[self._forbidden[0]] = pairs[self._forbidden[1]] = self.cap
        self.unary, self.pairs = unary, pairs
        self._most_saved = np.array([np.ptp(buffer.usage) for buffer in problem.buffers])
        self._node_use, self._edge_use = _uses(problem, self.first, self.arcs, cores)

    def priced(self, price: np.ndarray) -> Costs:
        """The costs  cost + price @ (use - limits), price: [R] per byte."""
        used = price > 0
        if not used.any():
            return Costs(self.unary, self.pairs, self.problem.offset)
        weights = self.problem.weigh(price)
        constant = self.problem.offset - float(price[used] @ self.problem.limits[used])
        unary, pairs = self.unary + self._node_use @ weights, self.pairs
        if self._edge_use is not None:
            pairs = pairs + self._edge_use @ weights
        if len(self._forbidden[0]) or len(self._forbidden[1]):
            saved = float(weights @ self._most_saved)  # what is not allowed must stay dearer than all it can save
            unary[self._forbidden[0]] += saved
            pairs = pairs.copy() if pairs is self.pairs else pairs
            pairs[self._forbidden[1]] += saved
        return Costs(unary, pairs, constant)

    def rows_bytes(self, choice: np.ndarray) -> np.ndarray:
        """Bytes at every row under a choice, [R]."""
        sizes = self._node_use.T @ _marked(len(self.unary), self.first[:-1] + choice)
        if self._edge_use is not None:
            sizes = sizes + self._edge_use.T @ _marked(len(self.pairs), self.taken_pairs(choice)[self.arcs.once])
        return self.problem.live @ sizes

    def taken_pairs(self, choice: np.ndarray) -> np.ndarray:
        """The entry of `pairs` that every arc takes under a choice, [A]."""
        own = self.arcs.slot[:-1] + choice[self.arcs.own]
        return self.arcs.row[own] + self.arcs.column[own[self.arcs.twin]]

    def cost(self, choice: np.ndarray, costs: Costs) -> float:
        """What a choice costs."""
        total = costs.constant + costs.unary[self.first[:-1] + choice].sum()
        return float(total + costs.pairs[self.taken_pairs(choice)[self.arcs.once]].sum())


def _marked(count: int, places: np.ndarray) -> np.ndarray:
    out = np.zeros(count)
    out[places] = 1.0
    return out


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)


def argmin_pieces(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The place of the least value within each piece values[first[i]:first[i + 1]], the first of equals. [n]"""
    lengths = np.diff(first)
    least = np.repeat(np.minimum.reduceat(values, first[:-1]), lengths) if len(lengths) else values
    hits = np.flatnonzero(values == least)[::-1]
    piece = np.repeat(np.arange(len(lengths)), lengths)[hits]
    place = np.zeros(len(lengths), dtype=np.int64)
    place[piece] = hits - first[piece]  # of several writes the last one stays: the first of equals
    return place


def _edges(problem: Problem) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]]:
    """Pairs [E, 2] with u < v, and for each the classes of both ends, the costs over them, and buffers' bytes."""
    base = base_model(problem)
    tables = {(u, v): t for (u, v), t in zip(base.edges.tolist(), base.tables, strict=True)}
    uses: dict[tuple[int, int], list[Table]] = {}
    for buffer in problem.buffers:
        if buffer.edge is not None:
            u, v = problem.edge_nodes[buffer.edge].tolist()
            key, table = ((u, v), compress(buffer.usage)) if u < v else ((v, u), compress(buffer.usage).T)
            uses.setdefault(key, []).append(table)
            tables.setdefault(key, zero_table(*table.shape))
    return (
        np.array(list(tables), dtype=np.int64).reshape(-1, 2),
        [align([table, *uses.get(key, ())]) for key, table in tables.items()],
    )


def _cap(problem: Problem, cores: list[np.ndarray]) -> float:
    """A cost that no allowed choice reaches by what it pays for nodes and edges above their least."""
    spread = least = 0.0
    for costs in (*problem.node_costs, *cores):
        finite = costs[np.isfinite(costs)]
        if finite.size:
            spread += float(finite.max() - finite.min())
            least = max(least, abs(float(finite.min())))
    return least + spread + 1e-300


def _arcs(
    pairs: np.ndarray,
    tables: list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]],
    level: np.ndarray,
    first: np.ndarray,
) -> tuple[Arcs, list[np.ndarray]]:
    """The arcs, and every one's tables [classes, classes of the other end]: its costs, then buffers' bytes."""
    own, other = pairs.reshape(-1), pairs[:, ::-1].reshape(-1)
    order = np.lexsort((own, level[own], level[other] > level[own]))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    own, other, twin = own[order], other[order], place[order ^ 1]
    classes, cores = [], []
    for a in order.tolist():
        rows, cols, parts = tables[a >> 1]
        classes.append(cols if a & 1 else rows)
        cores.append([part.T if a & 1 else part for part in parts])
    shape = np.array([parts[0].shape for parts in cores], dtype=np.int64).reshape(-1, 2)
    entry, slots = first_of(shape[:, 0] * shape[:, 1]), np.diff(first)[own]
    slot, column = first_of(slots), np.concatenate([np.zeros(0, dtype=np.int64), *classes])
    owner = np.repeat(np.arange(len(own)), slots)
    by_class = [np.argsort(c, kind="stable") for c in classes]
    counts = [np.bincount(c) for c in classes]
    held_first = first_of(shape[:, 1])
    held = [slot_ + first_of(counts[t])[:-1] for slot_, t in zip(first_of(slots[twin]), twin.tolist(), strict=False)]
    nothing = [np.zeros(0, dtype=np.int64)]
    return Arcs(
        own=own,
        other=other,
        twin=twin,
        once=np.flatnonzero(twin > np.arange(len(twin))),
        entry=entry,
        wide=shape[:, 1],
        slot=slot,
        dest=ranges(first[own], slots),
        row=entry[owner] + column * shape[owner, 1],
        column=column,
        owner=owner,
        sorted_slots=np.concatenate(nothing + [slot[t] + by_class[t] for t in twin.tolist()]),
        held=np.concatenate(nothing + held),
        held_first=held_first,
    ), cores


def _uses(
    problem: Problem, first: np.ndarray, arcs: Arcs, cores: list[list[np.ndarray]]
) -> tuple[sp.csr_array, sp.csr_array | None]:
    """Bytes of every buffer by strategy, [K, B], and by entry of the arcs' tables (None: no edge has any)."""
    edge_buffers: dict[tuple[int, int], list[int]] = {}
    node_parts = []
    for b, buffer in enumerate(problem.buffers):
        if buffer.node is None:
            u, v = sorted(problem.edge_nodes[buffer.edge].tolist())
            edge_buffers.setdefault((u, v), []).append(b)
        else:
            node_parts.append((first[buffer.node], b, buffer.usage))
    node_use = _incidence(node_parts, int(first[-1]), len(problem.buffers))
    if not edge_buffers:
        return node_use, None
    parts = []
    for a, (u, v) in enumerate(zip(arcs.own.tolist(), arcs.other.tolist(), strict=True)):
        for b, use in zip(edge_buffers.get((min(u, v), max(u, v)), ()), cores[a][1:], strict=True):
            parts.append((arcs.entry[a], b, use.reshape(-1)))
    return node_use, _incidence(parts, int(arcs.entry[-1]), len(problem.buffers))


def _incidence(parts: list[tuple[int, int, np.ndarray]], rows: int, columns: int) -> sp.csr_array:
    """The matrix [rows, columns] of some pieces (first row, column, values)."""
    lengths = np.array([len(use) for _, _, use in parts], dtype=np.int64)
    at = ranges(np.array([start for start, _, _ in parts], dtype=np.int64), lengths)
    column = np.repeat(np.array([b for _, b, _ in parts], dtype=np.int64), lengths)
    return sp.csr_array((_joined([use for _, _, use in parts]), (at, column)), shape=(rows, columns))
