"""Prices of memory rows: cutting planes for  max_{p >= 0} min_x cost(x) + p @ (use(x) - limits).

Every choice x is a plane that this dual function lies below; the next prices are the best under the planes so
far (Kelley 1960), drawn towards the best prices known, which keeps them from jumping about.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog

# Share of the way from the best known prices to those that the planes suggest.
PULL = 0.5
# No price above this many times the whole cost per byte of the largest excess seen.
LARGEST = 100.0


@dataclass(eq=False)
class Prices:
    """Planes (cost, over) of the choices seen; over: [A] bytes above the limits. `best` has proven `bound`.
    """

    rows: int
    costs: list[float] = field(default_factory=list)
    over: list[np.ndarray] = field(default_factory=list)
    best: np.ndarray | None = None
    bound: float = -np.inf

    def add(self, cost: float, over: np.ndarray) -> None:
        """A choice that is allowed, whether it fits or not."""
        if not any(cost == c and np.array_equal(over, o) for c, o in zip(self.costs, self.over, strict=True)):
            self.costs.append(cost)
            self.over.append(over)

    def proven(self, price: np.ndarray, bound: float) -> None:
        """A lower bound found at a price."""
        if self.best is None or bound > self.bound:
            self.best, self.bound = price, bound

    def next(self) -> np.ndarray:
        """Prices to try next, cost per byte, [A]."""
        if not self.costs:
            return np.zeros(self.rows)
        costs, over = np.array(self.costs), np.array(self.over)
        worst = over.max()
        if worst <= 0:
            return np.zeros(self.rows)
        unit, scale = np.abs(over).max(), max(np.abs(costs).max(), 1e-300)
        top = LARGEST * unit / worst
        result = linprog(  # in units of scale / unit: max theta, theta <= cost + price @ over
            c=np.append(np.zeros(self.rows), -1.0),
            A_ub=np.concatenate([-over / unit, np.ones((len(costs), 1))], axis=1),
            b_ub=costs / scale,
            bounds=[(0, top)] * self.rows + [(None, None)],
        )
        price = np.maximum(result.x[:-1], 0.0) * scale / unit
        return price if self.best is None else self.best + PULL * (price - self.best)
