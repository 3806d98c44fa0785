"""One model to its optimum: presolve, dual ascent, fixing, and HiGHS for what is left.

The parts share one number, the threshold: only choices that cost less are of interest, because a choice that
is good enough is known or because the caller's cutoff says so. What cannot cost less is dropped, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .anytime import Clock
from .ascent import Ascent
from .highs import program_of, run_highs
from .local import Descent
from .model import Model, cost_of, fits, use_of
from .presolve import presolve
from .prices import Prices
from .solution import COST_EPSILON
from .work import Reduction

# A relative gap below this is rounding: sums of 1e4 costs in float64 differ by about 1e-12 of their value.
SMALLEST_GAP = 1e-9
# One round of dual ascent: so many double sweeps, and those whose labellings are improved and tried.
ROUND_SWEEPS, LABEL_SWEEPS, MAX_ROUNDS = 15, (0, 1, 3, 7, 14), 25
PRICE_STEPS, PRICE_SWEEPS = 6, 3
# After the LP, programs over the strategies that can cost less than the bound plus such a share of the gap.
KERNELS = (0.15, 1.0)
# Another round pays when the second half of this one closed such a share of the gap, or dropped such a share
# of the strategies. A program with more pairs than PROGRAM_SIZE takes HiGHS more than a few seconds: the
# ascent goes on longer.
SLOW, SLOW_LARGE, ROUND_SHARE, PROGRAM_SIZE = 0.3, 0.02, 0.2, 300_000


def threshold(cost: float, gap: float) -> float:
    """Choices at or above this are of no interest once `cost` is known: the gap asked for is wider."""
    if not np.isfinite(cost):
        return np.inf
    return cost - (1 - 1e-6) * max(gap, SMALLEST_GAP) * max(abs(cost), COST_EPSILON)


@dataclass(eq=False)
class Search:
    """What is known about one model while it is solved. `best`: positions in the model given, or None.

    `ceiling`: choices at or above it are of no interest to the caller. `prove`: whether to go on when a good
    choice is known but the gap is not closed. `bound` holds for all choices of the
    model, or is at least the threshold. `trace`: what was done, a line each.
    """

    model: Model
    ceiling: float
    gap: float
    clock: Clock
    prove: bool = True
    best: np.ndarray | None = None
    cost: float = np.inf
    bound: float = -np.inf
    proven: bool = False
    method: str = ""
    detail: str = ""
    trace: list[str] = field(default_factory=list)
    prices: Prices = field(init=False)

    def __post_init__(self) -> None:
        self.prices = Prices(self.model.num_rows)

    @property
    def threshold(self) -> float:
        return min(self.ceiling, threshold(self.cost, self.gap))

    def consider(self, choice: np.ndarray) -> None:
        """Keeps a choice of the model given, if it fits and is the best yet."""
        cost = cost_of(self.model, choice)
        if self.model.num_rows and np.isfinite(cost):
            self.prices.add(cost, use_of(self.model, choice) - self.model.limits)
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

    @property
    def rows(self) -> np.ndarray:
        """The last model's memory rows, as numbers of the first's."""
        rows = self.rungs[0].rows
        for rung in self.rungs[1:]:
            rows = rows[rung.rows]
        return rows

    def lift(self, choice: np.ndarray) -> np.ndarray:
        for rung in reversed(self.rungs):
            choice = rung.lift(choice)
        return choice

    def project(self, choice: np.ndarray) -> np.ndarray:
        for rung in self.rungs:
            choice = rung.project(choice)
        return choice


def solve_model(search: Search, starts: Sequence[np.ndarray] = ()) -> Search:
    """Finds the least-cost choice of `search.model` below its ceiling, or proves there is none.

    starts: choices of the model to improve first; they need not fit.
    """
    ladder = Ladder((presolve(search.model),))
    if not ladder.rungs[-1].infeasible:
        descent = Descent(ladder.model)
        for choice in starts:
            search.consider(choice)
            search.consider(ladder.lift(descent.improve(ladder.project(choice))))
    ascent: Ascent | None = None
    for _ in range(MAX_ROUNDS):
        if (ended := _nothing_left(search, ladder)) is not None:
            return ended
        ascent, ladder, more = _round(search, ladder, ascent)
        if ascent.bound >= search.threshold:
            return search.end("dual ascent")
        if not more or search.clock.left_s <= 0:
            break
    return _finish(search, ladder)


def _nothing_left(search: Search, ladder: Ladder) -> Search | None:
    """The end of a search whose last rung has no choice left to make."""
    last = ladder.rungs[-1]
    if last.infeasible:
        search.detail = last.infeasible
    elif last.model.num_nodes:
        return None
    else:
        search.consider(ladder.lift(np.zeros(0, dtype=np.int64)))
        if len(ladder.rungs) == 1:  # nothing was dropped for costing too much: this is the optimum itself
            search.bound = max(search.bound, min(search.ceiling, search.cost))
    return search.end("presolve")


def _round(search: Search, ladder: Ladder, older: Ascent | None) -> tuple[Ascent, Ladder, bool]:
    """Some sweeps, then all goes that cannot beat the threshold. Also says whether another round may pay."""
    model = ladder.model
    if older is not None and older.model is model:  # the last round dropped nothing: go on from where it ended
        ascent = older
    else:
        ascent = Ascent(model, search.cost)
        if older is not None:
            ascent.inherit(older, ladder.rungs[-1])
    descent = Descent(model)
    if search.best is not None:
        search.consider(ladder.lift(descent.improve(ladder.project(search.best))))
    if model.num_rows and _price(search, ladder, ascent, descent):
        return ascent, ladder, False
    history = [ascent.bound]
    for sweep in range(ROUND_SWEEPS):
        labels = [ascent.sweep(forward=True), ascent.sweep(forward=False)]
        if sweep in LABEL_SWEEPS:
            for choice in labels:
                _try(search, ladder, ascent, descent, choice)
        history.append(ascent.bound)
        if search.raise_bound(ascent.bound) or search.clock.left_s <= 0:
            return ascent, ladder, False
    kept = [np.flatnonzero(margin < search.threshold) for margin in ascent.margins()]
    search.raise_bound(ascent.bound)
    before, after = sum(map(len, model.costs)), sum(map(len, kept))
    if all(map(len, kept)) and after < before:
        ladder = Ladder((*ladder.rungs, presolve(model, kept=kept, settled=True)))
    elif after < before:  # a node without a strategy: nothing beats the threshold
        ascent.bound = search.threshold
    halfway = history[len(history) // 2]
    gained = (ascent.bound - halfway) / max(search.threshold - halfway, 1e-300)
    search.trace.append(
        f"bound {ascent.bound:.6g}, best {search.cost:.6g}, {search.clock.seconds:.2f} s; {after} of {before}"
        f" strategies kept; now {ladder.model.num_nodes} nodes, {ladder.model.size} pairs"
    )
    large = ladder.model.size > PROGRAM_SIZE
    return ascent, ladder, gained > (SLOW_LARGE if large else SLOW) or after < (1 - ROUND_SHARE) * before


def _try(search: Search, ladder: Ladder, ascent: Ascent, descent: Descent, choice: np.ndarray) -> None:
    """Improves a labelling at the ascent's prices, and from there within the limits."""
    choice = ascent.improve(choice)
    if ladder.model.num_rows:
        search.consider(ladder.lift(choice))
    search.consider(ladder.lift(descent.improve(choice)))


