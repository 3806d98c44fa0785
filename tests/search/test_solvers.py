"""Every solver under the one contract, against brute force."""

import numpy as np
import pytest

from autoplan.search import Status, solve, solve_highs


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 2e-6 * max(abs(a), abs(b), 1e-12)


@pytest.mark.parametrize("solver", [solve, solve_highs])
def test_equals_brute_force(solver, tiny_problems):
    for seed, (problem, wanted) in enumerate(tiny_problems):
        got = solver(problem)
        assert got.status is wanted.status, (seed, got)
        if wanted.choice is None:
            continue
        found = problem.evaluate(got.choice)
        assert found.feasible and found.cost == got.cost, (seed, got)
        assert _close(got.cost, wanted.cost), (seed, got, wanted)
        assert got.bound <= got.cost and _close(got.bound, wanted.cost), (seed, got)


def test_smallest_limit(tiny_problems):
    seen = 0
    for seed, (problem, wanted) in enumerate(tiny_problems):
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


def test_cutoff(tiny_problems):
    """Below the optimum a cutoff ends the search, above it changes nothing."""
    for seed, (problem, wanted) in enumerate(tiny_problems[:200]):
        if wanted.status is not Status.OPTIMAL or not wanted.cost:
            continue
        step = 1e-3 * abs(wanted.cost)
        below, above = solve(problem, cutoff=wanted.cost - step), solve(problem, cutoff=wanted.cost + step)
        assert below.status is Status.CUTOFF and below.bound >= wanted.cost - step, seed
        assert above.status is Status.OPTIMAL and _close(above.cost, wanted.cost), seed


def test_a_start_that_costs_the_cutoff_is_the_answer_and_its_bound_is_proven(tiny_problems):
    """With a gap to fill, a start slightly dearer than the optimum may be kept; the bound must not claim more."""
    seen = 0
    for seed, (problem, wanted) in enumerate(tiny_problems[:200]):
        if wanted.status is not Status.OPTIMAL or wanted.cost <= 0:
            continue
        for node, count in enumerate(problem.num_strategies):
            for other in range(count):
                start = wanted.choice.copy()
                start[node] = other
                found = problem.evaluate(start)
                if not found.feasible or found.cost > 1.1 * wanted.cost:
                    continue
                got = solve(problem, initial=start, cutoff=found.cost, gap=0.2)
                assert got.status is Status.OPTIMAL and got.cost <= found.cost, seed
                assert got.cost * 0.8 * (1 - 1e-9) <= got.bound <= wanted.cost * (1 + 1e-9), seed
                seen += 1
    assert seen >= 200


def test_without_a_proof_the_bound_still_holds(tiny_problems):
    for seed, (problem, wanted) in enumerate(tiny_problems[:200]):
        if wanted.choice is None:
            continue
        got = solve(problem, prove=False)
        assert problem.evaluate(got.choice).feasible, seed
        assert got.bound <= wanted.cost + 1e-9 and wanted.cost <= got.cost + 1e-9, seed
        assert got.status in (Status.OPTIMAL, Status.FEASIBLE), seed


def test_initial_choice(tiny_problems):
    """Any start, allowed or not, leads to the optimum; a start that is optimal is kept."""
    for seed, (problem, wanted) in enumerate(tiny_problems[:200]):
        start = np.random.default_rng(seed).integers(0, problem.num_strategies)
        got = solve(problem, initial=start)
        assert got.status is wanted.status, seed
        if wanted.choice is not None:
            assert _close(got.cost, wanted.cost), seed
            again = solve(problem, initial=wanted.choice)
            assert again.status is Status.OPTIMAL, seed
            assert np.array_equal(again.choice, wanted.choice) or again.cost < wanted.cost, seed
