"""The dual ascent certifies: its bound and margins never exceed what brute force finds, at any prices."""

import numpy as np

from autoplan.search import Status, brute_force
from autoplan.search.ascent import Ascent
from autoplan.search.highs import program_of, run_highs
from autoplan.search.model import model_of, problem_of
from autoplan.search.presolve import forbid, presolve


def _cases(tiny_problems):
    for seed, (problem, _) in enumerate(tiny_problems):
        reduction = presolve(model_of(problem), (forbid,))
        if not reduction.infeasible and reduction.model.num_nodes:
            yield seed, reduction.model, brute_force(problem_of(reduction.model))


def test_bound_rises_and_holds(tiny_problems):
    for seed, model, wanted in _cases(tiny_problems):
        ascent, bounds = Ascent(model), []
        for _ in range(6):
            for forward in (True, False):
                ascent.sweep(forward=forward)
                bounds.append(ascent.bound)
        scale = 1e-9 * max(1e-9, *np.abs(bounds))
        assert all(b >= a - scale for a, b in zip(bounds, bounds[1:], strict=False)), seed
        assert wanted.status is not Status.OPTIMAL or bounds[-1] <= wanted.cost + scale, seed


def test_margins_hold_at_any_prices(tiny_problems):
    for seed, model, wanted in _cases(tiny_problems):
        if wanted.status is not Status.OPTIMAL:
            continue
        ascent = Ascent(model)
        rng = np.random.default_rng(seed)
        ascent.set_price(rng.random(model.num_rows) * abs(wanted.cost) / 20)
        for forward in (True, False, True, False):
            ascent.sweep(forward=forward)
        margins = ascent.margins()
        scale = 1e-9 * max(abs(wanted.cost), 1e-9)
        assert ascent.bound <= wanted.cost + scale, seed
        for i, margin in enumerate(margins):
            assert margin[wanted.choice[i]] <= wanted.cost + scale, seed


def test_lp_duals_are_messages(tiny_problems):
    """Read as messages and prices, the duals of the LP relaxation certify the LP's own optimum."""
    for seed, model, _ in _cases(tiny_problems[:200]):
        program = program_of(model, integer=False)
        answer = run_highs(program, time_limit_s=None, gap=0.0)
        if answer.duals is None:
            continue
        ascent = Ascent(model)
        ascent.messages, price = program.messages(answer.duals)
        ascent.set_price(price)
        ascent.margins()
        assert abs(ascent.bound - answer.objective) <= 1e-6 * max(abs(answer.objective), program.scale), seed
