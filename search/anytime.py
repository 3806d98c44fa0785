"""What all solvers share while they run: the clock, and the best choice known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import time

import numpy as np

from .problem import Problem


@dataclass(frozen=True)
class Clock:
    """Time left of a budget (None: no limit), from `started` (time.perf_counter seconds); none once stop() says so."""

    started: float
    budget_s: float | None
    stop: Callable[[], bool] | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def left_s(self) -> float:
        if self.stop is not None and self.stop():
            return 0.0
        return np.inf if self.budget_s is None else self.budget_s - self.seconds

    @property
    def limit_s(self) -> float | None:
        """Time left as solvers take it: None without a limit."""
        return None if self.budget_s is None else max(self.left_s, 0.0)

    def part(self, share: float) -> Clock:
        """A clock that ends when `share` of the time left has passed."""
        return self if self.budget_s is None else Clock(self.started, self.seconds + share * self.left_s, self.stop)


@dataclass(frozen=True)
class Progress:
    """A better choice was found: after so many seconds, at this cost, when this much was the proven bound."""

    seconds: float
    cost: float
    bound: float


@dataclass(eq=False)
class Incumbent:
    """The best choice known to hold every row of a problem. on_better is called with each that is better."""

    problem: Problem
    clock: Clock
    on_better: Callable[[Progress], object] | None = None
    choice: np.ndarray | None = None
    cost: float = np.inf
    bound: float = -np.inf

    def offer(self, choice: np.ndarray | None) -> bool:
        """Keeps `choice` if it is feasible and cheaper; True if it is feasible."""
        if choice is None:
            return False
        found = self.problem.evaluate(choice)
        if found.feasible and found.cost < self.cost:
            self.choice, self.cost = np.asarray(choice, dtype=np.int64), found.cost
            if self.on_better is not None:
                self.on_better(Progress(self.clock.seconds, self.cost, min(self.bound, self.cost)))
        return found.feasible
