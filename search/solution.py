"""What a solver answers: a choice, its cost, a proven bound, and how honest that is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

# Costs below this are zero for the purpose of a relative gap (seconds: far below any operation's time).
COST_EPSILON = 1e-15


class Status(Enum):
    """How a solve ended.

    OPTIMAL: proven to the tolerance asked for. FEASIBLE: a choice and a gap (out of time, or a solver gave
    up). INFEASIBLE: proven that no choice is allowed or fits. TIME_LIMIT: out of time without a choice.
    CUTOFF: proven that no choice costs less than the cutoff.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time limit"
    CUTOFF = "cutoff"


@dataclass(frozen=True)
class BlockingBuffer:
    """A buffer live at the row that no choice can hold; `copies` is its multiplicity there."""

    buffer: int
    copies: float
    size_bytes: float


@dataclass(frozen=True)
class Infeasibility:
    """Why no choice fits, and what would.

    smallest_excess_bytes: raising every limit by this much admits `choice` (None when forbidden pairs alone
    rule everything out: then no limit helps, and the excess is inf). excess_bound_bytes: proven, no choice
    needs less; equal to the former when the search for it ended. row: the row that `choice` exceeds most.
    buffers: what is live there, largest first.
    """

    smallest_excess_bytes: float
    excess_bound_bytes: float
    row: int | None
    choice: np.ndarray | None
    buffers: tuple[BlockingBuffer, ...] = ()


@dataclass(frozen=True)
class Solution:
    """`choice` is int64 [N] or None. `bound` <= cost of every choice. `gap` = (cost - bound) / |cost|, inf
    without a choice. `message` gives the cause of the status and the next action. `method` says what proved
    the end.
    """

    status: Status
    choice: np.ndarray | None
    cost: float
    bound: float
    seconds: float
    message: str
    method: str = ""
    infeasibility: Infeasibility | None = None

    @property
    def gap(self) -> float:
        return relative_gap(self.cost, self.bound)


def relative_gap(cost: float, bound: float) -> float:
    """(cost - bound) / max(|cost|, COST_EPSILON), not below zero; inf when there is no cost."""
    if not np.isfinite(cost):
        return np.inf
    return max(cost - bound, 0.0) / max(abs(cost), COST_EPSILON)
