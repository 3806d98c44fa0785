"""Nodes that have no choice of their own, taken out exactly: one strategy left, or a neighbour decides.

Where every strategy a of node u allows a single strategy f(a) of node v, then v joins u: its costs, buffers and
edges are read through f. Programs for large meshes are full of that (what an operation's layout makes of its
result), and the nodes left are those that choose. On the way parallel edges are merged, strategies without an
allowed partner dropped, and edges whose costs are one part for each end joined to the nodes' costs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from .live import Intervals
from .problem import ROW_TOLERANCE, Buffer, Problem

# An edge's costs count as one part for each end when they differ from that by this share of the largest.
SEPARABLE_TOLERANCE = 1e-13


@dataclass(frozen=True, eq=False)
class Contraction:
    """A smaller problem with the same optimum, and the way back.

    owner: int64 [N], the node of `problem` that decides node i, -1 for one that is decided already; maps: per node
    of the larger problem its strategy by its owner's, int64 [S_owner] ([1] when decided); rows: the larger problem's
    memory rows that are left. infeasible: why nothing is allowed, or None (`problem` is empty then).
    """

    problem: Problem
    owner: np.ndarray
    maps: tuple[np.ndarray, ...]
    rows: np.ndarray
    infeasible: str | None = None

    def lift(self, choice: np.ndarray) -> np.ndarray:
        """A choice of the smaller problem as one of the larger: [n] -> [N]."""
        decided = np.append(choice, 0)[self.owner].tolist()
        return np.array([m[k] for m, k in zip(self.maps, decided, strict=True)], dtype=np.int64)

    def project(self, choice: np.ndarray) -> np.ndarray:
        """The nearest choice of the smaller problem, [N] -> [n]: an owner takes what agrees with most nodes."""
        votes = [np.zeros(len(c), dtype=np.int64) for c in self.problem.node_costs]
        for owner, strategies, taken in zip(self.owner.tolist(), self.maps, choice.tolist(), strict=True):
            if owner >= 0:
                votes[owner] += strategies == taken
        return np.array([int(v.argmax()) for v in votes], dtype=np.int64)


def contract(problem: Problem) -> Contraction:
    """The problem over the nodes that choose. Deterministic."""
    work = _Work(problem)
    try:
        work.run()
    except _Deadlock as reason:
        nothing = np.zeros(0, dtype=np.int64)
        return Contraction(Problem((), np.zeros((0, 2)), ()), nothing, (), nothing, str(reason))
    owner, maps = work.ways_back()
    kept = np.flatnonzero(work.parent == np.arange(problem.num_nodes))
    place = np.full(problem.num_nodes + 1, -1)
    place[kept] = np.arange(len(kept))
    owner = place[owner]
    memory = _gather(problem, owner, maps)
    edges = {(int(place[u]), int(place[v])): m for u in kept.tolist() for v, m in work.around[u].items() if u < v}
    costs = tuple(work.costs[i] for i in kept.tolist())
    for places, _ in memory.usage:
        if len(places) == 2:
            edges.setdefault(places, np.zeros([len(costs[p]) for p in places]))
    number = {edge: e for e, edge in enumerate(edges)}
    buffers = tuple(
        Buffer(at[0], None, usage) if len(at) == 1 else Buffer(None, number[at], usage)
        for (at, _), usage in memory.usage.items()
    )
    rows, live, limits = _rows_left(problem, memory)
    pairs = np.array(list(edges), dtype=np.int64).reshape(-1, 2)
    smaller = Problem(costs, pairs, tuple(edges.values()), buffers, live, limits, work.offset)
    return Contraction(smaller, owner, maps, rows)


class _Deadlock(Exception):
    """Nothing is allowed."""


class _Work:
    """Owners and what joins them, while they shrink.

    around[u][v] is the matrix [S_u, S_v] over the strategies left, around[v][u] its transpose. labels[u]: the
    strategies left, as numbers of the problem; parent[v]: v itself, the node that decides it, or N when nothing is
    left to decide; up[v]: its strategy for each of its parent's, both as numbers of the problem.
    """

    def __init__(self, problem: Problem) -> None:
        count = problem.num_nodes
        self.costs = list(problem.node_costs)
        self.offset = problem.offset
        self.labels = [np.arange(len(c)) for c in self.costs]
        self.sizes = problem.num_strategies
        self.parent = np.arange(count)
        self.up: list[np.ndarray] = list(self.labels)
        self.around: list[dict[int, np.ndarray]] = [{} for _ in range(count)]
        self._nodes = dict.fromkeys(range(count))  # what waits for another look, in order
        self._edges: dict[tuple[int, int], None] = {}
        self._known: dict[Hashable, tuple[Any, Any]] = {}
        for (u, v), matrix in zip(problem.edge_nodes.tolist(), problem.edge_costs, strict=True):
            self._add_edge(u, v, matrix)

    def run(self) -> None:
        while self._nodes or self._edges:
            if self._nodes:
                u = next(iter(self._nodes))
                del self._nodes[u]
                if self.parent[u] == u:
                    self._settle(u)
            else:
                u, v = next(iter(self._edges))
                del self._edges[u, v]
                if v in self.around[u]:
                    self._look(u, v)

    def ways_back(self) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """(owner [N], N when decided; strategy by the owner's)."""
        count = len(self.costs)
        owner = np.full(count, -1)
        maps: list[np.ndarray | None] = [None] * count
        for i in range(count):
            path = [i]
            while maps[path[-1]] is None and self.parent[path[-1]] not in (path[-1], count):
                path.append(int(self.parent[path[-1]]))
            top = path.pop()
            if maps[top] is None:
                owner[top], maps[top] = self.parent[top], self.labels[top]
            for j in reversed(path):
                owner[j], maps[j] = owner[top], self.up[j][maps[top]]
                top = j
        return owner, tuple(maps)

    def _memo(self, made_from: tuple[np.ndarray, ...], key: Hashable, make: Callable[[], Any]) -> Any:
        """make(), once for every set of arrays: programs repeat one matrix object on many edges."""
        key = (key, *map(id, made_from))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = (made_from, make())  # holding the arrays keeps their ids theirs
        return found[1]

    def _transposed(self, matrix: np.ndarray) -> np.ndarray:
        turned = self._memo((matrix,), "T", lambda: np.ascontiguousarray(matrix.T))
        self._memo((turned,), "T", lambda: matrix)
        return turned

    def _part(self, matrix: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self._memo((matrix,), rows.tobytes(), lambda: matrix[rows])

    def _add_edge(self, u: int, v: int, matrix: np.ndarray) -> None:
        """Costs between two owners, or of one with itself, on top of what is there."""
        if u == v:
            self._add_cost(u, np.diagonal(matrix))
            return
        there = self.around[u].get(v)
        if there is not None:
            matrix = self._memo((there, matrix), "+", lambda: there + matrix)
        self._set_edge(u, v, matrix)

    def _set_edge(self, u: int, v: int, matrix: np.ndarray) -> None:
        self.around[u][v], self.around[v][u] = matrix, self._transposed(matrix)
        self._edges[(u, v) if u < v else (v, u)] = None

    def _take_edges(self, u: int) -> list[tuple[int, np.ndarray]]:
        """All edges of a node; they are gone then."""
        edges, self.around[u] = list(self.around[u].items()), {}
        for v, _ in edges:
            del self.around[v][u]
        return edges

    def _add_cost(self, u: int, cost: np.ndarray) -> None:
        self.costs[u] = self.costs[u] + cost
        self._nodes[u] = None

    def _settle(self, u: int) -> None:
        """Drops what node u must not take; a node with one strategy left is decided."""
        kept = np.flatnonzero(np.isfinite(self.costs[u]))
        if not len(kept):
            raise _Deadlock(f"node {u} has no strategy that its neighbours allow")
        if len(kept) < len(self.costs[u]):
            self.costs[u], self.labels[u] = self.costs[u][kept], self.labels[u][kept]
            for v, matrix in list(self.around[u].items()):
                self._set_edge(u, v, self._part(matrix, kept))
        if len(kept) == 1:
            self.parent[u] = len(self.costs)
            self.offset += float(self.costs[u][0])
            for v, matrix in self._take_edges(u):
                self._add_cost(v, matrix[0])

    def _look(self, u: int, v: int) -> None:
        """One edge: dead ends, costs that its ends can carry alone, one end deciding the other."""
        matrix, turned = self.around[u][v], self.around[v][u]
        dead_u, decides_v = self._memo((matrix,), "allowed", lambda: _allowed(matrix))
        dead_v, decides_u = self._memo((turned,), "allowed", lambda: _allowed(turned))
        if dead_u is not None or dead_v is not None:
            for node, dead in ((u, dead_u), (v, dead_v)):
                if dead is not None:
                    self._add_cost(node, dead)
            return
        parts = self._memo((matrix,), "parts", lambda: _parts(matrix))
        if parts is not None:
            del self.around[u][v], self.around[v][u]
            self._add_cost(u, parts[0])
            self._add_cost(v, parts[1])
        elif decides_v is not None and (decides_u is None or len(self.around[u]) >= len(self.around[v])):
            self._join(u, v, decides_v)
        elif decides_u is not None:
            self._join(v, u, decides_u)

    def _join(self, u: int, v: int, decided: np.ndarray) -> None:
        """Node v takes decided[a] where u takes a: v is u's from now on."""
        self.parent[v], self.up[v] = u, np.zeros(self.sizes[u], dtype=np.int64)
        self.up[v][self.labels[u]] = self.labels[v][decided]
        self._add_cost(u, self.costs[v][decided])
        for w, matrix in self._take_edges(v):
            part = self._part(matrix, decided)
            self._add_edge(u, w, part)


def _allowed(matrix: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(inf for every row with no allowed partner, 0 for others, or None; the only partner of every row, or None)."""
    finite = np.isfinite(matrix)
    partners = finite.sum(axis=1)
    dead = None if partners.all() else np.where(partners == 0, np.inf, 0.0)
    return dead, finite.argmax(axis=1) if (partners == 1).all() else None


def _parts(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """a, b with matrix == a[:, None] + b, or None."""
    if not np.isfinite(matrix).all():
        return None
    rows = matrix[:, 0]
    columns = matrix[0] - matrix[0, 0]
    same = np.abs(matrix - rows[:, None] - columns) <= SEPARABLE_TOLERANCE * np.abs(matrix).max()
    return (rows, columns) if same.all() else None


@dataclass(eq=False)
class _Memory:
    """Buffers of the smaller problem: those on one place and live alike are one, and what is needed in any case
    lowers the limits.
    """

    usage: dict[tuple[tuple[int, ...], Hashable], np.ndarray]
    column: dict[tuple[tuple[int, ...], Hashable], int]
    constant: np.ndarray


def _gather(problem: Problem, owner: np.ndarray, maps: tuple[np.ndarray, ...]) -> _Memory:
    memory = _Memory({}, {}, np.zeros(len(problem.buffers)))
    alike = _alike(problem)
    for b, buffer in enumerate(problem.buffers):
        nodes = (buffer.node,) if buffer.node is not None else tuple(problem.edge_nodes[buffer.edge].tolist())
        places = tuple(int(owner[i]) for i in nodes)
        usage = buffer.usage[np.ix_(*(maps[i] for i in nodes))]
        if len(places) == 2 and places[0] == places[1] >= 0:
            places, usage = places[:1], np.diagonal(usage)
        usage = usage.reshape([n for n, place in zip(usage.shape, places, strict=True) if place >= 0])
        places = tuple(place for place in places if place >= 0)
        if len(places) == 2 and places[0] > places[1]:
            places, usage = places[::-1], usage.T
        memory.constant[b] = usage.min()
        if (usage > memory.constant[b]).any():
            key = (places, alike[b])
            memory.usage[key] = memory.usage.get(key, 0.0) + (usage - memory.constant[b])
            memory.column.setdefault(key, b)
    return memory


def _alike(problem: Problem) -> list[Hashable]:
    """Equal for buffers that are live in the same rows."""
    if isinstance(problem.live, Intervals):
        return list(zip(problem.live.start.tolist(), problem.live.stop.tolist(), strict=True))
    columns = problem.live.tocsc()
    columns.sort_indices()
    ends = zip(columns.indptr[:-1].tolist(), columns.indptr[1:].tolist(), strict=True)
    return [(columns.indices[a:b].tobytes(), columns.data[a:b].tobytes()) for a, b in ends]


def _rows_left(problem: Problem, memory: _Memory) -> tuple[np.ndarray, Intervals | sp.csr_array, np.ndarray]:
    """(rows that a choice can exceed, who is live there, what is left of their limits)."""
    columns = np.array(list(memory.column.values()), dtype=np.int64)
    most = np.zeros(len(problem.buffers))
    for b, usage in zip(columns.tolist(), memory.usage.values(), strict=True):
        most[b] += usage.max()
    constant = problem.live @ memory.constant
    rows = np.flatnonzero(constant + problem.live @ most > problem.limits)
    left = problem.limits[rows] - constant[rows]
    # A limit plus its tolerance stays what it was.
    left = (left + problem.row_tolerance_bytes[rows]) / (1.0 + ROW_TOLERANCE * np.sign(left))
    live = problem.live.part(rows, columns) if isinstance(problem.live, Intervals) else problem.live[rows][:, columns]
    return rows, live, left
