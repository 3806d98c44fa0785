"""Planning until the program compiles and fits.

A plan's memory is a prediction. Where the compiled program of the best plan takes more than there is, the search goes
on with a limit lower by as much as the prediction was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import MemoryLimitError
from ..fallback import Replan, first_that_compiles
from ..plan import Plan
from ..trace import Trace
from ..units import format_bytes
from .result import Verification

ATTEMPTS = 4
# Of what the compiled program took more than predicted, so much more is expected of the next plan.
CAUTION = 1.02


def plan_that_fits(replan: Replan, verify: Callable[[Plan], Verification], trace: Trace) -> Plan:
    """The best plan whose program compiles and fits, with notes of what compiling showed.

    Args:
      replan: makes the best plan within limits.
      verify: compiles a plan's program.

    Raises:
      CompilerError: the compiler refuses all plans.
      MemoryLimitError: none of `ATTEMPTS` plans fits, or there is none within a limit that takes the compiler's word.
    """
    plan = replan()
    limit, tried = plan.memory_limit_bytes, []
    for _ in range(ATTEMPTS):
        plan, found = first_that_compiles(
            plan,
            lambda made: verify(replace(made, memory_limit_bytes=limit)),
            _at_most(plan.memory_limit_bytes, replan),
            trace,
        )
        if found.peak_memory_bytes <= limit:
            return replace(plan, memory_limit_bytes=limit, notes=(*plan.notes, *_notes(found, tried)))
        tried.append(found)
        factor = CAUTION * found.peak_memory_bytes / max(plan.peak_memory_bytes, 1.0)
        within = min(limit / factor, plan.peak_memory_bytes * (1 - 1e-3))
        try:
            plan = replan(memory_bytes=within)
        except MemoryLimitError as error:
            raise _nothing_fits(limit, tried) from error
    raise _nothing_fits(limit, tried)


def _at_most(limit: float, replan: Replan) -> Replan:
    def within(*, memory_bytes: float | None = None, **asked: Any) -> Plan:
        return replan(memory_bytes=limit if memory_bytes is None else memory_bytes, **asked)

    return within


def _notes(found: Verification, tried: list[Verification]) -> list[str]:
    peak = format_bytes(found.peak_memory_bytes)
    notes = [f"compiled: {peak} per device ({found.memory_error:+.0%} predicted), "
             f"{found.unplanned_share:.1%} of the traffic not planned"]  # fmt: skip
    if tried:
        taken = ", ".join(format_bytes(one.peak_memory_bytes) for one in tried)
        notes.append(f"{len(tried)} faster {'plan' if len(tried) == 1 else 'plans'} did not fit once compiled: {taken}")
    return notes


def _nothing_fits(limit: float, tried: list[Verification]) -> MemoryLimitError:
    least = min(one.peak_memory_bytes for one in tried)
    return MemoryLimitError(
        "the compiled program must fit the memory of each device", smallest_bytes=int(least),
        got=f"a limit of {format_bytes(limit)}; the smallest compiled plan takes {format_bytes(least)}",
        action="Raise `memory`, use more devices, a smaller batch, or jax.checkpoint",
    )  # fmt: skip
