"""Layouts against brute force: which exist, what they split, and how sets of them are kept."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest

from autoplan import layouts
from autoplan.layouts import PARTIAL, PARTIAL_OTHER, WHOLE
from autoplan.plan import to_partition_spec

SHAPES = [(), (7,), (8,), (8, 6), (1, 8), (4, 6, 8), (0, 8), (64, 1, 2)]
MESHES = [(1,), (8,), (2, 4), (4, 2), (3, 2), (2, 2, 2), (1, 8)]


def slow_layouts(shape: tuple, sizes: tuple) -> set[tuple]:
    """Every layout that cuts every dim into equal parts of at least one element."""
    found = set()
    for codes in itertools.product(range(-1, len(shape)), repeat=len(sizes)):
        ways = [math.prod(s for s, c in zip(sizes, codes) if c == d) for d in range(len(shape))]
        if all(n % w == 0 and (w == 1 or n >= w) for n, w in zip(shape, ways)):
            found.add(codes)
    return found


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_layouts_are_those_of_brute_force(shape: tuple, sizes: tuple) -> None:
    found = [tuple(map(int, row)) for row in layouts.all_layouts(shape, sizes)]
    assert found[0] == (WHOLE,) * len(sizes)
    assert len(set(found)) == len(found)
    assert set(found) == slow_layouts(shape, sizes)


@pytest.mark.parametrize("sizes", MESHES)
def test_parts_and_bytes_are_those_of_a_device(sizes: tuple) -> None:
    shape = (64, 24, 8)
    codes = layouts.all_layouts(shape, sizes)
    held = layouts.local_bytes(shape, 2.0, codes, sizes)
    for row, parts, size in zip(codes, layouts.parts(codes, sizes), held):
        local = [n // math.prod(s for s, c in zip(sizes, row) if c == d) for d, n in enumerate(shape)]
        assert size == 2.0 * math.prod(local)
        assert parts * math.prod(local) == math.prod(shape)


def test_a_pending_sum_is_held_whole() -> None:
    codes = np.array([[PARTIAL, WHOLE], [PARTIAL_OTHER, 0], [PARTIAL, PARTIAL]], np.int8)
    assert layouts.parts(codes, (2, 4)).tolist() == [1, 4, 1]
    assert layouts.local_bytes((8, 8), 4.0, codes, (2, 4)).tolist() == [256.0, 64.0, 256.0]


def test_the_axes_of_a_dim_multiply() -> None:
    codes = np.array([[0, 0], [0, 1], [1, WHOLE]], np.int8)
    assert layouts.split_factor(codes, (2, 4), 0).tolist() == [8, 2, 1]
    assert layouts.split_factor(codes, (2, 4), 1).tolist() == [1, 4, 2]
    assert layouts.divides((8, 4), codes, (2, 4)).tolist() == [True, True, True]
    assert layouts.divides((4, 4), codes, (2, 4)).tolist() == [False, True, True]


def test_a_layout_is_the_sharding_that_jax_makes_of_it(devices: list[jax.Device]) -> None:
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("x", "y"), devices=devices[:8], axis_types=auto)
    shape = (16, 8)
    codes = layouts.all_layouts(shape, (2, 4))
    for row, size in zip(codes, layouts.local_bytes(shape, 4.0, codes, (2, 4))):
        spec = to_partition_spec(layouts.to_spec(row, 2, ("x", "y")))
        local = jax.sharding.NamedSharding(mesh, spec).shard_shape(shape)
        assert 4.0 * math.prod(local) == size


def test_a_spec_may_say_less_than_all_dims_and_leaves_out_what_is_pending() -> None:
    names = ("x", "y")
    assert layouts.from_spec((), names) == (WHOLE, WHOLE)
    assert layouts.from_spec((None, ("x", "y")), names) == (1, 1)
    assert layouts.from_spec(("y",), names) == (WHOLE, 0)
    assert layouts.to_spec((PARTIAL, 0), 2, names) == (("y",), ())


def test_distinct_layouts_keep_their_order_and_every_row_finds_its_own() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-2, 3, (200, 3)).astype(np.int8)
    distinct, row = layouts.unique(codes)
    assert (distinct[row] == codes).all()
    assert [tuple(d) for d in distinct] == list(dict.fromkeys(map(tuple, codes)))


def test_layouts_are_shown_in_words() -> None:
    names = ("x", "y")
    assert layouts.show((WHOLE, WHOLE), names) == "whole"
    assert layouts.show((0, PARTIAL), names) == "x:dim 0, y:partial sum"
