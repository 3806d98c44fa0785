"""solve(): the one door. Small problems go to the exact search; large ones are contracted first, and what is then
still large gets prices, dual ascent and moves on forests before the exact search, if that can be of use at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import time

import numpy as np

from .anytime import Clock, Incumbent, Progress
from .brute import explain_excess
from .contract import Contraction, contract
from .exact import excess_text, solve_exact
from .lagrange import Lagrangian
from .model import base_model
from .problem import Problem
from .relaxed import PROGRAM_SIZE, threshold
from .solution import Infeasibility, Solution, Status, relative_gap

# Pairs of strategies on all edges from which on contraction comes first (about a second per million).
CONTRACTED_PAIRS = 1_000_000
# Distinct pairs from which on the exact search does not come to an end within minutes, and the share of a budget
# that goes to the Lagrangian where it does.
OUT_OF_REACH, LAGRANGIAN_SHARE = 1_000_000, 0.4
# What is left of a large problem's budget for the last bound.
LAST_SHARE = 0.05


def solve(
    problem: Problem,
    *,
    budget_s: float | None = None,
    cutoff: float = np.inf,
    initial: np.ndarray | None = None,
    gap: float = 1e-6,
    prove: bool = True,
    seed: int = 0,
    on_better: Callable[[Progress], object] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Solution:
    """The least-cost choice of `problem`.

    budget_s: wall-clock limit in seconds (None: none; with one, where it stops depends on the machine).
    cutoff: stop with CUTOFF once nothing can cost less (if `initial` costs just that, it is the answer).
    initial: a known choice [N] to start from. gap: relative optimality tolerance, (cost - bound) / |cost|.
    prove: False stops after the LP relaxation and the program over its support, with what gap there is.
    seed: of the moves' randomness on large problems; equal arguments give equal steps.
    on_better: called with every better choice's Progress. stop: asked between steps (HiGHS is not interrupted);
    once it is true, what is known then is the answer.
    Raises ValueError for an `initial` of the wrong shape.
    """
    clock = Clock(time.perf_counter(), budget_s, stop)
    if initial is not None:
        initial = problem.checked_choice(initial)
    if sum(cost.size for cost in problem.edge_costs) < CONTRACTED_PAIRS:
        incumbent = Incumbent(problem, clock, on_better)
        incumbent.offer(initial)
        return solve_exact(problem, incumbent, cutoff=cutoff, start=initial, gap=gap, prove=prove)
    small = contract(problem)
    if small.infeasible:
        text = f"no choice is allowed ({small.infeasible}); allow more strategies or pairs"
        why = Infeasibility(np.inf, np.inf, None, None)
        return Solution(Status.INFEASIBLE, None, np.inf, np.inf, clock.seconds, text, "contraction", why)
    incumbent = Incumbent(small.problem, clock, on_better)
    start = None if initial is None else small.project(initial)
    incumbent.offer(start)
    found = solve_contracted(small.problem, incumbent, cutoff=cutoff, start=start, gap=gap, prove=prove, seed=seed)
    return _lifted(problem, small, found, clock)


def solve_contracted(
    problem: Problem,
    incumbent: Incumbent,
    *,
    cutoff: float = np.inf,
    start: np.ndarray | None = None,
    gap: float = 1e-6,
    prove: bool = True,
    seed: int = 0,
    reach: int = OUT_OF_REACH,
) -> Solution:
    """The same for a problem that has been contracted; `reach`: the size up to which the exact search is of use with
    a budget. See solve_exact for the other arguments.
    """
    clock, size = incumbent.clock, base_model(problem).size
    if size > (reach if clock.budget_s is None else min(reach, PROGRAM_SIZE)):
        exact_follows = size <= reach or clock.budget_s is None
        whole = clock.part(LAGRANGIAN_SHARE if exact_follows else 1 - LAST_SHARE)
        search = Lagrangian(problem, incumbent, whole, seed)
        ended = lambda: incumbent.bound >= min(cutoff, threshold(incumbent.cost, gap))  # noqa: E731
        search.run(cutoff, ended)
        while not exact_follows and incumbent.choice is not None and whole.left_s > 0 and not ended():
            search.run(cutoff, ended)
        search.polish(clock)
        if ended() or (incumbent.choice is not None and not exact_follows):
            return _answer(incumbent, cutoff, ended(), gap)
    start = start if incumbent.choice is None else incumbent.choice
    return solve_exact(problem, incumbent, cutoff=cutoff, start=start, gap=gap, prove=prove)


def _answer(incumbent: Incumbent, cutoff: float, proven: bool, gap: float) -> Solution:
    """What the Lagrangian's search has come to. `proven`: nothing of interest costs less."""
    choice, cost, seconds, method = incumbent.choice, incumbent.cost, incumbent.clock.seconds, "Lagrangian"
    bound = min(incumbent.bound, cost)
    if not proven:
        text = f"stopped at a gap of {relative_gap(cost, bound):.2%}; give a larger budget_s"
        return Solution(Status.FEASIBLE, choice, cost, bound, seconds, text, method)
    if choice is not None and cost <= cutoff:
        text = f"proven optimal to a relative gap of {gap:g} by the Lagrangian's bound"
        return Solution(Status.OPTIMAL, choice, cost, bound, seconds, text, method)
    text = f"no choice costs less than the cutoff {cutoff:g}; raise it to see what is best"
    return Solution(Status.CUTOFF, choice, cost, bound, seconds, text, method)


def _lifted(problem: Problem, small: Contraction, found: Solution, clock: Clock) -> Solution:
    """An answer for the contracted problem as one for the problem itself."""
    if found.choice is not None:
        choice = small.lift(found.choice)
        checked = problem.evaluate(choice)
        assert checked.feasible, f"a choice that fits the contracted problem exceeds by {checked.excess_bytes} bytes"
        found = replace(found, choice=choice, cost=checked.cost, bound=min(found.bound, checked.cost))
    why = found.infeasibility
    if why is not None and why.choice is not None:
        why = explain_excess(problem, small.lift(why.choice), why.excess_bound_bytes)
        bound = min(why.excess_bound_bytes, why.smallest_excess_bytes)
        found = replace(found, infeasibility=replace(why, excess_bound_bytes=bound))
        found = replace(found, message=excess_text(problem, found.infeasibility))
    return replace(found, seconds=clock.seconds)
