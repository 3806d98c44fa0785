"""Programs with effects, callbacks, kernels and odd sizes, and JAX's own switches."""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import autoplan

W = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32)


def check(step, *args, tolerance: float = 1e-4, **options) -> autoplan.Plan:
    planned = autoplan.parallelize(step, **({"cluster": "cpu:8"} | options))
    for got, want in zip(jax.tree.leaves(planned(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=tolerance, atol=tolerance
        )
    return planned.plan(*args)


def assert_close(got, want) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), got, want)


def test_effects_stay_and_in_order() -> None:
    seen: list[float] = []

    def step(w, x):
        io_callback(lambda v: seen.append(float(v)), None, x.sum(), ordered=True)
        y = jnp.tanh(x @ w)
        io_callback(lambda v: seen.append(float(v)), None, y.sum() + 1000, ordered=True)
        return y

    planned = autoplan.parallelize(step, cluster="cpu:8")
    for _ in range(2):
        planned(W, X)
    jax.effects_barrier()
    once = [X.sum(), np.tanh(X @ W).sum() + 1000]
    np.testing.assert_allclose(seen, once * 2, rtol=1e-3, atol=1e-2)


def test_prints_are_printed_once(capfd) -> None:
    def step(w, x):
        y = x @ w
        jax.debug.print("rows {n}", n=(y.mean() < 1e9).sum())
        return y

    autoplan.parallelize(step, cluster="cpu:8")(W, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("rows 1") == 1


def test_a_callback_that_gathers_a_large_array_is_named_with_its_line() -> None:
    def step(table, ids):
        out = jax.ShapeDtypeStruct((8, 64), np.float32)
        return jax.pure_callback(lambda t, i: np.asarray(t)[np.asarray(i)], out, table, ids).sum()

    struct = jax.ShapeDtypeStruct
    plan = autoplan.parallelize(step, cluster="cpu:8").plan(
        struct((100_000, 64), np.float32), struct((8,), np.int32)
    )
    (note,) = [note for note in plan.notes if "pure_callback" in note]
    assert "24.4 MiB" in note and "test_any_program.py" in note


def test_kernels() -> None:
    def kernel(x, out):
        out[...] = 2 * x[...]

    check(
        lambda w, x: (
            pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x) @ w
        ),
        W,
        X,
    )


def test_custom_partitioning() -> None:
    @custom_partitioning
    def twice(a):
        return 2 * a

    twice.def_partition(
        partition=lambda mesh, args, result: (mesh, lambda a: 2 * a, args[0].sharding, (args[0].sharding,)),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i j -> i j",
    )
    check(lambda w, x: twice(x @ w), W, X)


@pytest.mark.parametrize("policy", ["offload", "names", "dots", "everything", "nothing"])
def test_rematerialisation_policies(policy) -> None:
    save = jax.checkpoint_policies
    policies = {
        "offload": save.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["h"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        "names": save.save_only_these_names("h"),
        "dots": save.dots_with_no_batch_dims_saveable,
        "everything": save.everything_saveable,
        "nothing": save.nothing_saveable,
    }

    check(jax.grad(lambda w, x: _scanned(w, x, policies[policy])), W, X, tolerance=1e-3)


def _scanned(w, x, policy):
    def layer(h, _):
        return checkpoint_name(jnp.tanh(h @ w), "h"), None

    return (lax.scan(jax.checkpoint(layer, policy=policy), x, None, length=3)[0] ** 2).sum()


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "int8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "bool"]
)
def test_small_dtypes(dtype) -> None:
    a = (np.arange(256).reshape(16, 16) % 3).astype(jnp.dtype(dtype))
    check(lambda a, b: (a.astype(jnp.float32) @ b.astype(jnp.float32), a[:, ::-1], b.T), a, a)


def test_empty_arrays_scalars_and_nones() -> None:
    check(
        lambda a, b, c, d: (a.sum() + b, c * 2, {"n": None, "a": jnp.concatenate([a, a])}, d),
        np.zeros((0, 8), np.float32),
        3.0,
        2,
        None,
    )


@pytest.mark.parametrize("count", [1, 3, 5, 6, 7])
def test_sizes_that_no_axis_divides(count) -> None:
    """A prime vocabulary, a batch of 1, twelve heads."""

    def step(table, ids, x):
        def loss(table):
            logits = jax.nn.log_softmax(table[ids] @ table.T)
            q = x.reshape(1, 7, 12, 2)
            return jax.nn.dot_product_attention(q, q, q).sum() - logits[jnp.arange(len(ids)), ids].mean()

        return jax.grad(loss)(table)

    rng = np.random.default_rng(0)
    check(
        step,
        rng.normal(size=(1031, 24)).astype(np.float32),
        np.arange(7, dtype=np.int32),
        rng.normal(size=(1, 7, 24)).astype(np.float32),
        cluster=f"cpu:{count}",
    )


