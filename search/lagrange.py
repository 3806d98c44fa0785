"""Large problems: prices for memory rows, bounds from dual ascent, choices from moves on forests.

The Lagrangian dual of the memory rows is  max over prices p >= 0 of  min_x cost(x) + p @ (use(x) - limits).  A round

    takes some steps up the dual (Polyak's step length, towards the best known cost) with one move of a random
        forest after each: a choice that stays near the minimum while the prices move;
    makes one double sweep of dual ascent, whose bound holds for every choice, and whose choices, improved, replace
        the present one where they are cheaper at the prices;
    now and then drives a copy of the present choice within the limits, its prices rising only where it exceeds them.

Every choice that fits on the way is looked at. B. Polyak, "Minimization of unsmooth functionals" (1969); M. Held,
P. Wolfe, H. Crowder, "Validation of subgradient optimization" (1974), for the decay of the steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .anytime import Clock, Incumbent
from .flat import Costs, Flat
from .forest import Forest
from .problem import Problem
from .sweeps import Sweeps

# Forests in use, and after how many rounds one is replaced by a new one (making one takes 4 to 6 moves' time).
FORESTS, RENEWED_EVERY = 16, 3
FIRST_SWEEPS, LAST_SWEEPS, FIRST_MOVES = 15, 60, 10
STEPS, DRIVEN_EVERY, LABEL_MOVES = 10, 5, 3
# Polyak's factor: where it starts, what it is multiplied with after so many rounds, and where the search ends.
FACTOR, DECAY, DECAYS_EVERY, LEAST_FACTOR = 0.1, 0.7, 20, 1e-3
# A drive's rising prices: most steps, growth from one to the next, the first as a share of the gap.
DRIVE_STEPS, DRIVE_GROWTH, DRIVE_FIRST = 60, 1.4, 1e-3
# While nothing is known to fit: the growths tried one after another, from the first step's share of the gap up by a
# factor of BLIND_RANGE, led by dual ascent after every so many steps.
BLIND_GROWTHS, BLIND_FIRST, BLIND_RANGE, LED_EVERY = (1.6, 1.3, 1.15, 1.08, 1.04), 1e-6, 1e12, 10


class Lagrangian:
    """The search on one problem whose limits are all finite. Deterministic for a given seed, but for where time
    ends it. What it finds it gives to `incumbent`.
    """

    def __init__(self, problem: Problem, incumbent: Incumbent, clock: Clock, seed: int) -> None:
        self.problem, self.flat, self.incumbent, self._clock = problem, Flat(problem), incumbent, clock
        self._sweeps = Sweeps(self.flat)
        self._rng = np.random.default_rng(seed)
        self._forests: list[Forest] = []
        self._moves = 0
        self._room = problem.limits + problem.row_tolerance_bytes
        self._unit = float(np.abs(problem.limits).max(initial=1.0))  # over / _unit is of order 1, price * _unit a cost
        self._price, self._bound = np.zeros(problem.num_rows), -np.inf
        self.cost = np.inf

    def run(self, cutoff: float, ended: Callable[[], bool]) -> None:
        """Searches until the steps have become small, time is over, or ended() says so; a second run starts at the
        best prices of the first. cutoff: only cheaper choices are of interest.
        """
        self.cost = min(cutoff, self.incumbent.cost)
        price, costs = self._price, self.flat.priced(self._price)
        for _ in range(FIRST_SWEEPS):
            choice = self._double_sweep(price, costs)[-1]
        choice = self._move(choice, costs, FIRST_MOVES)
        self._look(choice)
        if not np.isfinite(self.cost) and not self._first_fit(choice, price, costs):
            return
        rounds, factor = 0, FACTOR
        while factor > LEAST_FACTOR and self._clock.left_s > 0 and not ended():
            for _ in range(STEPS):
                price = self._step(choice, price, costs, factor)
                costs = self.flat.priced(price)
                choice = self._move(choice, costs, 1)
                self._look(choice)
            suggested = [self._move(c, costs, LABEL_MOVES) for c in self._double_sweep(price, costs)]
            choice = self._cheapest([choice, *suggested], costs)
            rounds += 1
            if rounds % DECAYS_EVERY == 0:
                factor *= DECAY
            if rounds % DRIVEN_EVERY == 0:
                self._drive(choice, price, DRIVE_FIRST * (self.cost - self._bound), DRIVE_GROWTH, DRIVE_STEPS)
            if rounds % RENEWED_EVERY == 0:
                self._forests[(rounds // RENEWED_EVERY) % len(self._forests)] = Forest(self.flat, self._rng)

    def _double_sweep(self, price: np.ndarray, costs: Costs) -> list[np.ndarray]:
        """The choices that the two sweeps suggest; the second sweep's bound is noted."""
        _, first = self._sweeps.sweep(costs, forward=True)
        bound, second = self._sweeps.sweep(costs, forward=False)
        if bound > self._bound:
            self._bound, self._price = bound, price
            self.incumbent.bound = max(self.incumbent.bound, bound)
        return [first, second]

    def polish(self, clock: Clock) -> None:
        """The bound at the best prices, with more sweeps."""
        costs = self.flat.priced(self._price)
        for _ in range(LAST_SWEEPS):
            if clock.left_s <= 0:
                break
            self._double_sweep(self._price, costs)

    def _move(self, choice: np.ndarray, costs: Costs, count: int) -> np.ndarray:
        for _ in range(count):
            if len(self._forests) < FORESTS:
                self._forests.append(Forest(self.flat, self._rng))
            choice = self._forests[self._moves % len(self._forests)].improve(choice, costs)
            self._moves += 1
        return choice

    def _cheapest(self, choices: list[np.ndarray], costs: Costs) -> np.ndarray:
        return min(choices, key=lambda choice: self.flat.cost(choice, costs))

    def _look(self, choice: np.ndarray) -> np.ndarray:
        """Bytes at every row, [R]; a choice that fits and is the best yet is offered."""
        rows = self.flat.rows_bytes(choice)
        if (rows <= self._room).all():
            cost = self.problem.cost(choice)
            if cost < self.cost and self.incumbent.offer(choice):
                self.cost = self.incumbent.cost
        return rows

    def _step(self, choice: np.ndarray, price: np.ndarray, costs: Costs, factor: float) -> np.ndarray:
        """The next prices by Polyak's rule; rows that have no price and room are left out."""
        over = (self.flat.rows_bytes(choice) - self.problem.limits) / self._unit
        over[(price <= 0) & (over < 0)] = 0.0
        steepness = float(over @ over)
        if steepness == 0.0:
            return price
        missing = max(self.cost - self.flat.cost(choice, costs), 1e-3 * (self.cost - self._bound))
        return np.maximum(0.0, price + factor * missing / steepness * over / self._unit)

    def _drive(
        self, choice: np.ndarray, price: np.ndarray, first: float, growth: float, steps: int, *, led: bool = False
    ) -> None:
        """Brings `choice` within the limits, if prices that rise, faster and faster, where it exceeds them can do so.

        first: the first step's rise, a cost shared among the rows by how much they are exceeded. led: now and then
        goes on from what dual ascent suggests.
        """
        for step in range(steps):
            over = np.maximum(0.0, self._look(choice) - self._room) / self._unit
            if not over.any() or self._clock.left_s <= 0:
                return
            price = price + first * growth**step * over / over.sum() / self._unit
            costs = self.flat.priced(price)
            if led and step % LED_EVERY == LED_EVERY - 1:
                choice = self._cheapest([choice, *self._double_sweep(price, costs)], costs)
            choice = self._move(choice, costs, 1)

    def _first_fit(self, choice: np.ndarray, price: np.ndarray, costs: Costs) -> bool:
        """Whether a first choice that fits was found, by slower and slower drives."""
        cost = self.flat.cost(choice, costs)
        first = BLIND_FIRST * (cost - self._bound + 1e-6 * (abs(cost) + self.flat.cap))
        for growth in BLIND_GROWTHS:
            self._drive(choice, price, first, growth, int(np.log(BLIND_RANGE) / np.log(growth)), led=True)
            if np.isfinite(self.cost):
                return True
        return False
