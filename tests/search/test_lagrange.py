"""The parts of the search on large problems, on small ones: flat arrays, sweeps, forests, and the whole."""

import dataclasses
import importlib
import itertools
import time

import numpy as np
import pytest

from autoplan.search import Problem, Status, solve
from autoplan.search.anytime import Clock, Incumbent
from autoplan.search.contract import contract
from autoplan.search.flat import Flat
from autoplan.search.forest import Forest
from autoplan.search.lagrange import Lagrangian
from autoplan.search.solve import solve_contracted
from autoplan.search.sweeps import Sweeps

DOOR = importlib.import_module("autoplan.search.solve")  # the module: the package has the function by that name


@pytest.fixture(scope="module")
def priced_problems(tiny_problems):
    """(problem, flat, costs at random prices, every choice [C, N], what each costs at those prices)."""
    out = []
    for seed, (problem, _) in enumerate(tiny_problems[:200]):
        rng, flat = np.random.default_rng(seed), Flat(problem)
        price = rng.random(problem.num_rows) * (rng.random(problem.num_rows) < 0.6)
        costs = flat.priced(price)
        choices = np.indices(problem.num_strategies).reshape(problem.num_nodes, -1).T
        out.append((problem, flat, price, costs, choices, np.array([flat.cost(c, costs) for c in choices])))
    return out


def test_flat_costs_and_bytes_are_the_problems(priced_problems):
    for problem, flat, price, _, choices, paid in priced_problems:
        for choice, cost in list(zip(choices, paid, strict=True))[::17]:
            rows = problem.rows_bytes(choice)
            np.testing.assert_allclose(flat.rows_bytes(choice), rows)
            wanted = problem.cost(choice) + price @ (rows - problem.limits)
            if np.isfinite(wanted):
                assert np.isclose(cost, wanted, rtol=1e-9, atol=1e-9 * flat.cap)


def test_what_is_not_allowed_is_dearer_than_all_that_is_at_any_price(tiny_problems):
    mixed = 0
    for problem, _ in tiny_problems[:200]:
        flat = Flat(problem)
        costs = flat.priced(np.full(problem.num_rows, 1e3 * flat.cap))
        choices = np.indices(problem.num_strategies).reshape(problem.num_nodes, -1).T
        allowed = np.isfinite([problem.cost(choice) for choice in choices])
        paid = np.array([flat.cost(choice, costs) for choice in choices])
        if allowed.any() and not allowed.all():
            mixed += 1
            assert allowed[paid <= paid.min() + 1e-12 * np.abs(paid).max()].any()
            assert paid[~allowed].min() >= paid[allowed].min() - 1e-12 * np.abs(paid).max()
    assert mixed > 40


def test_sweeps_bound_from_below_and_never_fall(priced_problems):
    reached = 0
    for seed, (_, flat, _, costs, _, paid) in enumerate(priced_problems):
        sweeps, last, slack = Sweeps(flat), -np.inf, 1e-9 * (flat.cap + np.abs(paid).max())
        for k in range(12):
            bound, choice = sweeps.sweep(costs, forward=k % 2 == 0)
            assert last - slack <= bound <= paid.min() + slack, seed
            assert flat.cost(choice, costs) >= paid.min() - slack
            last = bound
        reached += paid.min() - bound <= 1e-6 * abs(paid.min()) + slack
    assert reached >= 0.8 * len(priced_problems)


def test_a_forest_move_is_the_best_of_its_choices(priced_problems):
    for seed, (problem, flat, _, costs, choices, paid) in enumerate(priced_problems):
        rng = np.random.default_rng(seed)
        forest, start = Forest(flat, rng), rng.integers(0, problem.num_strategies)
        held = np.setdiff1d(np.arange(problem.num_nodes), forest.nodes)
        within = (choices[:, held] == start[held]).all(axis=1)
        moved = forest.improve(start, costs)
        assert (moved[held] == start[held]).all(), seed
        assert np.isclose(flat.cost(moved, costs), paid[within].min(), rtol=1e-9, atol=1e-9 * flat.cap), seed
        inside = np.isin(flat.edges, forest.nodes).all(axis=1)
        assert inside.sum() < max(1, len(forest.nodes)), "a forest has fewer edges than nodes"


