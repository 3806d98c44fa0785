"""Contest instances as Problems, and memory that is live in stretches."""

import json

import numpy as np
import pytest
import scipy.sparse as sp

from autoplan.search import Buffer, Problem, Status, brute_force, solve
from autoplan.search.iopddl import problem_of_json, read
from autoplan.search.live import Intervals, maximal_rows

INSTANCE = {
    "problem": {
        "nodes": {
            "costs": [[15, 55, 75], [45, 65], [0, 10]],
            "usages": [[10, 25, 25], [30, 10], [20, 0]],
            "intervals": [[0, 6], [2, 4], [4, 9]],
        },
        "edges": {"nodes": [[0, 1], [2, 1]], "costs": [[30, 40, 0, 5, 10, 10**18], [7, 9, 3, 1]]},
        "usage_limit": 36,
    }
}


def test_an_instance_is_the_problem_that_it_says(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(INSTANCE))
    problem = read(path)
    assert problem.num_rows == 2 and problem.live.shape == (2, 3)
    choice = np.array([0, 1, 1])
    assert problem.cost(choice) == 15 + 65 + 10 + 40 + 1
    assert problem.rows_bytes(choice).tolist() == [20, 10]
    assert problem.cost(np.array([2, 1, 0])) == np.inf
    assert solve(problem).cost == brute_force(problem).cost
    with pytest.raises(ValueError, match="other.json is not an instance"):
        (tmp_path / "other.json").write_text("{}")
        read(tmp_path / "other.json")


def test_a_limit_that_is_too_low_is_named():
    low = {"problem": INSTANCE["problem"] | {"usage_limit": 15}}
    solution = solve(problem_of_json(low))
    assert solution.status is Status.INFEASIBLE
    assert solution.infeasibility.smallest_excess_bytes == 5


@pytest.mark.parametrize("seed", range(20))
def test_intervals_are_the_matrix_that_they_stand_for(seed):
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 12, 9)
    stop = start + rng.integers(0, 5, 9)
    live = maximal_rows(start, stop)
    every = (start <= np.arange(18)[:, None]) & (np.arange(18)[:, None] < stop)
    dense = live.dense(np.arange(live.rows)).astype(bool)
    for row in every:  # each moment's live set lies in a row's, and each row's is some moment's
        assert not row.any() or any((row <= kept).all() for kept in dense)
    for n, kept in enumerate(dense):
        assert any((row == kept).all() for row in every)
        assert not any((kept <= other).all() for m, other in enumerate(dense) if m != n)
    sizes, price = rng.integers(0, 99, 9).astype(float), rng.random(live.rows)
    np.testing.assert_array_equal(live @ sizes, dense @ sizes)
    np.testing.assert_allclose(live.weigh(price), dense.T @ price)


@pytest.mark.parametrize("seed", range(20))
def test_solved_alike_as_intervals_and_as_a_matrix(seed):
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 6, 5)
    live = Intervals(start, start + rng.integers(0, 4, 5), 9)
    pairs = np.array([[0, 1], [1, 2], [3, 2], [4, 0], [1, 4]])
    common = {
        "node_costs": tuple(rng.random((5, 3))),
        "edge_nodes": pairs,
        "edge_costs": tuple(rng.random((5, 3, 3))),
        "buffers": tuple(Buffer(i, None, rng.integers(1, 20, 3)) for i in range(5)),
        "limits": np.full(9, 30.0),
    }
    got, want = (solve(Problem(live=x, **common)) for x in (live, sp.csr_array(live.dense(np.arange(9)))))
    assert got.status is want.status and got.cost == want.cost
    assert want.status is not Status.OPTIMAL or np.isclose(want.cost, brute_force(Problem(live=live, **common)).cost)


def test_intervals_outside_the_rows_are_refused():
    with pytest.raises(ValueError, match="buffer 1 is live at rows 2..5, of which there are 4"):
        Intervals([0, 2], [1, 5], 4)
