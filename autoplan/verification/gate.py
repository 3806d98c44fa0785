"""Planning until the compiled program fits.

A plan's memory is a prediction. Where the compiled program of the best plan takes more than there is, the search goes
on with a limit lower by as much as the prediction was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import MemoryLimitError
from ..plan import Plan
from ..units import format_bytes
from .result import Verification

ATTEMPTS = 4
# Of what the compiled program took more than predicted, so much more is expected of the next plan.
CAUTION = 1.02


def plan_that_fits(plan_within: Callable[[float | None], Plan], verify: Callable[[Plan], Verification]) -> Plan:
    """The best plan whose compiled program fits, with notes of what compiling showed.

    Args:
      plan_within: makes the best plan within a memory limit in bytes; None is the limit that the user gave.
      verify: compiles a plan's program.

    Raises:
      MemoryLimitError: none of `ATTEMPTS` plans fits, or there is none within a limit that takes the compiler's word.
    """
    plan = plan_within(None)
    limit, tried = plan.memory_limit_bytes, []
    for _ in range(ATTEMPTS):
        found = verify(plan)
        if found.peak_memory_bytes <= limit:
            return replace(plan, memory_limit_bytes=limit, notes=(*plan.notes, *_notes(found, tried)))
        tried.append(found)
        factor = CAUTION * found.peak_memory_bytes / max(plan.peak_memory_bytes, 1.0)
        within = min(limit / factor, plan.peak_memory_bytes * (1 - 1e-3))
        try:
            plan = plan_within(within)
        except MemoryLimitError as error:
            raise _nothing_fits(limit, tried) from error
    raise _nothing_fits(limit, tried)


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