def _price(search: Search, ladder: Ladder, ascent: Ascent, descent: Descent) -> bool:
    """Looks for good prices of the memory rows, a few sweeps at each; True when a bound ends the search."""
    for _ in range(PRICE_STEPS):
        for _ in range(PRICE_SWEEPS):
            labels = [ascent.sweep(forward=True), ascent.sweep(forward=False)]
        if search.raise_bound(ascent.bound) or search.clock.left_s <= 0:
            return True
        search.prices.proven(ascent.price_of(ladder.rows, search.model.num_rows), ascent.bound)
        _try(search, ladder, ascent, descent, labels[-1])
        ascent.set_price(search.prices.next()[ladder.rows])
    ascent.set_price(search.prices.best[ladder.rows])
    return False


def _finish(search: Search, ladder: Ladder) -> Search:
    """HiGHS on the last rung: the LP relaxation, mostly integral; then programs on what its duals leave."""
    if (ended := _nothing_left(search, ladder)) is not None:
        return ended
    if search.clock.left_s <= 0:
        search.detail = "out of time before HiGHS"
        return search
    margins, support = _relaxation(search, ladder)
    if support is not None and search.bound < search.threshold:
        _kernel(search, ladder, support, search.bound)  # a good choice; what it leaves out may still be better
    for share in KERNELS:
        if search.bound >= search.threshold:
            return search.end("HiGHS")
        if not search.prove and search.best is not None:
            search.detail = "no proof was asked for"
            break
        if search.clock.left_s <= 0:
            search.detail = search.detail or "out of time"
            break
        limit = search.threshold
        if np.isfinite(limit) and np.isfinite(search.bound):
            limit = search.bound + share * (search.threshold - search.bound)
        _kernel(search, ladder, [np.flatnonzero(margin < limit) for margin in margins], limit)
    return search.end("HiGHS") if search.bound >= search.threshold else search


