"""What users ask for themselves: pins of arguments and results, constraints and `shard_map`s in the step, meshes that
are set around it. It is kept, or refused with its reason."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import autoplan

W = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32)


def mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def product(w, x, *spec):
    """A product whose layout the step itself says."""
    y = lax.with_sharding_constraint(jnp.sin(x) @ w, NamedSharding(mesh(), P(*spec)))
    return jnp.tanh(y)


def check(step, *args, **options) -> autoplan.Plan:
    """Runs a step on 8 devices and on one, and gives its plan."""
    planned = autoplan.parallelize(step, **({"cluster": mesh()} | options))
    plan = planned.plan(*args)
    for got, want in zip(jax.tree.leaves(planned(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    return plan


@pytest.mark.parametrize("spec", [("data", "model"), ("model", "data"), (("data", "model"), None)])
def test_constraints_in_the_step_are_kept_and_planned_for(spec) -> None:
    plan = check(lambda w, x: product(w, x, *spec), W, X)
    assert P(*plan.outputs[0].partition_spec) == P(*spec), "elementwise work after it follows"
    verified = autoplan.parallelize(lambda w, x: product(w, x, *spec), cluster=mesh()).plan(W, X).verify()
    assert verified.unplanned_share <= 0.01


def test_dims_that_a_constraint_leaves_free_are_the_planners() -> None:
    plan = check(lambda w, x: product(w, x, "model", P.UNCONSTRAINED), W, X)
    assert plan.outputs[0].spec[0] == ("model",) or plan.collectives


def test_a_constraint_by_spec_alone_means_the_mesh_around_the_step() -> None:
    def step(w, x):
        return lax.with_sharding_constraint(x @ w, P("model", "data"))

    with jax.set_mesh(mesh()):
        plan = check(step, W, X, cluster=None)
    assert plan.mesh.axis_names == ("data", "model") and plan.outputs[0].spec == (("model",), ("data",))


def test_a_mesh_that_only_the_step_names_is_planned_on() -> None:
    plan = check(lambda w, x: product(w, x, "data", "model"), W, X, cluster="cpu:8")
    assert str(plan.mesh) == "data=2, model=4"


def test_a_constraint_in_a_loop() -> None:
    def step(w, x):
        def body(h, _):
            return lax.with_sharding_constraint(
                jnp.tanh(h @ w), NamedSharding(mesh(), P("data", "model"))
            ), h.mean()

        return lax.scan(body, x, None, length=3)[1]

    check(step, W, X)
    verified = autoplan.parallelize(step, cluster=mesh()).plan(W, X).verify()
    assert verified.unplanned_share <= 0.01


def test_what_does_not_divide_is_said() -> None:
    def step(a):
        return lax.with_sharding_constraint(2 * a, NamedSharding(mesh(), P(("data", "model"), None)))

    plan = check(step, np.ones((17, 16), np.float32))
    (note,) = [note for note in plan.notes if "constraint" in note]
    assert "dim 0" in note and "size 17" in note and "8 ways of data, model" in note and "24" in note
    assert "test_users_word.py" in note


@pytest.mark.parametrize(("cluster", "words"), [("cpu:4", "data=2, model=4"), ("v5e:4x4", "data=2, model=4")])
def test_a_mesh_in_the_step_that_is_not_the_planned_one_is_refused(cluster, words) -> None:
    with pytest.raises(autoplan.PlanError, match=words):
        autoplan.parallelize(lambda w, x: product(w, x, "data"), cluster=cluster).plan(W, X)


def test_two_meshes_in_a_step_are_refused() -> None:
    other = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def step(w, x):
        return lax.with_sharding_constraint(product(w, x, "data"), NamedSharding(other, P("d")))

    with pytest.raises(autoplan.PlanError, match="one mesh"):
        autoplan.parallelize(step, cluster=mesh()).plan(W, X)


def test_axes_in_another_order_than_the_meshs_are_refused() -> None:
    with pytest.raises(autoplan.PlanError, match="mesh's order.*test_users_word.py"):
        autoplan.parallelize(lambda w, x: product(w, x, ("model", "data")), cluster=mesh()).plan(W, X)


def test_shard_maps_stay_and_are_planned_around() -> None:
    def step(w, x):
        multiply = jax.shard_map(
            lambda a, b: lax.psum(a @ b, "model"), mesh=mesh(), in_specs=(P("data", "model"), P("model", None)),
            out_specs=P("data", None))  # fmt: skip

        def loss(w):
            return (multiply(jnp.sin(x), w) ** 2).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    plan = check(step, W, X)
    assert plan.inputs[0].spec == (("model",), ()), "the weights come as the region wants them"
    assert not [note for note in plan.notes if "shard_map" in note]


@pytest.mark.parametrize("pins", [P("data", "model"), (P("data", "model"), None), {"a": P(None, "model")}])
def test_results_are_pinned_as_by_jit(pins) -> None:
    def step(w, x):
        y = x @ w
        return {"a": y} if isinstance(pins, dict) else (y, y.sum()) if isinstance(pins, tuple) else y

    plan = check(step, W, X, out_shardings=pins)
    wanted = jax.tree.leaves(pins, is_leaf=lambda p: isinstance(p, P))[0]
    assert P(*plan.outputs[0].partition_spec) == wanted


def test_a_pinned_new_state_comes_in_as_it_goes_out() -> None:
    def step(w, x):
        return w - 0.1 * x.T @ x, x.sum()

    planned = autoplan.parallelize(
        step, cluster=mesh(), out_shardings=(P("model", "data"), None), donate_argnums=0
    )
    plan = planned.plan(W, X)
    assert plan.inputs[0].spec == plan.outputs[0].spec == (("model",), ("data",))
    both = planned.with_options(in_shardings=(P("data", "model"), None)).plan(W, X)
    assert both.inputs[0].spec == (("data",), ("model",)) and both.outputs[0].spec == (("model",), ("data",))


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ((P("data"), P("data"), None), "prefix of the step's result"),
        ((P("data", "model", None), None), "result"),
        ((P("nowhere"), None), "nowhere"),
        ((P(("model", "data")), None), "order"),
    ],
)
def test_result_pins_that_cannot_be_kept_are_refused(pins, words) -> None:
    with pytest.raises(autoplan.PlanError, match=words):
        autoplan.parallelize(lambda w, x: (x @ w, x.sum()), cluster=mesh(), out_shardings=pins).plan(W, X)


def test_explicit_axes_around_a_step_are_planned_and_labelled_again() -> None:
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)

    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        planned = autoplan.parallelize(step)
        w, x = jax.device_put(W, P(None, "model")), jax.device_put(X, P("data", None))
        new = planned(planned(w, x), x)
        assert new.sharding.mesh == explicit
        assert (new + w).sharding.mesh.axis_types == (AxisType.Explicit,) * 2, (
            "the next eager operation works"
        )
    plain = jax.jit(step)
    np.testing.assert_allclose(new, plain(plain(W, X), X), rtol=1e-4, atol=1e-5)


def test_a_gather_that_is_ambiguous_under_explicit_axes_is_planned() -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)):
        table, ids = (
            jax.device_put(W, P("data", None)),
            jax.device_put(np.arange(16, dtype=np.int32), P("data")),
        )
        rows = autoplan.parallelize(lambda table, ids: table[ids])(table, ids)
    np.testing.assert_array_equal(rows, W[:16])


def test_nothing_stays_set_after_a_step() -> None:
    y = autoplan.parallelize(lambda w, x: product(w, x, "data", "model"), cluster=mesh())(W, X)
    assert jax.sharding.get_abstract_mesh().empty
    assert float(jnp.ones(3).sum()) == 3 and (y[:3] + 1).shape == (3, 64)
