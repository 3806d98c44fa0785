"""The next plan, where the compiler refuses the program of the best one.

Partitioners have faults, an operation with a partitioning of its own may refuse a layout, and a program may need more
memory than was predicted. What the compiler says decides what is planned next: if it ran out of memory, the best plan
that takes less; if it names a line of the step, the best plan that splits no operation of that line; else, or if that
comes to nothing new, the next of the plan's candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
import itertools
import re
from typing import Any, Protocol, TypeVar

from . import compat
from .errors import CompilerError, PlanError
from .plan import Candidate, Plan
from .search import Status
from .trace import Trace

# Plans that are compiled after the first: compiling a large program takes minutes.
OTHERS = 4
# Of the memory that was predicted for a program that did not fit, so much may the next plan take.
LESS = 0.85
_FRAME = re.compile(r"(\S[^\n:]*:\d+)(?::\d+)? ")
T = TypeVar("T")


class Replan(Protocol):
    """Makes the best plan, for what is asked besides the user's own options.

    Args:
      memory_bytes: the limit per device; None is the user's.
      like: a candidate, whose mesh and layout the plan has.
      whole: lines of the step ("file:line") whose operations are not split.

    Raises:
      PlanError: there is none.
    """

    def __call__(
        self, *, memory_bytes: float | None = None, like: Candidate | None = None, whole: frozenset[str] = frozenset()
    ) -> Plan: ...


def first_that_compiles(plan: Plan, compiled: Callable[[Plan], T], replan: Replan, trace: Trace) -> tuple[Plan, T]:
    """The first of `plan` and those after it that compiles, with a note on the refused ones, and what came of it.

    Args:
      compiled: compiles a plan; its result is passed on.

    Raises:
      CompilerError: `OTHERS` more plans, or as many as there are, were refused too. It is that of the first.
    """
    refused: list[CompilerError] = []
    for made in _plans(plan, refused, replan, trace):
        try:
            found = compiled(made)
        except CompilerError as error:
            refused.append(error)
        else:
            return (replace(made, notes=(*made.notes, _note(refused))) if refused else made), found
    raise refused[0]


def _plans(plan: Plan, refused: list[CompilerError], replan: Replan, trace: Trace) -> Iterator[Plan]:
    """`plan`, then others, each made when the one before has been put into `refused`."""
    yield plan
    limit, whole, lines = None, frozenset(), source_lines(trace)
    tried, candidates = [_decisions(plan)], iter(_candidates(plan))
    while len(tried) <= OTHERS:
        line = next((line for line in _FRAME.findall(refused[-1].said) if line in lines - whole), None)
        learned = refused[-1].out_of_memory or line is not None
        if refused[-1].out_of_memory:
            limit = LESS * plan.peak_memory_bytes
        elif line is not None:
            whole |= {line}
        for like in itertools.chain([None] if learned else [], candidates):
            try:
                plan = replan(memory_bytes=limit, like=like, whole=whole)
            except PlanError:  # nothing fits so little memory, for instance
                continue
            if _decisions(plan) not in tried:
                break
        else:
            return
        tried.append(_decisions(plan))
        yield plan


def _candidates(plan: Plan) -> list[Candidate]:
    """The candidates that may fit, in the order of their predicted (or least possible) times."""
    possible = [c for c in plan.candidates if c.fits or c.status == Status.CUTOFF.name]
    return sorted(possible, key=lambda c: c.step_time_s)


def _decisions(plan: Plan) -> tuple[Any, ...]:
    return plan.mesh, plan.in_shardings, plan.out_shardings, plan.constraints


def _note(refused: list[CompilerError]) -> str:
    plans = "1 plan" if len(refused) == 1 else f"{len(refused)} plans"
    return f"the compiler refused {plans} before this one: {refused[0].summary}"


def source_lines(trace: Trace) -> frozenset[str]:
    """The lines ("file:line") that the operations of a step come from."""
    found, jaxprs = set(), [trace.jaxpr.jaxpr]
    while jaxprs:
        for eqn in jaxprs.pop().eqns:
            found.add(compat.source_line(eqn).partition(" ")[0])
            jaxprs += [sub.jaxpr for sub in compat.subjaxprs(eqn)]
    return frozenset(found - {""})
