"""The exact search. Memory rows are added only as they turn out to bind.

    rows := {}
    repeat: x := optimum of the problem with `rows` only (relaxed.solve_model): its cost bounds the whole
            if x holds every row: it is optimal
            rows := rows + a few that x exceeds most
            if nothing is known to fit: what is the least excess of any choice? (memory.least_excess)
"""

from __future__ import annotations

import numpy as np

from .anytime import Clock, Incumbent
from .brute import explain_excess
from .memory import Excess, least_excess, violated_rows
from .model import base_model, with_rows
from .problem import Problem
from .relaxed import Search, solve_model, threshold
from .solution import Infeasibility, Solution, Status, relative_gap


def solve_exact(
    problem: Problem,
    incumbent: Incumbent,
    *,
    cutoff: float = np.inf,
    start: np.ndarray | None = None,
    gap: float = 1e-6,
    prove: bool = True,
) -> Solution:
    """The least-cost choice of `problem`, by the clock of `incumbent`; the other arguments are those of solve().

    start: a choice to improve first, feasible or not.
    """
    clock, base = incumbent.clock, base_model(problem)
    rows, bound = np.zeros(0, dtype=np.int64), incumbent.bound
    starts = [] if start is None else [problem.checked_choice(start)]
    while True:
        ceiling = min(cutoff, threshold(incumbent.cost, gap))
        search = solve_model(Search(with_rows(base, problem, rows), ceiling, gap, clock, prove), starts)
        bound = incumbent.bound = max(bound, search.bound)
        held = incumbent.offer(search.best)
        if (
            search.proven
            and search.best is None
            and incumbent.choice is None
            and len(rows)
            and cutoff == np.inf
        ):
            return _does_not_fit(problem, least_excess(problem, base, starts[-1], clock), clock)
        if search.proven and (search.best is None or held):
            return _ended(incumbent, cutoff, bound, gap, clock, search)
        if clock.left_s <= 0 or search.best is None or held:
            return _stopped(incumbent, bound, clock, search)
        starts.append(search.best)
        new = violated_rows(problem, search.best, rows)
        assert len(new), "a choice that exceeds a row of the model was called feasible for it"
        rows = np.concatenate([rows, new])
        if incumbent.choice is None:
            phase = least_excess(problem, base, search.best, clock)
            rows = np.union1d(rows, phase.rows)
            if phase.bound_bytes > float(problem.row_tolerance_bytes.max()):
                return _does_not_fit(problem, phase, clock)
            incumbent.offer(phase.choice)
            starts.append(phase.choice)


def _ended(
    incumbent: Incumbent, cutoff: float, bound: float, gap: float, clock: Clock, search: Search
) -> Solution:
    """The search was exhausted: optimal, cut off, or nothing is allowed."""
    if incumbent.choice is not None and incumbent.cost <= cutoff:
        bound = min(bound, incumbent.cost)
        text = f"proven optimal to a relative gap of {gap:g} by {search.method}"
        return Solution(
            Status.OPTIMAL, incumbent.choice, incumbent.cost, bound, clock.seconds, text, search.method
        )
    if cutoff < np.inf:
        text = f"no choice costs less than the cutoff {cutoff:g}; raise it to see what is best"
        return Solution(
            Status.CUTOFF,
            incumbent.choice,
            incumbent.cost,
            bound,
            clock.seconds,
            text,
            search.method,
        )
    why = Infeasibility(np.inf, np.inf, None, None)
    proof = search.detail or f"proven by {search.method}"
    text = f"no choice is allowed ({proof}); allow more strategies or pairs"
    return Solution(Status.INFEASIBLE, None, np.inf, np.inf, clock.seconds, text, search.method, why)


def _does_not_fit(problem: Problem, phase: Excess, clock: Clock) -> Solution:
    """Memory: what every choice exceeds, and what would be enough."""
    why = explain_excess(problem, phase.choice, phase.bound_bytes)
    text = excess_text(problem, why)
    return Solution(Status.INFEASIBLE, None, np.inf, np.inf, clock.seconds, text, "least excess", why)


def excess_text(problem: Problem, why: Infeasibility) -> str:
    """Says by how much every choice exceeds the limits, and which are enough."""
    needed = problem.limits[why.row] + why.smallest_excess_bytes
    return (
        f"every choice exceeds a memory limit by at least {why.excess_bound_bytes:.0f} bytes; raise the"
        f" limits by {why.smallest_excess_bytes:.0f} bytes (row {why.row}: to {needed:.0f})"
    )


def _stopped(incumbent: Incumbent, bound: float, clock: Clock, search: Search) -> Solution:
    """Out of time, no proof asked for, or the solver gave up."""
    if incumbent.choice is None:
        text = f"stopped without a choice that fits ({search.detail}); give a larger budget_s"
        return Solution(Status.TIME_LIMIT, None, np.inf, bound, clock.seconds, text, search.method)
    bound = min(bound, incumbent.cost)
    reached = relative_gap(incumbent.cost, bound)
    action = "give a larger budget_s" if search.prove else "ask for a proof"
    text = f"stopped at a gap of {reached:.2%} ({search.detail}); {action}"
    return Solution(
        Status.FEASIBLE, incumbent.choice, incumbent.cost, bound, clock.seconds, text, search.method
    )
