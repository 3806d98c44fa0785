"""What the compilers make of collectives, and what can run at the same time."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoplan
from autoplan import layouts, lowering
from autoplan.cost_models import parse_cluster
from autoplan.layouts import PARTIAL, WHOLE
from autoplan.reshard import Machine, Ring, collectives_between, path, reshard_time_s

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def machine(cluster, *shape):
    found = parse_cluster(cluster)
    return Machine(found.device, found.mesh(shape))


@pytest.mark.parametrize(
    ("cluster", "shape", "axes", "kind"),
    [
        ("v5e:4x4", (16,), (0,), "all-reduce"),
        ("v5e:4x4", (4, 4), (0,), "reduce-scatter"),
        ("v5e:4x4", (4, 4), (0, 1), "all-reduce"),
        ("v5e:2x4", (8,), (0,), "reduce-scatter"),
        ("v5e:4x8", (32,), (0,), "reduce-scatter"),
        ("v5p:2x2x2", (8,), (0,), "all-reduce"),
        ("v5p:2x2x2", (2, 4), (1,), "reduce-scatter"),
        ("v5p:4x4x4", (4, 16), (1,), "reduce-scatter"),
        ("8xH100", (8,), (0,), "reduce-scatter"),
        ("cpu:8", (8,), (0,), "all-reduce"),
    ],
)
def test_reduce_scatters_become_what_the_compiler_has(cluster, shape, axes, kind):
    found = parse_cluster(cluster)
    assert lowering.scatter_kind(found.device.platform, found.mesh(shape), axes) == kind


def test_a_collective_over_two_torus_axes_uses_the_links_of_both():
    both, flat = machine("v5e:4x4", 4, 4), machine("v5e:4x4", 16)
    (together,) = collectives_between(64e6, (0, 0), (WHOLE, WHOLE), both)
    (one,) = collectives_between(64e6, (0,), (WHOLE,), flat)
    assert together.axes == (0, 1) and together.time_s == pytest.approx(one.time_s)
    assert together.wire_bytes == pytest.approx(15 / 16 * 64e6)


def test_a_sum_that_goes_to_two_dims_at_once_is_completed_everywhere():
    on = machine("v5e:4x8", 4, 8)
    (split,) = collectives_between(64e6, (PARTIAL, PARTIAL), (0, 1), on)
    assert (split.kind, split.axes) == ("all-reduce", (0, 1)) and split.wire_bytes == pytest.approx(2 * 31 / 32 * 64e6)
    (joined,) = collectives_between(64e6, (PARTIAL, PARTIAL), (0, 0), on)
    assert joined.kind == "reduce-scatter" and joined.wire_bytes == pytest.approx(31 / 32 * 64e6)


@pytest.mark.parametrize(
    ("cluster", "shape", "axes", "there_are"),
    [
        ("v5e:4x4", (2, 8), (0,), False),
        ("v5e:4x4", (2, 8), (1,), True),
        ("v5e:4x4", (4, 4), (0,), True),
        ("v5p:2x2x4", (4, 4), (0,), False),  # 2 x 2 of the torus
        ("v5p:2x2x4", (4, 4), (1,), True),
        ("v5p:2x2x4", (8, 2), (0,), True),
        ("v5p:4x4x4", (64,), (0,), False),  # too many
    ],
)
def test_rings_need_more_than_a_pair_or_a_square(cluster, shape, axes, there_are):
    assert lowering.rings(machine(cluster, *shape).mesh, axes) is there_are


def test_gathers_of_two_dims_are_two_collectives():
    found = collectives_between(64e6, (0, 1), (WHOLE, WHOLE), machine("v5e:4x4", 4, 4))
    assert [t.kind for t in found] == ["all-gather", "all-gather"]


def test_a_sum_is_completed_before_it_is_split_above_another_axis():
    on = machine("v5e:4x4", 4, 4)
    kinds = [t.kind for t in collectives_between(64e6, (PARTIAL, 0), (0, 0), on)]
    assert kinds == ["all-reduce", "collective-permute"]
    assert path((PARTIAL, 0), (0, 0))[0] == (WHOLE, 0)
    assert [t.kind for t in collectives_between(64e6, (0, PARTIAL), (0, 0), on)] == ["reduce-scatter"]


def test_a_ring_hides_behind_the_computing_that_it_goes_around_with():
    on, size = machine("v5e:4x4", 16), 64e6
    before, after = np.array([[PARTIAL]]), np.array([[0], [1], [WHOLE]])
    dims = np.array([[True, False]])
    alone, beside, hidden = (
        reshard_time_s(size, before, after, on, ring=Ring(dims, np.array([s])))[0] for s in (0.0, 1e-4, 1.0)
    )
    assert beside[0] == pytest.approx(alone[0] - 1e-4) and hidden[0] < 0.1 * alone[0]
    assert alone[1] == beside[1] == hidden[1] > alone[0]  # an all-reduce: that dim has no ring
    assert alone[2] == hidden[2]
    (transfer,) = collectives_between(size, (PARTIAL,), (0,), on, ring=Ring(dims, np.array([0.0])))
    assert transfer.kind == "collective-permute" and transfer.ring
    assert transfer.wire_bytes == pytest.approx(17 / 16 * size)


def test_arrays_are_padded_to_tiles_where_that_costs_least():
    def held(*shape, itemsize=4, codes=((WHOLE,),)):
        return layouts.held_bytes(shape, itemsize, np.array(codes, np.int8), (4,), (8, 128)).tolist()

    assert held(1024, 1024) == [4 * 1024 * 1024]
    assert held(64, 256, 48) == [4 * 64 * 256 * 48]  # 256 across, 64 or 48 down
    assert held(8, 100) == [4 * 8 * 128]
    assert held(2, 256) == [4 * 2 * 256]  # few rows are padded to a power of two only
    assert held(3, 256) == [4 * 4 * 256]
    assert held(512, 512, codes=((0,), (1,))) == [512 * 512, 512 * 512]
    assert held(100) == [400] and held(0, 128) == [0]


# ---------------------------------------------------------------------------------------------------------
# Programs


def layers(params, batch):
    def loss(params):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(params)
    return [w - 1e-3 * g for w, g in zip(params, grads)], value


def plan_for(batch, width=4096, depth=4, **options):
    arguments = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * depth, jax.ShapeDtypeStruct(
        (batch, width), jnp.float32
    )
    return autoplan.parallelize(layers, cluster="v5e:4x4", donate_argnums=0, **options).plan(*arguments)


def test_weight_gradients_go_around_where_computing_takes_longer_than_sending():
    large, small = (plan_for(batch, layout="fsdp") for batch in (16384, 4096))
    kinds = [{c.kind for c in plan.collectives if c.wire_bytes > 1e6} for plan in (large, small)]
    assert kinds == [{"all-gather", "collective-permute"}, {"all-gather", "all-reduce"}]


def test_gathers_hide_behind_computing_but_not_for_longer_than_it_takes():
    busy, idle = (plan_for(batch, layout="fsdp") for batch in (65536, 16))
    gathers = [sum(c.time_s * c.count for c in plan.collectives if c.kind == "all-gather") for plan in (busy, idle)]
    assert busy.communication_time_s < 0.6 * gathers[0]
    assert idle.step_time_s > gathers[1]  # the links are all that is busy


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(("batch", "mesh_shape"), [(64, (4, 4)), (16384, (16,)), (4096, (16,))])
def test_the_tpu_compiler_makes_what_is_planned(batch, mesh_shape):
    verification = plan_for(batch, mesh_shape=mesh_shape).verify()
    assert verification.unplanned_share < 0.01
    kinds = verification.wire_bytes_by_kind
    total = sum(compiled for _, compiled in kinds.values())
    for kind, (planned, compiled) in kinds.items():
        if max(planned, compiled) > 0.01 * total:
            assert planned == pytest.approx(compiled, rel=0.05), kind
    assert verification.rematerialised == 0
