"""Memory rows: which to add, and what the least excess of any choice is.

The least excess is  min_x max_r (use_r(x) - limits[r])  over allowed choices: at most 0 when something fits, and
otherwise by how much every limit must rise. It is the local-polytope program with one more variable
(highs.program_of(excess=True)), after the same presolve with all costs zero, where dominance keeps mostly the
strategies that need least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .highs import program_of, run_highs
from .model import Model, costless, with_rows
from .presolve import STEPS, drop_slack_rows, presolve
from .problem import Problem
from .relaxed import Clock

ROWS_AT_ONCE = 4
# Rows that share this much of their bytes say nearly the same.
OVERLAP = 0.9
CONSIDERED_ROWS = 64
# In units of the largest limit.
EXCESS_GAP = 1e-6
EXCESS_STEPS = tuple(step for step in STEPS if step is not drop_slack_rows)  # a row that fits may still be the fullest


def violated_rows(problem: Problem, choice: np.ndarray, known: np.ndarray, floor_bytes: float = 0.0) -> np.ndarray:
    """A few rows, none in `known`, that `choice` exceeds by more than `floor_bytes`: the worst, then unlike ones."""
    sizes = problem.buffer_bytes(choice)
    over = problem.live @ sizes - problem.limits
    over[known] = -np.inf
    worst = np.argsort(-over, kind="stable")[:CONSIDERED_ROWS]
    worst = worst[over[worst] > floor_bytes + problem.row_tolerance_bytes[worst]]
    live = problem.live[worst].toarray() * sizes
    picked: list[int] = []
    for n in range(len(worst)):
        shared = [np.minimum(live[n], live[p]).sum() / live[n].sum() for p in picked]
        if not any(share > OVERLAP for share in shared):
            picked.append(n)
        if len(picked) == ROWS_AT_ONCE:
            break
    return worst[picked]


@dataclass(frozen=True, eq=False)
class Excess:
    """`choice` (or None) exceeds its worst row by `excess_bytes`; none exceeds less than `bound_bytes`. `rows`: used."""

    choice: np.ndarray | None
    excess_bytes: float
    bound_bytes: float
    rows: np.ndarray


def least_excess(problem: Problem, base: Model, rows: np.ndarray, start: np.ndarray, clock: Clock) -> Excess:
    """Minimises the excess over all rows, starting from `rows`; ends early at a choice that fits.

    start: an allowed choice [N] (finite cost).
    """
    free = costless(base)
    best, excess, bound = start, problem.evaluate(start).excess_bytes, -np.inf
    slack = float(problem.row_tolerance_bytes.max(initial=0.0))
    while excess > 0 and clock.left_s > 0:
        choice, proven = _fewer(with_rows(free, problem, rows), excess, clock)
        bound = max(bound, min(proven, excess))
        if choice is None:
            break
        found = problem.evaluate(choice)
        if found.excess_bytes < excess:
            best, excess = choice, found.excess_bytes
        new = violated_rows(problem, choice, rows, max(bound, 0.0))
        if not len(new) or excess - bound <= slack:
            break
        rows = np.concatenate([rows, new])
    return Excess(best, excess, min(bound, excess), rows)


def _fewer(model: Model, excess: float, clock: Clock) -> tuple[np.ndarray | None, float]:
    """(a choice of least excess over the model's rows, bound on it), given that `excess` is reached by some choice."""
    raised = model.raised(excess)
    reduction = presolve(raised, EXCESS_STEPS)
    assert reduction.infeasible is None, f"some choice exceeds by {excess} bytes, yet: {reduction.infeasible}"
    small = reduction.model
    if not any(use is not None for use in small.node_use) and not any(small.edge_use):
        if small.num_nodes:  # forbidden pairs are left, no memory: any allowed choice has the least excess
            answer = run_highs(program_of(small), time_limit_s=_limit(clock), gap=1.0)
            choice = None if answer.values is None else program_of(small).choice(answer.values)
        else:
            choice = np.zeros(0, dtype=np.int64)
        return (None if choice is None else reduction.lift(choice)), excess - float(small.limits.min())
    program = program_of(small, excess=True)
    answer = run_highs(
        program, time_limit_s=_limit(clock), gap=0.0, absolute_gap=EXCESS_GAP, target=-excess,
    )
    choice = None if answer.values is None else reduction.lift(program.choice(answer.values))
    return choice, excess + answer.bound


def _limit(clock: Clock) -> float | None:
    return None if clock.budget_s is None else clock.left_s
