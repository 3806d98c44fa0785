"""Layouts and the collectives between them, against figures worked out by hand."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoplan import layouts
from autoplan.cost_models import parse_cluster
from autoplan.layouts import PARTIAL, WHOLE
from autoplan.plan import to_partition_spec
from autoplan.reshard import Machine, collectives_between, path, reshard_time_s
from autoplan.verification.hlo import parse
from autoplan.verification.traffic import collectives_of


def machine(*shape: int, cluster: str = "8xH100") -> Machine:
    found = parse_cluster(cluster)
    return Machine(found.device, found.mesh(shape))


def test_all_layouts_are_those_that_divide() -> None:
    sizes = (2, 4)
    found = {tuple(map(int, row)) for row in layouts.all_layouts((8, 6), sizes)}
    wanted = {codes for codes in itertools.product((-1, 0, 1), repeat=2)
              if all(n % math.prod(s for s, c in zip(sizes, codes) if c == d) == 0 for d, n in enumerate((8, 6)))}
    assert found == wanted
    assert (1, 1) not in found  # 6 is not a multiple of 8
    assert len(layouts.all_layouts((), sizes)) == 1


def test_specs_and_layouts_are_two_forms_of_one_thing() -> None:
    names = ("x", "y", "z")
    for codes in layouts.all_layouts((8, 8, 8), (2, 2, 2)):
        spec = layouts.to_spec(codes, 3, names)
        assert layouts.from_spec(spec, names) == tuple(map(int, codes))


@pytest.mark.parametrize(
    ("before", "after", "kind", "sent"),
    [
        ((0,), (WHOLE,), "all-gather", 7 / 8),
        ((PARTIAL,), (WHOLE,), "all-reduce", 2 * 7 / 8),
        ((PARTIAL,), (1,), "reduce-scatter", 7 / 8),
        ((0,), (1,), "all-to-all", 7 / 8 / 8),
        ((WHOLE,), (0,), None, 0),
        ((0,), (0,), None, 0),
    ],
)
def test_one_axis(before: tuple, after: tuple, kind: str | None, sent: float) -> None:
    size = 8e6
    found = collectives_between(size, before, after, machine(8))
    assert [t.kind for t in found] == ([kind] if kind else [])
    assert sum(t.wire_bytes for t in found) == pytest.approx(sent * size)


@pytest.mark.parametrize(("before", "after", "sent"), [
    ((0, 0), (WHOLE, WHOLE), 7 / 8),
    ((PARTIAL, PARTIAL), (WHOLE, WHOLE), 2 * 7 / 8),
    ((PARTIAL, PARTIAL), (0, 0), 7 / 8),
])
def test_two_axes_send_what_one_axis_of_their_product_does(before: tuple, after: tuple, sent: float) -> None:
    (transfer,) = collectives_between(8e6, before, after, machine(2, 4))
    assert transfer.axes == (0, 1)
    assert transfer.wire_bytes == pytest.approx(sent * 8e6)


def test_slices_come_first_so_that_less_is_sent() -> None:
    (gather,) = collectives_between(8e6, (0, WHOLE), (WHOLE, 1), machine(2, 4))
    assert gather.kind == "all-gather" and gather.wire_bytes == pytest.approx(8e6 / 4 / 2)


def test_moving_a_major_axis_away_from_under_a_minor_one_costs_a_permute() -> None:
    kinds = {t.kind for t in collectives_between(8e6, (0, 0), (WHOLE, 0), machine(2, 4))}
    assert kinds == {"all-gather", "collective-permute"}
    assert {t.kind for t in collectives_between(8e6, (0, 0), (0, WHOLE), machine(2, 4))} == {"all-gather"}


def test_times_are_zero_only_where_nothing_changes_and_infinite_where_a_sum_cannot_be_unmade() -> None:
    codes = np.array(list(itertools.product((-2, -1, 0, 1), repeat=2)), np.int8)
    time_s = reshard_time_s(64e6, codes, codes, machine(2, 4))
    assert (np.diagonal(time_s) == 0).all()
    for (i, p), (j, q) in itertools.product(enumerate(codes), repeat=2):
        unmade = any(b == PARTIAL and a != PARTIAL for a, b in zip(p, q))
        assert np.isinf(time_s[i, j]) == unmade
        assert i == j or time_s[i, j] > 0
        if not unmade:
            listed = sum(t.time_s for t in collectives_between(64e6, p, q, machine(2, 4)))
            assert time_s[i, j] >= listed


@pytest.mark.endtoend
@pytest.mark.parametrize(("shape", "rank", "samples"), [((2, 4), 2, 36), ((2, 2, 2), 3, 36)])
def test_the_partitioner_makes_what_is_priced(shape: tuple, rank: int, samples: int) -> None:
    """Layout by layout along `path`. Asked for the last alone, it gathers whole values in every tenth case."""
    names = ("x", "y", "z")[:len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    on = machine(*shape, cluster="cpu:8")
    every = layouts.all_layouts((32,) * rank, shape)
    array = jax.ShapeDtypeStruct((32,) * rank, jnp.float32)

    def sharding(layout: tuple) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(mesh, to_partition_spec(layouts.to_spec(layout, rank, names)))

    for a, b in np.random.default_rng(0).integers(0, len(every), (samples, 2)):
        before, after = tuple(map(int, every[a])), tuple(map(int, every[b]))
        way = path(before, after)

        def reshard(x, way=way):
            for layout in way:
                x = jax.lax.with_sharding_constraint(x, sharding(layout))
            return x

        compiled = jax.jit(reshard, in_shardings=sharding(before), out_shardings=sharding(after)).lower(array).compile()
        made, _ = collectives_of(parse(compiled.as_text()), dict(zip(names, shape)))
        sent = sum(c.wire_bytes for c in collectives_between(4 * 32**rank, before, after, on))
        assert sum(c.total_bytes for c in made) == pytest.approx(sent), (before, after)
