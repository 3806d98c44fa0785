"""The choice problem: one strategy per node, pairwise costs, memory limits at program points.

    minimise    offset + sum_i node_costs[i][x_i] + sum_e edge_costs[e][x_u(e), x_v(e)]
    subject to  sum_b live[r, b] * usage_b(x) <= limits[r]      for every row (program point) r

where x_i is the strategy chosen for node i. An infinite cost means "not allowed". Buffers (usage_b) depend on
the strategy of one node or on those of the two ends of an edge. The problem is plain arrays and knows nothing
of what the nodes stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import scipy.sparse as sp

from .live import Intervals

# A row may exceed its limit by this share of it: float sums of up to 1e5 terms of 1e11 bytes stay well
# inside.
ROW_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Buffer:
    """Memory whose size depends on one choice: `usage` is [S_node], or [S_u, S_v] for an edge; in bytes."""

    node: int | None
    edge: int | None
    usage: np.ndarray

    def __post_init__(self) -> None:
        if (self.node is None) == (self.edge is None):
            raise ValueError(
                f"a buffer hangs on one node or one edge, got node={self.node}, edge={self.edge}; give one"
            )
        usage = np.asarray(self.usage, dtype=np.float64)
        wanted = 1 if self.node is not None else 2
        if usage.ndim != wanted:
            raise ValueError(f"a buffer's usage has {wanted} dimension(s) here, got shape {usage.shape}")
        if usage.size and not (usage.min() >= 0 and usage.max() < np.inf):
            raise ValueError(
                "a buffer's usage is a finite number of bytes, zero or more; got a negative, inf or nan"
            )
        object.__setattr__(self, "usage", usage)

    def bytes_for(self, choice: np.ndarray, edge_nodes: np.ndarray) -> float:
        """Bytes that this buffer takes under `choice` ([N] strategy indices)."""
        if self.node is not None:
            return float(self.usage[choice[self.node]])
        u, v = edge_nodes[self.edge]
        return float(self.usage[choice[u], choice[v]])


@dataclass(frozen=True)
class Evaluation:
    """What a choice costs. `rows_bytes` is [R]; `feasible` says that cost is finite and every row is held."""

    cost: float
    rows_bytes: np.ndarray
    feasible: bool
    excess_bytes: float


@dataclass(frozen=True)
class Problem:
    """See the module's docstring for the formula.

    node_costs: N arrays [S_i]; edge_nodes: [E, 2] with u != v, parallel edges allowed; edge_costs: E arrays
    [S_u, S_v]; `live`: sparse [R, B], how many copies of buffer b are live at row r, or Intervals where each is live
    once and in one stretch; `limits`: [R] bytes.
    Raises ValueError when shapes or values do not fit together.
    """

    node_costs: tuple[np.ndarray, ...]
    edge_nodes: np.ndarray
    edge_costs: tuple[np.ndarray, ...]
    buffers: tuple[Buffer, ...] = ()
    live: sp.csr_array | Intervals | None = None
    limits: np.ndarray = field(default_factory=lambda: np.zeros(0))
    offset: float = 0.0

    def __post_init__(self) -> None:
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        set_("node_costs", tuple(np.asarray(c, dtype=np.float64) for c in self.node_costs))
        set_("edge_costs", tuple(np.asarray(c, dtype=np.float64) for c in self.edge_costs))
        set_("edge_nodes", np.asarray(self.edge_nodes, dtype=np.int64).reshape(-1, 2))
        set_("buffers", tuple(self.buffers))
        set_("limits", np.asarray(self.limits, dtype=np.float64).reshape(-1))
        if self.live is None:
            set_("live", sp.csr_array((len(self.limits), len(self.buffers))))
        elif not isinstance(self.live, Intervals):
            set_("live", sp.csr_array(self.live, dtype=np.float64))
        _check_nodes(self)
        _check_edges(self)
        _check_memory(self)

    @property
    def num_nodes(self) -> int:
        return len(self.node_costs)

    @property
    def num_edges(self) -> int:
        return len(self.edge_costs)

    @property
    def num_rows(self) -> int:
        return len(self.limits)

    @cached_property
    def num_strategies(self) -> np.ndarray:
        """Strategies per node, int64 [N]."""
        return np.array([len(c) for c in self.node_costs], dtype=np.int64)

    def cost(self, choice: np.ndarray) -> float:
        """Cost of a choice ([N] strategy indices); +inf if it uses what is not allowed."""
        choice = self.checked_choice(choice)
        total = self.offset + sum(float(c[k]) for c, k in zip(self.node_costs, choice, strict=True))
        left, right = choice[self.edge_nodes[:, 0]].tolist(), choice[self.edge_nodes[:, 1]].tolist()
        return total + sum(float(c[i, j]) for c, i, j in zip(self.edge_costs, left, right, strict=True))

    def buffer_bytes(self, choice: np.ndarray) -> np.ndarray:
        """Bytes of every buffer under a choice, float64 [B]."""
        choice = self.checked_choice(choice)
        return np.array([b.bytes_for(choice, self.edge_nodes) for b in self.buffers], dtype=np.float64)

    def live_at(self, rows: np.ndarray) -> np.ndarray:
        """Copies of every buffer that are live at some rows, float64 [A, B]."""
        return self.live.dense(rows) if isinstance(self.live, Intervals) else self.live[rows].toarray()

    def weigh(self, price: np.ndarray) -> np.ndarray:
        """What a byte of every buffer costs, float64 [B], at prices [R] per byte and row."""
        return self.live.weigh(price) if isinstance(self.live, Intervals) else self.live.T @ price

    def rows_bytes(self, choice: np.ndarray) -> np.ndarray:
        """Bytes live at every row under a choice, float64 [R]."""
        return self.live @ self.buffer_bytes(choice)

    @cached_property
    def row_tolerance_bytes(self) -> np.ndarray:
        """By how much a row may exceed its limit and still count as held, float64 [R]."""
        return ROW_TOLERANCE * np.abs(np.where(np.isfinite(self.limits), self.limits, 0.0))

    def evaluate(self, choice: np.ndarray) -> Evaluation:
        """Cost, memory and feasibility of a choice ([N] strategy indices)."""
        cost, rows = self.cost(choice), self.rows_bytes(choice)
        over = rows - self.limits
        excess = float(over.max()) if len(over) else -np.inf
        return Evaluation(
            cost, rows, bool(np.isfinite(cost) and np.all(over <= self.row_tolerance_bytes)), excess
        )

    def checked_choice(self, choice: np.ndarray) -> np.ndarray:
        """`choice` as int64 [N]; ValueError if it does not name one strategy of each node."""
        out = np.asarray(choice, dtype=np.int64)
        if out.shape != (self.num_nodes,):
            raise ValueError(
                f"a choice names one strategy per node: shape ({self.num_nodes},), got {out.shape}"
            )
        if out.size and not np.all((out >= 0) & (out < self.num_strategies)):
            bad = int(np.flatnonzero((out < 0) | (out >= self.num_strategies))[0])
            raise ValueError(
                f"node {bad} has {self.num_strategies[bad]} strategies, the choice names {out[bad]}"
            )
        return out


def _check_nodes(problem: Problem) -> None:
    for i, cost in enumerate(problem.node_costs):
        if cost.ndim != 1 or not cost.size:
            raise ValueError(f"node {i} needs a non-empty vector of costs, got shape {cost.shape}")
        if not cost.min() > -np.inf:  # min() is nan if any entry is
            raise ValueError(
                f"node {i} has a cost that is nan or -inf; only +inf (not allowed) is not finite"
            )


def _check_edges(problem: Problem) -> None:
    nodes = problem.edge_nodes
    if len(nodes) != len(problem.edge_costs):
        raise ValueError(
            f"{len(nodes)} pairs in edge_nodes for {len(problem.edge_costs)} matrices in edge_costs"
        )
    if len(nodes) and not (nodes.min() >= 0 and nodes.max() < problem.num_nodes):
        raise ValueError(f"edge_nodes names nodes outside 0..{problem.num_nodes - 1}")
    for e, ((u, v), cost) in enumerate(zip(nodes.tolist(), problem.edge_costs, strict=True)):
        wanted = (len(problem.node_costs[u]), len(problem.node_costs[v]))
        if u == v:
            raise ValueError(
                f"edge {e} joins node {u} to itself; add its diagonal to the node's costs instead"
            )
        if cost.shape != wanted:
            raise ValueError(
                f"edge {e} joins nodes {u} and {v}: its costs need shape {wanted}, got {cost.shape}"
            )
        if not cost.min() > -np.inf:
            raise ValueError(
                f"edge {e} has a cost that is nan or -inf; only +inf (not allowed) is not finite"
            )


def _check_memory(problem: Problem) -> None:
    wanted = (problem.num_rows, len(problem.buffers))
    if problem.live.shape != wanted:
        raise ValueError(
            f"live is [rows, buffers]: shape {wanted} for these limits and buffers, got {problem.live.shape}"
        )
    sparse = not isinstance(problem.live, Intervals)
    if sparse and problem.live.nnz and not (problem.live.data.min() >= 0 and problem.live.data.max() < np.inf):
        raise ValueError("live counts copies of a buffer: finite numbers, zero or more")
    if not np.all(problem.limits > -np.inf):
        raise ValueError("limits are bytes (+inf for no limit), got nan or -inf")
    for b, buffer in enumerate(problem.buffers):
        if buffer.node is not None:
            inside, what = 0 <= buffer.node < problem.num_nodes, f"node {buffer.node}"
            shape = problem.node_costs[buffer.node].shape if inside else None
        else:
            inside, what = 0 <= buffer.edge < problem.num_edges, f"edge {buffer.edge}"
            shape = problem.edge_costs[buffer.edge].shape if inside else None
        if shape != buffer.usage.shape:
            raise ValueError(
                f"buffer {b} hangs on {what}, of shape {shape}, but its usage has {buffer.usage.shape}"
            )
