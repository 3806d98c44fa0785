"""Problems that do not fit together are refused with the cause; tables say what their matrices say."""

import numpy as np
import pytest

from autoplan.search import Buffer, Problem, brute_force, solve
from autoplan.search.tables import add, compress, distinct_rows, min_plus, take

TWO = (np.zeros(2), np.zeros(3))
EDGE = np.array([[0, 1]])


def _pair(*memory):
    return Problem(TWO, EDGE, (np.zeros((2, 3)),), *memory)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Problem((np.zeros(0),), np.zeros((0, 2)), ()), "node 0 needs a non-empty vector"),
        (lambda: Problem((np.array([np.nan]),), np.zeros((0, 2)), ()), "node 0 has a cost that is nan"),
        (lambda: Problem(TWO, EDGE, ()), "1 pairs in edge_nodes for 0 matrices"),
        (lambda: Problem(TWO, np.array([[0, 2]]), (np.zeros((2, 3)),)), "outside 0..1"),
        (lambda: Problem(TWO, np.array([[1, 1]]), (np.zeros((3, 3)),)), "joins node 1 to itself"),
        (lambda: Problem(TWO, EDGE, (np.zeros((3, 2)),)), r"need shape \(2, 3\), got \(3, 2\)"),
        (lambda: Problem(TWO, EDGE, (np.full((2, 3), -np.inf),)), "edge 0 has a cost that is nan or -inf"),
        (lambda: Buffer(0, 0, np.zeros(2)), "give one"),
        (lambda: Buffer(0, None, np.array([-1.0])), "zero or more"),
        (lambda: _pair((Buffer(0, None, np.zeros(3)),), np.ones((1, 1)), [1]),
         "hangs on node 0"),
        (lambda: _pair((Buffer(0, None, np.zeros(2)),), np.ones((2, 1)), [1]),
         r"shape \(1, 1\)"),
        (lambda: _pair((), np.ones((1, 0)), [np.nan]), "got nan"),
        (lambda: solve(_pair(), initial=np.array([0])), "one strategy per node"),
        (lambda: solve(_pair(), initial=np.array([0, 3])), "node 1 has 3"),
        (lambda: brute_force(Problem((np.zeros(10),) * 10, np.zeros((0, 2)), ())), "call solve"),
    ],
)  # fmt: skip
def test_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_tables():
    rng = np.random.default_rng(0)
    for _ in range(100):
        shape = rng.integers(1, 12, 2)
        a, b = (rng.integers(0, 2, shape).astype(float) for _ in range(2))
        a[rng.random(shape) < 0.1] = np.inf
        table = compress(a)
        assert np.array_equal(table.dense(), a) and np.array_equal(table.T.dense(), a.T)
        assert len(np.unique(table.core, axis=0)) == len(table.core)
        assert np.array_equal(table.row(0), a[0])
        assert np.array_equal(add(table, compress(b)).dense(), a + b)
        rows = np.flatnonzero(rng.random(shape[0]) < 0.7)
        if len(rows):
            assert np.array_equal(take(table, rows, None).dense(), a[rows])


def test_distinct_rows_are_told_apart_when_hashes_collide(monkeypatch):
    monkeypatch.setattr("autoplan.search.tables._MULTIPLIERS", np.zeros(8, dtype=np.uint64))
    first, kind = distinct_rows(np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]))
    assert first.tolist() == [0, 1] and kind.tolist() == [0, 1, 0]


def test_min_plus_in_blocks():
    rng = np.random.default_rng(1)
    left, middle, right = rng.random((7, 5)), rng.random(5), rng.random((5, 6))
    wanted = (left[:, :, None] + middle[None, :, None] + right[None]).min(axis=1)
    assert np.allclose(min_plus(left, middle, right, block=64), wanted)