def _relaxation(search: Search, ladder: Ladder) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Solves the LP relaxation: (margins, support by node or None without a solution).

    Its duals are messages and prices: a bound of our own, and margins. Few nodes have several strategies with a
    positive share, so the program over those is small and its optimum close (RENS: T. Berthold, 2014).
    """
    model = ladder.model
    program = program_of(model, integer=False)
    answer = run_highs(program, time_limit_s=search.clock.limit_s, gap=0.0)
    search.detail, support = answer.detail, None
    search.trace.append(
        f"LP: {len(program.cost)} columns, {answer.objective:.9g}, {search.clock.seconds:.2f} s"
    )
    if answer.values is not None:
        choice, support = program.choice(answer.values), program.support(answer.values)
        for guess in (choice, Descent(model).improve(choice)):
            search.consider(ladder.lift(guess))
    if answer.duals is None:
        if answer.infeasible:
            search.raise_bound(np.inf)
        return [np.full(len(c), -np.inf) for c in model.costs], support
    ascent = Ascent(model)
    ascent.messages, price = program.messages(answer.duals)
    ascent.set_price(price)
    margins = ascent.margins()
    search.raise_bound(ascent.bound)
    return margins, support


def _kernel(search: Search, ladder: Ladder, kept: list[np.ndarray], limit: float) -> None:
    """Solves the program over the strategies `kept`: any choice with another costs `limit` or more."""
    if not all(map(len, kept)):
        search.raise_bound(limit)
        return
    ladder = Ladder((*ladder.rungs, presolve(ladder.model, kept=kept, settled=True)))
    bound = np.inf
    if ladder.model.num_nodes and not ladder.rungs[-1].infeasible:
        program = program_of(ladder.model)
        answer = run_highs(
            program, time_limit_s=search.clock.limit_s, gap=0.5 * max(search.gap, SMALLEST_GAP)
        )
        if answer.values is not None:
            search.consider(ladder.lift(program.choice(answer.values)))
        bound, search.detail = answer.bound, answer.detail
        search.trace.append(
            f"MILP below {limit:.9g}: {sum(map(len, kept))} strategies, {len(program.cost)} columns,"
            f" best {search.cost:.9g}, bound {bound:.9g}, {search.clock.seconds:.2f} s {answer.detail}"
        )
    elif not ladder.rungs[-1].infeasible:
        search.consider(ladder.lift(np.zeros(0, dtype=np.int64)))
        bound = cost_of(search.model, ladder.lift(np.zeros(0, dtype=np.int64)))
    # This ends the search only if the choice holds and costs what HiGHS says.
    search.raise_bound(min(limit, bound))
