"""Every choice tried: the reference that the other solvers are tested against."""

from __future__ import annotations

import time

import numpy as np

from .problem import Problem
from .solution import BlockingBuffer, Infeasibility, Solution, Status

MAX_CHOICES = 2_000_000


def brute_force(problem: Problem) -> Solution:
    """The optimum by enumeration. Raises ValueError above MAX_CHOICES choices."""
    started = time.perf_counter()
    count = float(np.prod(problem.num_strategies.astype(np.float64)))
    if count > MAX_CHOICES:
        raise ValueError(
            f"{count:.3g} choices are too many to enumerate (limit {MAX_CHOICES}); call solve() instead"
        )
    choices = np.indices(problem.num_strategies).reshape(problem.num_nodes, int(count)).T
    costs, rows = _all_costs(problem, choices), _all_rows(problem, choices)
    over = rows - problem.limits
    fits = np.isfinite(costs) & np.all(over <= problem.row_tolerance_bytes, axis=1)
    if fits.any():
        best = int(np.argmin(np.where(fits, costs, np.inf)))
        cost = float(costs[best])
        return Solution(
            Status.OPTIMAL,
            choices[best],
            cost,
            cost,
            time.perf_counter() - started,
            "every choice was tried",
            "brute force",
        )
    reason = _why(problem, choices, costs, over)
    return Solution(
        Status.INFEASIBLE,
        None,
        np.inf,
        np.inf,
        time.perf_counter() - started,
        "no choice fits: every one was tried",
        "brute force",
        reason,
    )


def _all_costs(problem: Problem, choices: np.ndarray) -> np.ndarray:
    total = np.full(len(choices), problem.offset)
    for i, cost in enumerate(problem.node_costs):
        total += cost[choices[:, i]]
    for (u, v), cost in zip(problem.edge_nodes, problem.edge_costs, strict=True):
        total += cost[choices[:, u], choices[:, v]]
    return total


def _all_rows(problem: Problem, choices: np.ndarray) -> np.ndarray:
    sizes = np.zeros((len(choices), len(problem.buffers)))
    for b, buffer in enumerate(problem.buffers):
        if buffer.node is not None:
            sizes[:, b] = buffer.usage[choices[:, buffer.node]]
        else:
            u, v = problem.edge_nodes[buffer.edge]
            sizes[:, b] = buffer.usage[choices[:, u], choices[:, v]]
    return np.array([problem.live @ row for row in sizes]).reshape(len(sizes), -1)


def _why(problem: Problem, choices: np.ndarray, costs: np.ndarray, over: np.ndarray) -> Infeasibility:
    allowed = np.isfinite(costs)
    if not allowed.any():
        return Infeasibility(np.inf, np.inf, None, None)
    excess = np.where(allowed, over.max(axis=1), np.inf)
    best = int(np.argmin(excess))
    return explain_excess(problem, choices[best], float(excess[best]))


def explain_excess(problem: Problem, choice: np.ndarray, bound_bytes: float) -> Infeasibility:
    """Names the row that `choice` exceeds most and what is live there, largest first."""
    over = problem.rows_bytes(choice) - problem.limits
    row = int(np.argmax(over))
    copies = problem.live_at(np.array([row]))[0]
    total = copies * problem.buffer_bytes(choice)
    order = [int(b) for b in np.argsort(-total, kind="stable") if total[b] > 0]
    blocking = tuple(BlockingBuffer(b, float(copies[b]), float(total[b])) for b in order)
    return Infeasibility(float(over[row]), bound_bytes, row, choice, blocking)
