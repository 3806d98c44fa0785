"""Emission keeps the program: what it computes, its calls and barriers; and puts constraints where the plan says."""

from __future__ import annotations

import collections
import dataclasses

import jax
from jax.extend import core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest

import autoplan
from autoplan import compat
from autoplan.emit import emit
from autoplan.plan import Constraint


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def primitives(jaxpr, found=None) -> collections.Counter:
    found = collections.Counter() if found is None else found
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        found[eqn.primitive.name] += 1
        for sub in compat.subjaxprs(eqn):
            primitives(sub.jaxpr, found)
    return found


@jax.custom_vjp
def clipped(x):
    return jnp.minimum(x, 3.0)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.where(x < 3, g, 0.1 * g),))


def everything(state, batch):
    """A scan over rematerialised layers, a branch, a loop, custom rules and calls within calls."""

    def loss_fn(weights):
        @jax.checkpoint
        def layer(h, w):
            h = clipped(jax.nn.relu(jax.jit(jnp.dot)(h, w["up"])) @ w["down"]) + h
            return jax.lax.cond(h.sum() > 0, jnp.tanh, lambda h: 0.5 * h, h), h.mean()

        h, means = jax.lax.scan(layer, batch, weights)
        return (h**2).mean() + means.sum()

    loss, grads = jax.value_and_grad(loss_fn)(state["w"])
    scale = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.5 * c[1]), (0, 1.0))[1]
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    weights = jax.tree.map(lambda w, g: w - 0.1 * scale * g / (1 + norm), state["w"], grads)
    return {"w": weights, "count": state["count"] + 1}, loss


def everything_state():
    rng = np.random.default_rng(0)
    normal = lambda *shape: (0.3 * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    return {"w": {"up": normal(3, 16, 32), "down": normal(3, 32, 16)}, "count": np.int32(0)}, normal(24, 16)


@pytest.fixture(scope="module")
def planned():
    state, batch = everything_state()
    traced = autoplan.parallelize(everything, cluster="cpu:8", mesh_shape=(2, 4)).trace(state, batch)
    plan = traced.plan()
    mesh = jax.make_mesh((2, 4), plan.mesh.axis_names, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return traced.trace, plan, emit(traced.trace, plan, mesh)


def test_equations_stay_and_only_constraints_are_added(planned) -> None:
    trace, plan, emitted = planned
    before, after = primitives(trace.jaxpr), primitives(emitted)
    added = after - before
    assert not before - after
    assert set(added) <= {"sharding_constraint", "optimization_barrier"}
    assert added["sharding_constraint"] <= len(plan.constraints)
    assert after["remat2"] + after["checkpoint"] + after["remat"] > 0


@pytest.mark.parametrize(("where", "site"), [("operand", (1,)), ("result", (0,)), ("input", ()), ("output", ())])
def test_what_comes_after_a_constraint_reads_it(where: str, site: tuple) -> None:
    def step(x):
        return jnp.tanh(jnp.sin(x))

    traced = autoplan.parallelize(step, cluster="cpu:8", mesh_shape=(8,)).trace(array(16, 8))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    plan = dataclasses.replace(traced.plan(), constraints=(Constraint(site, where, 0, (("x",), ())),))
    emitted = compat.open_jaxpr(emit(traced.trace, plan, mesh))
    names = [eqn.primitive.name for eqn in emitted.eqns]
    place = {"operand": 1, "result": 1, "input": 0, "output": 2}[where]
    assert names == [*["sin", "tanh"][:place], "sharding_constraint", *["sin", "tanh"][place:]]
    (made,) = emitted.eqns[place].outvars
    reads = emitted.eqns[place + 1].invars if place < 2 else emitted.outvars
    assert made in reads
    assert emitted.eqns[place].params["sharding"].spec == jax.sharding.PartitionSpec("x", None)


def test_constraints_stand_inside_the_bodies(planned) -> None:
    _, plan, emitted = planned
    assert any(len(c.site) > 1 for c in plan.constraints)
    (scan, *_) = [eqn for eqn in compat.open_jaxpr(emitted).eqns if eqn.primitive.name == "scan"]
    assert primitives(compat.subjaxprs(scan)[0].jaxpr)["sharding_constraint"] > 0


@pytest.mark.parametrize("layout", ["auto", "fsdp", "tensor"])
def test_everything_computes_the_same(layout: str) -> None:
    state, batch = everything_state()
    plain, parallel = jax.jit(everything), autoplan.parallelize(everything, cluster="cpu:8", layout=layout)
    expected = actual = state
    for _ in range(3):
        expected, wanted = plain(expected, batch)
        actual, loss = parallel(actual, batch)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), actual, expected)


def test_a_function_called_many_times_in_one_way_is_rewritten_once() -> None:
    inner = jax.jit(lambda h, w: jnp.tanh(h @ w))

    def step(h, w):
        for _ in range(6):
            h = inner(h, w)
        return h

    traced = autoplan.parallelize(step, cluster="cpu:8", mesh_shape=(8,)).trace(array(64, 64), array(64, 64))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    emitted = emit(traced.trace, traced.plan(), mesh)
    bodies = {id(sub.jaxpr) for eqn in compat.open_jaxpr(emitted).eqns for sub in compat.subjaxprs(eqn)}
    assert len(bodies) <= 3  # first, middle, last


def test_a_repeated_reshard_is_not_merged_by_the_compiler() -> None:
    def step(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, grads), value

    args = [array(512, 512)] * 3, array(1024, 512)
    step = autoplan.parallelize(step, cluster="cpu:8", mesh_shape=(8,), donate_argnums=0)
    with pytest.raises(autoplan.MemoryLimitError) as refused:
        step.with_options(memory=10_000).plan(*args)
    step = step.with_options(memory=refused.value.smallest_bytes)
    plan = step.plan(*args)
    assert plan.peak_memory_bytes <= refused.value.smallest_bytes
    assert any(c.again for c in plan.constraints)
    planned = sum(c.count for c in plan.collectives if c.kind == "all-gather")
    text = step.compile(*args).as_text()
    assert text.count(" all-gather(") + text.count(" all-gather-start(") == planned


def test_one_device_needs_nothing() -> None:
    traced = autoplan.parallelize(everything, cluster="cpu:1").trace(*everything_state())
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    assert emit(traced.trace, traced.plan(), mesh) is traced.trace.jaxpr
    assert isinstance(traced.trace.jaxpr, jex_core.ClosedJaxpr)
