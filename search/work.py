"""The model while presolve takes it apart: adjacency lists, strategies still alive, and the way back.

Private to presolve: a `Work` is made from a Model, changed by the steps, and frozen into a Reduction at the
end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .model import EdgeUse, Model
from .tables import Table, add, take


@dataclass(frozen=True, eq=False)
class Eliminated:
    """Node `node` takes the strategy that is cheapest given its neighbours', who are assigned before it.

    labels: its strategies (positions in the model) with costs `costs`; for each neighbour (node, labels,
    table).
    """

    node: int
    labels: np.ndarray
    costs: np.ndarray
    neighbours: tuple[tuple[int, np.ndarray, Table], ...]


@dataclass(frozen=True, eq=False)
class Reduction:
    """A smaller model with the same optimum, and the way back.

    kept: nodes of the larger model that are left; labels: for each of its nodes the strategies that are left;
    rows: its memory rows that are left. infeasible: why nothing is allowed, or None.
    """

    model: Model
    kept: np.ndarray
    labels: tuple[np.ndarray, ...]
    eliminated: tuple[Eliminated, ...]
    rows: np.ndarray
    infeasible: str | None = None

    def lift(self, choice: np.ndarray) -> np.ndarray:
        """A choice of the smaller model as one of the larger, of equal cost."""
        out = np.full(len(self.labels), -1, dtype=np.int64)
        for i, k in zip(self.kept, choice, strict=True):
            out[i] = self.labels[i][k]
        for step in reversed(self.eliminated):
            total = step.costs.copy()
            for node, labels, table in step.neighbours:
                total += table.row(int(np.searchsorted(labels, out[node])))
            out[step.node] = step.labels[int(np.argmin(total))]
        return out

    def project(self, choice: np.ndarray) -> np.ndarray:
        """The nearest choice of the smaller model: strategies that are gone become the first that is left."""
        out = np.zeros(len(self.kept), dtype=np.int64)
        for n, i in enumerate(self.kept):
            place = int(np.searchsorted(self.labels[i], choice[i]))
            if place < len(self.labels[i]) and self.labels[i][place] == choice[i]:
                out[n] = place
        return out


class Infeasible(Exception):
    """Nothing is allowed."""


@dataclass(eq=False)
class Work:
    """Mutable model. tables[u][v] and tables[v][u] are each other's transpose; uses likewise (edges with
    memory).
    """

    labels: list[np.ndarray]
    costs: list[np.ndarray]
    tables: list[dict[int, Table]]
    uses: list[dict[int, EdgeUse]]
    node_use: list[np.ndarray | None]
    limits: np.ndarray
    tolerance: np.ndarray
    rows: np.ndarray
    offset: float
    alive: list[bool]
    eliminated: list[Eliminated] = field(default_factory=list)
    dirty: set[int] = field(default_factory=set)
    effort: float = 0.0

    def degree(self, i: int) -> int:
        return len(self.tables[i])

    def carries_memory(self, i: int) -> bool:
        return self.node_use[i] is not None or bool(self.uses[i])

    def touch(self, i: int) -> None:
        """Marks a node and its neighbours as worth another look."""
        self.dirty.add(i)
        self.dirty.update(self.tables[i])

    def set_table(self, u: int, v: int, table: Table) -> None:
        self.tables[u][v], self.tables[v][u] = table, table.T

    def drop_edge(self, u: int, v: int) -> None:
        self.dirty.update((u, v))
        for a, b in ((u, v), (v, u)):
            del self.tables[a][b]
            self.uses[a].pop(b, None)

    def add_table(self, u: int, v: int, table: Table) -> None:
        self.set_table(u, v, add(self.tables[u][v], table) if v in self.tables[u] else table)

    def keep(self, i: int, kept: np.ndarray) -> None:
        """Only the strategies of node i at positions `kept` (ascending) stay."""
        if not len(kept):
            raise Infeasible(f"node {i} has no strategy left")
        if len(kept) == len(self.labels[i]):
            return
        self.labels[i], self.costs[i] = self.labels[i][kept], self.costs[i][kept]
        if self.node_use[i] is not None:
            self.node_use[i] = self.node_use[i][:, kept]
        for j in self.tables[i]:
            self.set_table(i, j, take(self.tables[i][j], kept, None))
            if j in self.uses[i]:
                part = tuple((w, take(t, kept, None)) for w, t in self.uses[i][j])
                self.uses[i][j], self.uses[j][i] = part, tuple((w, t.T) for w, t in part)
        self.touch(i)

    def add_use(self, i: int, use: np.ndarray) -> None:
        """Adds [A, S_i] bytes to node i."""
        self.node_use[i] = use if self.node_use[i] is None else self.node_use[i] + use

    def lower_limits(self, used: np.ndarray) -> None:
        """Takes [A] bytes that are needed in any case out of the limits. Call wake_memory when done."""
        self.limits = self.limits - used
        if (self.limits < -self.tolerance).any():
            raise Infeasible("what every strategy needs exceeds the limit of a memory row")

    def wake_memory(self) -> None:
        """Marks nodes with a strategy that the limits now rule out."""
        room = self.limits + self.tolerance
        for i, use in enumerate(self.node_use):
            if use is not None and (use.max(axis=1) > room).any():
                self.dirty.add(i)

    def pay(self, cost: float) -> None:
        """Adds to the constant cost."""
        if cost == np.inf:
            raise Infeasible("every strategy of a node conflicts with what its neighbours must take")
        self.offset += cost

    def keep_rows(self, kept: np.ndarray) -> None:
        """Only the memory rows of the mask `kept` stay."""
        self.limits, self.tolerance, self.rows = self.limits[kept], self.tolerance[kept], self.rows[kept]
        for i in range(len(self.alive)):
            if not self.carries_memory(i):
                continue
            self.dirty.add(i)
            use = self.node_use[i]
            if use is not None:
                self.node_use[i] = use[kept] if use[kept].any() else None
            for j, parts in list(self.uses[i].items()):
                left = tuple((w[kept], t) for w, t in parts if w[kept].any())
                if left:
                    self.uses[i][j] = left
                else:
                    del self.uses[i][j]

    def remove(self, i: int, neighbours: tuple[tuple[int, np.ndarray, Table], ...]) -> None:
        """Node i leaves; `neighbours` are those that decide its strategy on the way back."""
        self.eliminated.append(Eliminated(i, self.labels[i], self.costs[i], neighbours))
        self.touch(i)
        for j in list(self.tables[i]):
            self.drop_edge(i, j)
        self.alive[i] = False
        self.dirty.discard(i)


def work_of(model: Model) -> Work:
    n = model.num_nodes
    work = Work(
        labels=[np.arange(len(c)) for c in model.costs],
        costs=[c.copy() for c in model.costs],
        tables=[{} for _ in range(n)],
        uses=[{} for _ in range(n)],
        node_use=list(model.node_use),
        limits=model.limits.copy(),
        tolerance=model.tolerance.copy(),
        rows=np.arange(model.num_rows),
        offset=model.offset,
        alive=[True] * n,
    )
    for (u, v), table, uses in zip(model.edges.tolist(), model.tables, model.edge_use, strict=True):
        work.set_table(u, v, table)
        if uses:
            work.uses[u][v], work.uses[v][u] = uses, tuple((w, t.T) for w, t in uses)
    return work


def frozen(work: Work, infeasible: str | None) -> Reduction:
    """The reduction that the work has come to."""
    kept = [i for i in range(len(work.alive)) if work.alive[i]]
    place = {i: n for n, i in enumerate(kept)}
    edges = [(i, j) for i in kept for j in work.tables[i] if i < j]
    model = Model(
        costs=tuple(work.costs[i] for i in kept),
        edges=np.array([(place[i], place[j]) for i, j in edges], dtype=np.int64).reshape(-1, 2),
        tables=tuple(work.tables[i][j] for i, j in edges),
        node_use=tuple(work.node_use[i] for i in kept),
        edge_use=tuple(work.uses[i].get(j, ()) for i, j in edges),
        limits=work.limits,
        tolerance=work.tolerance,
        offset=work.offset,
    )
    return Reduction(
        model,
        np.array(kept, dtype=np.int64),
        tuple(work.labels),
        tuple(work.eliminated),
        work.rows,
        infeasible,
    )