def test_within_other_transformations() -> None:
    planned = autoplan.parallelize(lambda w, x: jnp.tanh(x @ w).sum(), cluster="cpu:8")
    plain = functools.partial(lambda w, x: jnp.tanh(x @ w).sum())
    np.testing.assert_allclose(jax.jit(lambda w, x: 2 * planned(w, x))(W, X), 2 * plain(W, X), rtol=1e-4)
    np.testing.assert_allclose(jax.grad(planned)(W, X), jax.grad(plain)(W, X), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(
        jax.vmap(planned, (None, 0))(W, X[:, None]),
        jax.vmap(plain, (None, 0))(W, X[:, None]),
        rtol=1e-3,
        atol=1e-4,
    )


def test_without_jit_the_step_runs_as_it_is() -> None:
    seen = []

    def step(w, x):
        seen.append(isinstance(x, jax.core.Tracer))
        return x @ w

    with jax.disable_jit():
        autoplan.parallelize(step, cluster="cpu:8")(W, jnp.asarray(X))
    assert seen == [False]


def test_nans_are_found_where_jax_is_asked_to() -> None:
    planned = autoplan.parallelize(lambda w, x: jnp.log(x @ w - 1e9), cluster="cpu:8")
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="disable_jit"):
        planned(W, X)


def test_arguments_may_lie_on_different_devices() -> None:
    """Each is moved to where the plan has it."""
    w = jax.device_put(W, jax.devices()[1])
    x = jax.device_put(
        X,
        jax.sharding.NamedSharding(
            jax.sharding.Mesh(np.array(jax.devices()[:2]), ("q",)), jax.sharding.PartitionSpec("q")
        ),
    )
    np.testing.assert_allclose(
        autoplan.parallelize(lambda w, x: x @ w, cluster="cpu:8")(w, x), X @ W, rtol=1e-3, atol=1e-3
    )


def planned(w, x):
    return jnp.tanh(x @ w)


COMMITTED = {
    "another layout": lambda x: jax.device_put(x, NamedSharding(jax.make_mesh((8,), ("q",)), P(None, "q"))),
    "another device": lambda x: jax.device_put(x, jax.devices()[5]),
}


@pytest.mark.parametrize("where", COMMITTED)
def test_transformations_of_a_step_take_arrays_that_lie_elsewhere(where) -> None:
    step, x = autoplan.parallelize(planned, cluster="cpu:8", layout="data"), COMMITTED[where](X)
    w = COMMITTED[where](W)
    want = jax.grad(lambda w, x: planned(w, x).sum(), argnums=(0, 1))(W, X)
    assert_close(jax.grad(lambda w: step(w, x).sum())(W), want[0])
    assert_close(jax.grad(lambda w, x: step(w, x).sum(), argnums=(0, 1))(w, x), want)
    assert_close(jax.vmap(lambda w: step(w, x))(jnp.stack([W, W])), jnp.stack([planned(W, X)] * 2))


def test_planned_steps_of_different_layouts_are_differentiated_together() -> None:
    first, second = (autoplan.parallelize(planned, cluster="cpu:8", layout=name) for name in ("data", "tensor"))
    got = jax.grad(lambda w: second(w, first(w, X)).sum())(W)
    assert_close(got, jax.grad(lambda w: planned(w, planned(w, X)).sum())(W))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_transformations_under_a_mesh_that_is_set(kind) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        step, w = autoplan.parallelize(planned), jax.device_put(W, NamedSharding(mesh, P(None, "b")))
        got = (
            jax.jit(lambda w, x: 2 * step(w, x))(w, X),
            jax.grad(lambda w: step(w, X).sum())(w),
            jax.vmap(lambda w: step(w, X))(jnp.stack([W, W])),
        )
        got = jax.tree.map(np.asarray, got)
    want = 2 * planned(W, X), jax.grad(lambda w: planned(w, X).sum())(W), jnp.stack([planned(W, X)] * 2)
    assert_close(got, want)


def test_results_stay_in_the_memory_that_the_step_puts_them_in() -> None:
    step = autoplan.parallelize(lambda x: jax.device_put(x * 2, jax.memory.Space.Host), cluster="cpu:8")
    assert step(X).sharding.memory_kind == "pinned_host"
    assert_close(step(X), 2 * X)


def test_ordered_effects_on_several_devices_are_refused() -> None:
    def step(x):
        jax.debug.print("sum {}", x.sum(), ordered=True)
        return 2 * x

    with pytest.raises(autoplan.PlanError, match="not ordered.*ordered=True"):
        autoplan.parallelize(step, cluster="cpu:8")(X)


def test_static_arguments_are_hashable_as_for_jit() -> None:
    with pytest.raises(ValueError, match="options: static arguments must be hashable"):
        autoplan.parallelize(lambda x, options: x, cluster="cpu:8", static_argnums=1)(X, [1, 2])
