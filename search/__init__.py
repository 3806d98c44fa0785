"""What to choose: one strategy per node, least total cost, memory limits held. Knows nothing of JAX."""

from .anytime import Progress
from .brute import brute_force
from .highs import solve_highs
from .problem import Buffer, Evaluation, Problem
from .solution import BlockingBuffer, Infeasibility, Solution, Status, relative_gap
from .solve import solve

__all__ = [
    "BlockingBuffer",
    "Buffer",
    "Evaluation",
    "Infeasibility",
    "Problem",
    "Progress",
    "Solution",
    "Status",
    "brute_force",
    "relative_gap",
    "solve",
    "solve_highs",
]
