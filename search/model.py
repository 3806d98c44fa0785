"""The compressed model that the solvers work on: tables for edges, memory per row for nodes.

    minimise    offset + sum_i costs[i][x_i] + sum_e tables[e][x_u, x_v]
    subject to  sum_i node_use[i][r, x_i] + sum_e sum_(w, T in edge_use[e]) w[r] T[x_u, x_v] <= limits[r]

Built from a Problem for chosen rows only (`model_of`), so that memory costs nothing while it does not bind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .problem import Buffer, Problem
from .tables import Table, add, compress

EdgeUse = tuple[tuple[np.ndarray, Table], ...]


@dataclass(frozen=True, eq=False)
class Model:
    """See the module's docstring. edges: [E, 2] with u < v, no pair twice; node_use[i]: [A, S_i] or None;
    limits: [A].
    """

    costs: tuple[np.ndarray, ...]
    edges: np.ndarray
    tables: tuple[Table, ...]
    node_use: tuple[np.ndarray | None, ...]
    edge_use: tuple[EdgeUse, ...]
    limits: np.ndarray
    tolerance: np.ndarray
    offset: float = 0.0

    @property
    def num_nodes(self) -> int:
        return len(self.costs)

    @property
    def num_rows(self) -> int:
        return len(self.limits)

    @property
    def size(self) -> int:
        """Numbers in the cores of all tables: how large the problem is to a solver."""
        return sum(t.core.size for t in self.tables)

    def raised(self, extra_bytes: float) -> Model:
        """Every limit higher by `extra_bytes`."""
        return replace(self, limits=self.limits + extra_bytes)


def base_model(problem: Problem) -> Model:
    """The model of a problem without its memory rows. Parallel edges are merged, zero tables are left out."""
    merged: dict[tuple[int, int], Table] = {}
    known: dict[int, Table] = {}  # planners repeat one matrix object on many edges
    for (u, v), matrix in zip(problem.edge_nodes.tolist(), problem.edge_costs, strict=True):
        table = known.get(id(matrix))
        if table is None:
            table = known[id(matrix)] = compress(matrix)
        key, table = ((u, v), table) if u < v else ((v, u), table.T)
        merged[key] = add(merged[key], table) if key in merged else table
    merged = {key: table for key, table in merged.items() if table.core.any()}
    return Model(
        costs=problem.node_costs,
        edges=np.array(list(merged), dtype=np.int64).reshape(-1, 2),
        tables=tuple(merged.values()),
        node_use=(None,) * problem.num_nodes,
        edge_use=((),) * len(merged),
        limits=np.zeros(0),
        tolerance=np.zeros(0),
        offset=problem.offset,
    )


def with_rows(base: Model, problem: Problem, rows: np.ndarray) -> Model:
    """`base` (from base_model of the same problem) with the memory rows `rows` ([A] row numbers) added."""
    live = problem.live_at(rows) if len(rows) else np.zeros((0, len(problem.buffers)))
    node_use: list[np.ndarray | None] = [None] * base.num_nodes
    tables = {(u, v): t for (u, v), t in zip(base.edges.tolist(), base.tables, strict=True)}
    uses: dict[tuple[int, int], list[tuple[np.ndarray, Table]]] = {key: [] for key in tables}
    for b, buffer in enumerate(problem.buffers):
        weights = live[:, b]
        if not weights.any():
            continue
        if buffer.node is not None:
            share = weights[:, None] * buffer.usage
            node_use[buffer.node] = share if node_use[buffer.node] is None else node_use[buffer.node] + share
            continue
        u, v = problem.edge_nodes[buffer.edge].tolist()
        key, table = ((u, v), compress(buffer.usage)) if u < v else ((v, u), compress(buffer.usage).T)
        uses.setdefault(key, []).append((weights, table))
        tables.setdefault(key, zero_table(len(base.costs[key[0]]), len(base.costs[key[1]])))
    return replace(
        base,
        edges=np.array(list(tables), dtype=np.int64).reshape(-1, 2),
        tables=tuple(tables.values()),
        node_use=tuple(node_use),
        edge_use=tuple(tuple(uses[key]) for key in tables),
        limits=problem.limits[rows],
        tolerance=problem.row_tolerance_bytes[rows],
    )


def model_of(problem: Problem, rows: np.ndarray | None = None) -> Model:
    """The model of a problem with the memory rows `rows` (None: all of them)."""
    return with_rows(base_model(problem), problem, np.arange(problem.num_rows) if rows is None else rows)


def zero_table(rows: int, cols: int) -> Table:
    return Table(np.zeros(rows, dtype=np.int64), np.zeros(cols, dtype=np.int64), np.zeros((1, 1)))


def costless(model: Model) -> Model:
    """The same choices and memory, but every allowed cost is zero: what remains is whether anything fits."""
    forbid = lambda x: np.where(np.isposinf(x), np.inf, 0.0)  # noqa: E731
    return replace(
        model,
        costs=tuple(forbid(c) for c in model.costs),
        tables=tuple(Table(t.rows, t.cols, forbid(t.core)) for t in model.tables),
        offset=0.0,
    )


def priced(base: Model, problem: Problem, price: np.ndarray) -> Model:
    """`base` with memory as a cost instead of rows: cost + price @ (use - limits). price: [R], cost per byte.
    """
    weights = problem.weigh(price)
    used = price > 0
    costs = list(base.costs)
    tables = {(u, v): t for (u, v), t in zip(base.edges.tolist(), base.tables, strict=True)}
    for weight, buffer in zip(weights, problem.buffers, strict=True):
        if not weight:
            continue
        if buffer.node is not None:
            costs[buffer.node] = costs[buffer.node] + weight * buffer.usage
            continue
        u, v = problem.edge_nodes[buffer.edge].tolist()
        key, table = ((u, v), compress(buffer.usage)) if u < v else ((v, u), compress(buffer.usage).T)
        table = Table(table.rows, table.cols, weight * table.core)
        tables[key] = add(tables[key], table) if key in tables else table
    return replace(
        base,
        costs=tuple(costs),
        edges=np.array(list(tables), dtype=np.int64).reshape(-1, 2),
        tables=tuple(tables.values()),
        edge_use=((),) * len(tables),
        offset=base.offset - float(price[used] @ problem.limits[used]),
    )


def cost_of(model: Model, choice: np.ndarray) -> float:
    """Cost of a choice ([N] positions), memory aside."""
    total = model.offset + sum(float(c[k]) for c, k in zip(model.costs, choice, strict=True))
    left, right = choice[model.edges[:, 0]].tolist(), choice[model.edges[:, 1]].tolist()
    return total + sum(
        float(t.core[t.rows[i], t.cols[j]]) for t, i, j in zip(model.tables, left, right, strict=True)
    )


def use_of(model: Model, choice: np.ndarray) -> np.ndarray:
    """Bytes at every row under a choice, [A]."""
    total = np.zeros(model.num_rows)
    for use, k in zip(model.node_use, choice, strict=True):
        if use is not None:
            total += use[:, k]
    for (u, v), uses in zip(model.edges.tolist(), model.edge_use, strict=True):
        for weights, table in uses:
            total += weights * table.core[table.rows[choice[u]], table.cols[choice[v]]]
    return total


def fits(model: Model, choice: np.ndarray) -> bool:
    """Whether every row is held, to half the problem's tolerance (sums in another order differ by rounding).
    """
    return bool(np.all(use_of(model, choice) <= model.limits + 0.5 * model.tolerance))


def problem_of(model: Model) -> Problem:
    """A plain Problem that says the same as `model` (for tests, and for solvers under the Problem contract).
    """
    buffers: list[Buffer] = []
    columns: list[np.ndarray] = []
    for i, use in enumerate(model.node_use):
        for r in range(0 if use is None else model.num_rows):
            buffers.append(Buffer(i, None, use[r]))
            columns.append(np.eye(model.num_rows)[r])
    for e, uses in enumerate(model.edge_use):
        for weights, table in uses:
            buffers.append(Buffer(None, e, table.dense()))
            columns.append(weights)
    live = np.stack(columns, axis=1) if columns else np.zeros((model.num_rows, 0))
    return Problem(
        node_costs=model.costs,
        edge_nodes=model.edges,
        edge_costs=tuple(t.dense() for t in model.tables),
        buffers=tuple(buffers),
        live=live,
        limits=model.limits,
        offset=model.offset,
    )
