"""Every presolve step alone, and all together, against brute force."""

import itertools

import numpy as np
import pytest
from autoplan.search import Problem, Status, brute_force
from autoplan.search.model import model_of, problem_of
from autoplan.search.presolve import STEPS, presolve

SEEDS = range(300)
SUBSETS = {s.__name__: (s,) for s in STEPS} | {"all": STEPS} | {
    f"{a.__name__}+{b.__name__}": (a, b) for a, b in itertools.pairwise(STEPS)
}


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b), 1e-7)


@pytest.mark.parametrize("steps", SUBSETS.values(), ids=SUBSETS.keys())
def test_step_keeps_the_optimum(steps, tiny_problem):
    for seed in SEEDS:
        problem = tiny_problem(seed)
        wanted = brute_force(problem)
        reduction = presolve(model_of(problem), steps)
        if reduction.infeasible:
            assert wanted.status is Status.INFEASIBLE, seed
            continue
        got = brute_force(problem_of(reduction.model))
        assert got.status is wanted.status, seed
        if got.status is Status.OPTIMAL:
            choice = reduction.lift(got.choice)
            found = problem.evaluate(choice)
            assert found.feasible, seed
            assert _close(found.cost, wanted.cost) and _close(got.cost, wanted.cost), seed


def test_model_says_what_the_problem_says(tiny_problem):
    for seed in SEEDS:
        problem = tiny_problem(seed)
        a, b = brute_force(problem), brute_force(problem_of(model_of(problem)))
        assert a.status is b.status and (a.cost == b.cost or _close(a.cost, b.cost)), seed
        assert a.choice is None or problem.evaluate(b.choice).feasible


def test_all_steps_solve_trees():
    """On a tree without memory, elimination leaves nothing to solve."""
    rng = np.random.default_rng(0)
    costs = [rng.random(5) for _ in range(40)]
    pairs = [(int(rng.integers(0, i)), i) for i in range(1, 40)]
    problem = Problem(tuple(costs), np.array(pairs), tuple(rng.random((5, 5)) for _ in pairs))
    assert presolve(model_of(problem)).model.num_nodes == 0
