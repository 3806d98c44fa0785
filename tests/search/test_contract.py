"""Contraction: the same optimum over the nodes that choose, and the way back."""

import dataclasses

import numpy as np

from autoplan.search import Problem, brute_force
from autoplan.search.contract import contract
from autoplan.search.live import Intervals
from autoplan.search.problem import Buffer


def in_stretches(problem: Problem, seed: int) -> Problem:
    """The same with buffers that are live in one stretch each."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 6))
    ends = np.sort(rng.integers(0, rows + 1, (len(problem.buffers), 2)), axis=1)
    live = Intervals(ends[:, 0], ends[:, 1], rows)
    most = live @ np.array([b.usage.max() for b in problem.buffers], dtype=float)
    return dataclasses.replace(problem, live=live, limits=np.floor(most * rng.choice([0.3, 0.5, 0.8, 1.0], rows)))


def test_has_the_same_optimum(more_tiny_problems):
    solved = 0
    for seed, problem in more_tiny_problems:
        if seed % 2:
            problem = in_stretches(problem, seed)
        wanted, smaller = brute_force(problem), contract(problem)
        if smaller.infeasible:
            assert wanted.choice is None, seed
            continue
        got = brute_force(smaller.problem)
        assert got.status is wanted.status, seed
        if got.choice is None:
            continue
        solved += 1
        found = problem.evaluate(smaller.lift(got.choice))
        tolerance = 1e-9 * max(abs(wanted.cost), 1e-9)
        assert found.feasible and abs(found.cost - wanted.cost) <= tolerance, seed
        assert abs(got.cost - found.cost) <= tolerance, seed
        assert np.array_equal(smaller.project(smaller.lift(got.choice)), got.choice), seed
    assert solved >= len(more_tiny_problems) / 3


def test_chain_of_decisions_is_one_node():
    """Layouts handed on along a chain, each allowing one successor: the first node decides all, memory included."""
    turn = np.where(np.roll(np.eye(3), 1, axis=1) > 0, 1.0, np.inf)
    count = 50
    problem = Problem(
        tuple(np.array([3.0, 2.0, 1.0]) for _ in range(count)),
        np.array([(i, i + 1) for i in range(count - 1)]),
        (turn,) * (count - 1),
        tuple(Buffer(i, None, np.array([0.0, 5.0, 9.0])) for i in range(count)),
        Intervals(np.arange(count), np.minimum(np.arange(count) + 2, count), count),
        np.full(count, 14.0),
    )
    smaller = contract(problem)
    assert smaller.problem.num_nodes == 1 and smaller.problem.num_strategies.tolist() == [3]
    for k in range(3):
        choice = smaller.lift(np.array([k]))
        assert choice.tolist() == [(k + i) % 3 for i in range(count)]
        assert smaller.problem.cost(np.array([k])) == problem.cost(choice)


def test_says_where_nothing_is_allowed():
    never = np.array([[np.inf, np.inf], [np.inf, np.inf]])
    problem = Problem((np.zeros(2),) * 2, np.array([(0, 1)]), (never,))
    smaller = contract(problem)
    assert "node 0" in smaller.infeasible or "node 1" in smaller.infeasible
    assert smaller.problem.num_nodes == 0


def test_forbidden_pairs_stay_forbidden():
    """Costs that are parts for each end but for one pair that is not allowed."""
    costs = np.add.outer([0.0, 1.0, 5.0], [0.0, 2.0, 3.0])
    costs[2, 2] = np.inf
    problem = Problem((np.array([9.0, 9.0, 0.0]), np.array([9.0, 9.0, 0.0])), np.array([(0, 1)]), (costs,))
    smaller = contract(problem).problem
    assert brute_force(smaller).cost == brute_force(problem).cost
