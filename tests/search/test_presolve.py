"""Every presolve step alone, in pairs, and all together, against brute force."""

from dataclasses import replace
import itertools

import numpy as np
import pytest

from autoplan.search import Problem, Status, brute_force
from autoplan.search.model import model_of, problem_of
from autoplan.search.presolve import STEPS, presolve

SUBSETS = {step.__name__: (step,) for step in STEPS}
SUBSETS |= {f"{a.__name__}+{b.__name__}": (a, b) for a, b in itertools.pairwise(STEPS)}
SUBSETS |= {"all": STEPS}


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b), 1e-7)


@pytest.mark.parametrize("steps", SUBSETS.values(), ids=SUBSETS.keys())
def test_step_keeps_an_optimum(steps, tiny_problems):
    for seed, (problem, wanted) in enumerate(tiny_problems[:250]):
        reduction = presolve(model_of(problem), steps)
        if reduction.infeasible:
            assert wanted.status is Status.INFEASIBLE, seed
            continue
        got = brute_force(problem_of(reduction.model))
        assert got.status is wanted.status, seed
        if got.status is Status.OPTIMAL:
            found = problem.evaluate(reduction.lift(got.choice))
            assert found.feasible, seed
            assert _close(found.cost, wanted.cost) and _close(got.cost, wanted.cost), seed


def test_dropped_strategies_are_dropped_exactly(tiny_problems):
    """`kept` restricts the problem: the same as infinite costs elsewhere."""
    for seed, (problem, _) in enumerate(tiny_problems[:150]):
        rng = np.random.default_rng(seed)
        kept = [np.flatnonzero(rng.random(len(c)) < 0.7) for c in problem.node_costs]
        kept = [k if len(k) else np.zeros(1, dtype=np.int64) for k in kept]
        masked = [np.full(len(c), np.inf) for c in problem.node_costs]
        for m, c, k in zip(masked, problem.node_costs, kept, strict=True):
            m[k] = c[k]
        wanted = brute_force(replace(problem, node_costs=tuple(masked)))
        reduction = presolve(model_of(problem), kept=kept)
        if reduction.infeasible:
            assert wanted.status is Status.INFEASIBLE, seed
            continue
        got = brute_force(problem_of(reduction.model))
        assert got.status is wanted.status, seed
        assert got.choice is None or _close(problem.cost(reduction.lift(got.choice)), wanted.cost), seed


def test_model_says_what_the_problem_says(tiny_problems):
    for seed, (problem, wanted) in enumerate(tiny_problems):
        got = brute_force(problem_of(model_of(problem)))
        assert got.status is wanted.status, seed
        assert got.choice is None or _close(got.cost, wanted.cost), seed
        assert got.choice is None or problem.evaluate(got.choice).feasible, seed


def test_trees_are_solved():
    """On a tree without memory, elimination leaves nothing to solve."""
    rng = np.random.default_rng(0)
    pairs = [(int(rng.integers(0, i)), i) for i in range(1, 40)]
    costs, edges = [rng.random(5) for _ in range(40)], [rng.random((5, 5)) for _ in pairs]
    reduction = presolve(model_of(Problem(tuple(costs), np.array(pairs), tuple(edges))))
    assert reduction.model.num_nodes == 0 and reduction.infeasible is None
