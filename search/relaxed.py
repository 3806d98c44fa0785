"""One model to its optimum: presolve, dual ascent, fixing, and HiGHS for what is left.

The parts share one number, the threshold: only choices that cost less are of interest, because a choice that is good
enough is known or because the caller's cutoff says so. What cannot cost less is dropped, exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from .ascent import Ascent
from .highs import program_of, run_highs
from .model import Model, cost_of, fits
from .presolve import presolve
from .solution import COST_EPSILON
from .work import Reduction

# A relative gap below this is rounding: sums of 1e4 costs in float64 differ by about 1e-12 of their value.
SMALLEST_GAP = 1e-9
MAX_SWEEPS = 300
# The ascent ends when this many double sweeps close less than this share of what is left of the gap.
STALL_SWEEPS, STALL_SHARE = 10, 0.02
MAX_ROUNDS = 6
# Another round of presolve and ascent pays when fixing drops at least this share of the strategies.
ROUND_SHARE = 0.1


@dataclass(frozen=True)
class Clock:
    """Time left of a budget (None: no limit), from `started` (time.perf_counter seconds)."""

    started: float
    budget_s: float | None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def left_s(self) -> float:
        return np.inf if self.budget_s is None else self.budget_s - self.seconds


def threshold(cost: float, gap: float) -> float:
    """Choices at or above this are of no interest once `cost` is known: they are better by less than the gap."""
    return cost - max(gap, SMALLEST_GAP) * max(abs(cost), COST_EPSILON) if np.isfinite(cost) else np.inf


@dataclass(eq=False)
class Search:
    """What is known about one model while it is solved. `best`: positions in the model given, or None.

    `ceiling`: choices at or above it are of no interest to the caller. `bound` holds for all choices of the model,
    or is at least the threshold. `trace`: what was done, a line each.
    """

    model: Model
    ceiling: float
    gap: float
    clock: Clock
    best: np.ndarray | None = None
    cost: float = np.inf
    bound: float = -np.inf
    proven: bool = False
    method: str = ""
    detail: str = ""
    trace: list[str] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        return min(self.ceiling, threshold(self.cost, self.gap))

    def consider(self, choice: np.ndarray) -> None:
        """Keeps a choice of the model given, if it fits and is the best yet."""
        cost = cost_of(self.model, choice)
        if cost < self.cost and fits(self.model, choice):
            self.best, self.cost = choice, cost

    def raise_bound(self, bound: float) -> bool:
        """A bound for what has not been dropped; True when that ends the search."""
        self.bound = max(self.bound, min(bound, self.threshold))
        return bound >= self.threshold

    def end(self, method: str) -> Search:
        """All that is left costs at least the threshold."""
        self.bound, self.proven, self.method = max(self.bound, self.threshold), True, method
        if np.isfinite(self.cost):
            self.bound = min(self.bound, self.cost)
        return self


@dataclass(frozen=True, eq=False)
class Ladder:
    """Reductions one after another: the last rung's model, and the way back to the first."""

    rungs: tuple[Reduction, ...]

    @property
    def model(self) -> Model:
        return self.rungs[-1].model

    def lift(self, choice: np.ndarray) -> np.ndarray:
        for rung in reversed(self.rungs):
            choice = rung.lift(choice)
        return choice

    def project(self, choice: np.ndarray) -> np.ndarray:
        for rung in self.rungs:
            choice = rung.project(choice)
        return choice


def solve_model(search: Search, start: np.ndarray | None = None) -> Search:
    """Finds the least-cost choice of `search.model` below its ceiling, or proves there is none.

    start: a choice to improve first; it need not fit.
    """
    ladder = Ladder((presolve(search.model),))
    if start is not None:
        search.consider(start)
    for _ in range(MAX_ROUNDS):
        if ladder.rungs[-1].infeasible:
            search.detail = ladder.rungs[-1].infeasible
            return search.end("presolve")
        if not ladder.model.num_nodes:
            search.consider(ladder.lift(np.zeros(0, dtype=np.int64)))
            return search.end("presolve")
        ascent = climb(search, ladder)
        if search.raise_bound(ascent.bound):
            return search.end("dual ascent")
        kept = [np.flatnonzero(m < search.threshold) for m in ascent.margins()]
        if search.raise_bound(ascent.bound) or not all(len(k) for k in kept):
            return search.end("dual ascent")
        before, after = sum(map(len, ladder.model.costs)), sum(map(len, kept))
        if after < before:
            ladder = Ladder((*ladder.rungs, presolve(ladder.model, kept=kept)))
        search.trace.append(f"{ladder.model.num_nodes} nodes, {after} of {before} strategies, {ladder.model.size} pairs")
        if after > (1 - ROUND_SHARE) * before or search.clock.left_s <= 0:
            break
    return _finish(search, ladder)


def climb(search: Search, ladder: Ladder) -> Ascent:
    """Dual ascent on the last rung until the bound ends the search, stalls, or time is up."""
    model = ladder.model
    ascent = Ascent(model, search.cost)
    if search.best is not None:
        search.consider(ladder.lift(ascent.improve(ladder.project(search.best))))
    history: list[float] = []
    for sweep in range(MAX_SWEEPS):
        labels = [ascent.sweep(forward=True), ascent.sweep(forward=False)]
        if sweep < 4 or sweep % 5 == 0:
            for choice in labels:
                search.consider(ladder.lift(ascent.improve(choice)))
        history.append(ascent.bound)
        if ascent.bound >= search.threshold or search.clock.left_s <= 0:
            break
        if len(history) > STALL_SWEEPS and _stalled(history, search.threshold):
            break
    search.trace.append(f"{len(history)} double sweeps, bound {ascent.bound:.6g}, best {search.cost:.6g}")
    return ascent


def _stalled(history: list[float], goal: float) -> bool:
    gained = history[-1] - history[-1 - STALL_SWEEPS]
    left = goal - history[-1] if np.isfinite(goal) else abs(history[-1])
    return gained < STALL_SHARE * left


def _finish(search: Search, ladder: Ladder) -> Search:
    """HiGHS on the last rung."""
    if ladder.rungs[-1].infeasible or not ladder.model.num_nodes:
        if not ladder.rungs[-1].infeasible:
            search.consider(ladder.lift(np.zeros(0, dtype=np.int64)))
        return search.end("presolve")
    if search.clock.left_s <= 0:
        search.detail = "out of time before HiGHS"
        return search
    program = program_of(ladder.model)
    left = None if search.clock.budget_s is None else search.clock.left_s
    answer = run_highs(program, time_limit_s=left, gap=0.5 * max(search.gap, SMALLEST_GAP))
    search.trace.append(f"HiGHS: {len(program.cost)} columns, {answer.detail}, bound {answer.bound:.6g}")
    search.method, search.detail = "HiGHS", answer.detail
    if answer.values is not None:
        search.consider(ladder.lift(program.choice(answer.values)))
    if search.raise_bound(answer.bound):  # not answer.finished: the choice must hold and cost what HiGHS says
        return search.end("HiGHS")
    return search


