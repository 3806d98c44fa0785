"""solve() on problems like the planner's: exact, deterministic, honest when stopped."""

from dataclasses import replace

import numpy as np
import pytest

from autoplan.search import Problem, Status, solve, solve_highs


@pytest.mark.parametrize("tightness", [None, 0.15, 0.05])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_highs(layered_problem, tightness, seed):
    problem = layered_problem(24, seed=seed, tightness=tightness)
    got, wanted = solve(problem), solve_highs(problem)
    assert got.status is wanted.status is Status.OPTIMAL
    assert got.cost == pytest.approx(wanted.cost, rel=2e-6)
    assert problem.evaluate(got.choice).feasible


def test_deterministic(layered_problem):
    problem = layered_problem(24, tightness=0.15)
    first, second = solve(problem), solve(problem)
    assert np.array_equal(first.choice, second.choice)
    assert (first.cost, first.bound, first.status) == (second.cost, second.bound, second.status)


def test_large_chain_to_the_optimum(layered_problem):
    solution = solve(layered_problem(200))
    assert solution.status is Status.OPTIMAL and solution.gap <= 1e-6


def test_no_time_is_no_proof():
    rng = np.random.default_rng(0)
    pairs = [(i, j) for i in range(30) for j in range(i)]
    problem = Problem([rng.random(6)] * 30, np.array(pairs), [rng.random((6, 6)) for _ in pairs])
    solution = solve(problem, budget_s=0.0)
    assert solution.status in (Status.FEASIBLE, Status.TIME_LIMIT)
    assert solution.bound <= solution.cost and "budget_s" in solution.message


def test_a_wide_gap_is_honoured(layered_problem):
    problem = layered_problem(24, tightness=0.15)
    exact, rough = solve(problem), solve(problem, gap=0.1)
    assert rough.status is Status.OPTIMAL and rough.gap <= 0.1 + 1e-9
    assert rough.bound <= exact.cost * (1 + 1e-6) and rough.cost <= exact.cost / 0.9


def test_nothing_to_choose():
    solution = solve(Problem((), np.zeros((0, 2)), (), offset=3.0))
    assert solution.status is Status.OPTIMAL and solution.cost == 3.0 and len(solution.choice) == 0


def test_infeasible_message_says_what_would_do(layered_problem):
    problem = layered_problem(20, tightness=0.5)
    small = replace(problem, limits=problem.limits * 0.01)
    solution = solve(small)
    assert solution.status is Status.INFEASIBLE and "raise the limits by" in solution.message
    raised = replace(small, limits=small.limits + solution.infeasibility.smallest_excess_bytes)
    assert solve(raised).status is Status.OPTIMAL