def _lagrangian(problem: Problem, seed: int = 0, steps: int = 400) -> Incumbent:
    """The search alone, ended after so many looks at the clock."""
    looks = itertools.count()
    clock = Clock(time.perf_counter(), None, lambda: next(looks) > steps)
    incumbent = Incumbent(problem, clock)
    Lagrangian(problem, incumbent, clock, seed).run(np.inf, lambda: incumbent.bound >= incumbent.cost)
    return incumbent


def test_lagrangian_alone_is_honest_and_mostly_right(tiny_problems):
    fits = optimal = 0
    for seed, (problem, wanted) in enumerate(tiny_problems[:150]):
        small = contract(problem)
        if small.infeasible:
            continue
        found = _lagrangian(small.problem, steps=60)
        slack = 1e-9 * abs(wanted.cost) if wanted.choice is not None else 0.0
        if wanted.choice is None:
            assert found.choice is None, seed
            continue
        fits += 1
        assert found.bound <= wanted.cost + max(slack, 1e-12), seed
        if found.choice is not None:
            assert problem.evaluate(small.lift(found.choice)).feasible, seed
            assert found.cost >= wanted.cost - slack - 1e-12, seed
            optimal += found.cost <= wanted.cost + 1e-6 * abs(wanted.cost)
    assert fits > 50 and optimal >= 0.8 * fits


def test_large_problems_way_equals_brute_force(tiny_problems, monkeypatch):
    """Contraction, Lagrangian and exact search one after another, as on a large problem without a budget."""
    monkeypatch.setattr("autoplan.search.lagrange.LEAST_FACTOR", 0.09)  # one decay
    for seed, (problem, wanted) in enumerate(tiny_problems[150:200]):
        small = contract(problem)
        if small.infeasible:
            assert wanted.status is Status.INFEASIBLE
            continue
        clock = Clock(time.perf_counter(), None)
        got = solve_contracted(small.problem, Incumbent(small.problem, clock), reach=-1)
        assert got.status is wanted.status, (seed, got)
        if wanted.choice is not None:
            assert np.isclose(got.cost, wanted.cost, rtol=2e-6), seed


def test_same_seed_same_answer(layered_problem):
    problem = contract(layered_problem(60, seed=3, tightness=0.3)).problem
    a, b = _lagrangian(problem, seed=5, steps=120), _lagrangian(problem, seed=5, steps=120)
    assert np.array_equal(a.choice, b.choice) and a.bound == b.bound


def test_close_to_the_optimum_under_tight_memory(layered_problem):
    for seed in range(3):
        problem = layered_problem(40, seed=seed, tightness=0.25)
        found, wanted = _lagrangian(problem, seed=seed, steps=60), solve(problem)
        assert wanted.status is Status.OPTIMAL
        assert wanted.cost * (1 - 1e-9) <= found.cost <= 1.05 * wanted.cost
        assert found.bound <= wanted.cost * (1 + 1e-9)


def test_progress_and_stop(layered_problem, monkeypatch):
    monkeypatch.setattr(DOOR, "CONTRACTED_PAIRS", 0)
    monkeypatch.setattr(DOOR, "OUT_OF_REACH", 0)
    problem, seen = layered_problem(60, seed=1, tightness=0.3), []
    got = solve(problem, budget_s=60, gap=0.0, on_better=seen.append, stop=lambda: bool(seen))
    assert seen and got.cost == pytest.approx(seen[-1].cost) and got.seconds < 30
    costs = [p.cost for p in seen]
    assert costs == sorted(costs, reverse=True) and all(p.bound <= p.cost for p in seen)
    assert got.status is Status.FEASIBLE and problem.evaluate(got.choice).feasible


def test_too_little_memory_is_proven_on_the_way_of_large_problems(layered_problem, monkeypatch):
    monkeypatch.setattr(DOOR, "CONTRACTED_PAIRS", 0)
    monkeypatch.setattr(DOOR, "PROGRAM_SIZE", 0)
    problem = layered_problem(20, seed=1, tightness=0.3)
    least = problem.live @ np.array([buffer.usage.min() for buffer in problem.buffers])
    problem = dataclasses.replace(problem, limits=least * 0.999)
    got = solve(problem, budget_s=60)
    assert got.status is Status.INFEASIBLE
    raised = dataclasses.replace(problem, limits=problem.limits + got.infeasibility.smallest_excess_bytes)
    assert solve(raised).choice is not None
