"""Memory rows: which to add, and what the least excess of any choice is.

The least excess is  min_x max_r (use_r(x) - limits[r])  over allowed choices: at most 0 when something fits,
and otherwise by how much every limit must rise. Its Lagrangian dual is

    max over weights w >= 0, sum w = 1, of  min_x sum_r w_r (use_r(x) - limits[r])

whose inner problem has no memory rows at all: weighted bytes are its costs (`model.priced`), and elimination
and dual ascent solve it fast. The weights come from cutting planes over the choices seen (`_next_weights`;
Kelley 1960). Where the dual leaves a gap that matters, the local-polytope program with one more variable
closes it (`_program`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from .anytime import Clock
from .highs import program_of, run_highs
from .model import Model, costless, priced, with_rows
from .presolve import STEPS, drop_slack_rows, presolve
from .problem import Problem
from .relaxed import Search, solve_model

ROWS_AT_ONCE = 4
# Rows that share this much of their bytes say nearly the same.
OVERLAP = 0.9
CONSIDERED_ROWS = 64
CUTS = 30
# Every other cut gives this share of the weight evenly to all rows.
EVEN_SHARE = 0.05
# Bytes, as a share of the fullest row, below which an excess is not told from another.
EXCESS_GAP = 1e-6
# Nodes of the program's search tree spent on the exact smallest limit once it is proven that nothing fits.
EXACT_NODES = 50
EXCESS_STEPS = tuple(
    step for step in STEPS if step is not drop_slack_rows
)  # a row that fits may still be the fullest


def violated_rows(
    problem: Problem, choice: np.ndarray, known: np.ndarray, floor_bytes: float = 0.0
) -> np.ndarray:
    """A few rows not `known` that `choice` exceeds by over `floor_bytes`: the worst, then unlike ones."""
    sizes = problem.buffer_bytes(choice)
    over = problem.live @ sizes - problem.limits
    over[known] = -np.inf
    worst = np.argsort(-over, kind="stable")[:CONSIDERED_ROWS]
    worst = worst[over[worst] > floor_bytes + problem.row_tolerance_bytes[worst]]
    live = problem.live_at(worst) * sizes
    picked: list[int] = []
    for n in range(len(worst)):
        shared = [np.minimum(live[n], live[p]).sum() / max(live[n].sum(), 1.0) for p in picked]
        if not any(share > OVERLAP for share in shared):
            picked.append(n)
        if len(picked) == ROWS_AT_ONCE:
            break
    return worst[picked]


@dataclass(frozen=True, eq=False)
class Excess:
    """`choice` exceeds its worst row by `excess_bytes`, none by less than `bound_bytes`; `rows` decide."""

    choice: np.ndarray
    excess_bytes: float
    bound_bytes: float
    rows: np.ndarray


def least_excess(problem: Problem, base: Model, start: np.ndarray, clock: Clock) -> Excess:
    """Minimises the excess over all rows; ends early at a choice that fits.

    start: an allowed choice [N] (finite cost).
    """
    free = costless(base)
    slack = EXCESS_GAP * float(problem.rows_bytes(start).max(initial=1.0))
    even = np.where(np.isfinite(problem.limits), 1.0, 0.0) / max(1, np.isfinite(problem.limits).sum())
    seen = [problem.rows_bytes(start) - problem.limits]
    best, excess, bound = start, float(seen[0].max()), -np.inf
    weights, used = np.zeros(problem.num_rows), np.zeros(problem.num_rows, dtype=bool)
    weights[int(np.argmax(seen[0]))] = 1.0
    for cut in range(CUTS):
        if excess <= 0 or clock.left_s <= 0:
            break
        # Pure weights give the bound; a share for every row makes the choice good where they are zero, too.
        query = weights if cut % 2 == 0 else (1 - EVEN_SHARE) * weights + EVEN_SHARE * even
        used |= weights > 0
        finite = query > 0
        shift = float(query[finite] @ problem.limits[finite])
        model = replace(priced(free, problem, query), offset=0.0)
        search = solve_model(Search(model, np.inf, 0.1 * EXCESS_GAP, clock))
        bound = max(bound, search.bound - shift)
        if search.best is None:
            break
        seen.append(problem.rows_bytes(search.best) - problem.limits)
        used[int(np.argmax(seen[-1]))] = True
        if seen[-1].max() < excess:
            best, excess = search.best, float(seen[-1].max())
        if cut % 2 == 0:
            continue
        weights, promise = _next_weights(np.array(seen))
        if excess - bound <= slack or promise - bound <= slack:
            break
    rows = np.flatnonzero(used)
    if excess > 0 and excess - bound > slack and clock.left_s > 0:
        best, excess, bound, rows = _program(problem, free, best, excess, bound, rows, clock)
    return Excess(best, excess, min(bound, excess), rows)


def _next_weights(seen: np.ndarray) -> tuple[np.ndarray, float]:
    """(w, value): the w that maximises min_k w @ seen[k] over w >= 0, sum w = 1; seen: [K, R] bytes.

    Solved as its dual, the mixture of choices with the least largest row; w are the row multipliers.
    """
    count, rows = seen.shape
    finite = np.flatnonzero(np.isfinite(seen).all(axis=0))
    unit = np.abs(seen[:, finite]).max() or 1.0
    top = np.concatenate([seen[:, finite].T / unit, -np.ones((len(finite), 1))], axis=1)
    result = linprog(
        c=np.append(np.zeros(count), 1.0),
        A_ub=top,
        b_ub=np.zeros(len(finite)),
        A_eq=np.append(np.ones(count), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * count + [(None, None)],
    )
    weights = np.zeros(rows)
    weights[finite] = np.maximum(-result.ineqlin.marginals, 0.0)
    weights[weights < 1e-9] = 0.0
    return weights / weights.sum(), float(result.fun * unit)


def _program(
    problem: Problem,
    free: Model,
    best: np.ndarray,
    excess: float,
    bound: float,
    rows: np.ndarray,
    clock: Clock,
) -> tuple[np.ndarray, float, float, np.ndarray]:
    """Closes the gap between `bound` and `excess` with HiGHS, adding rows as they turn out to matter."""
    while excess > 0 and excess > bound and clock.left_s > 0:
        decided = bound > float(problem.row_tolerance_bytes.max(initial=0.0))
        choice, proven, finished = _fewer(
            with_rows(free, problem, rows), excess, EXACT_NODES if decided else None, clock
        )
        bound = max(bound, min(proven, excess))
        if choice is None:
            break
        found = problem.evaluate(choice)
        if found.excess_bytes < excess:
            best, excess = choice, found.excess_bytes
        new = violated_rows(problem, choice, rows, max(bound, 0.0))
        if not len(new) or not finished:
            break
        rows = np.concatenate([rows, new])
    return best, excess, bound, rows


def _fewer(
    model: Model, excess: float, nodes: int | None, clock: Clock
) -> tuple[np.ndarray | None, float, bool]:
    """(a choice of least excess over the model's rows, bound on it, finished), some choice being known to
    reach `excess`.
    """
    reduction = presolve(model.raised(excess), EXCESS_STEPS)
    assert reduction.infeasible is None, f"some choice exceeds by {excess} bytes, yet: {reduction.infeasible}"
    small = reduction.model
    program = program_of(small, excess=True)
    answer = run_highs(
        program,
        time_limit_s=clock.limit_s,
        gap=0.0,
        absolute_gap=0.1 * EXCESS_GAP,
        target=-excess,
        node_limit=nodes,
    )
    choice = None if answer.values is None else reduction.lift(program.choice(answer.values))
    return choice, excess + answer.bound, answer.finished
