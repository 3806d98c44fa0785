"""Every solver under the one contract, against brute force."""

import numpy as np
import pytest
from autoplan.search import Status, brute_force, solve, solve_highs

SEEDS = range(400)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 2e-6 * max(abs(a), abs(b), 1e-12)


@pytest.mark.parametrize("solver", [solve, solve_highs])
def test_equals_brute_force(solver, tiny_problem):
    for seed in SEEDS:
        problem = tiny_problem(seed)
        wanted, got = brute_force(problem), solver(problem)
        assert got.status is wanted.status, (seed, got)
        if wanted.choice is None:
            continue
        found = problem.evaluate(got.choice)
        assert found.feasible and found.cost == got.cost, (seed, got)
        assert _close(got.cost, wanted.cost), (seed, got, wanted)
        assert got.bound <= got.cost and _close(got.bound, wanted.cost), (seed, got)


def test_smallest_limit(tiny_problem):
    seen = 0
    for seed in SEEDS:
        problem = tiny_problem(seed)
        wanted = brute_force(problem)
        if wanted.status is not Status.INFEASIBLE:
            continue
        got, want = solve(problem).infeasibility, wanted.infeasibility
        assert got.smallest_excess_bytes == want.smallest_excess_bytes, seed
        assert got.excess_bound_bytes <= got.smallest_excess_bytes
        if got.choice is None:
            assert want.choice is None
            continue
        seen += 1
        over = problem.rows_bytes(got.choice) - problem.limits
        assert over[got.row] == over.max() == got.smallest_excess_bytes > 0
        sizes = [b.size_bytes for b in got.buffers]
        assert sizes == sorted(sizes, reverse=True)
        assert np.isclose(sum(sizes), problem.rows_bytes(got.choice)[got.row])
    assert seen >= 30
