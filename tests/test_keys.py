"""What a call compiles for: whatever changes what `jax.jit` would compute changes what runs here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import autoplan


def mesh(*shape: int) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def same(ours, theirs) -> bool:
    return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


@pytest.mark.parametrize("values", [(1, 1.0), (2.0, 2), (1, True), (0.5, np.float32(0.5))])
def test_static_arguments_that_are_equal_but_of_other_types(values: tuple) -> None:
    def step(x, n):
        return x * n

    ours = autoplan.parallelize(step, cluster="cpu:8", static_argnums=1)
    for n in values:
        assert same(ours(jnp.arange(8), n), jax.jit(step, static_argnums=1)(jnp.arange(8), n))


@pytest.mark.parametrize("weak_first", [True, False])
def test_weakly_typed_arrays_are_not_strong_ones(weak_first: bool) -> None:
    def step(x, b):
        return (x * b)[:4]  # of another shape than x, which so is no state

    ours, b = autoplan.parallelize(step, cluster="cpu:8"), jnp.ones((8,), jnp.bfloat16)
    arrays = [jnp.broadcast_to(2.0, (8,)), jnp.full((8,), 2.0, jnp.float32)]
    for x in arrays if weak_first else arrays[::-1]:
        assert same(ours(x, b), jax.jit(step)(x, b))


def test_the_configuration_at_the_call_counts() -> None:
    def step(x):
        return x + jax.random.normal(jax.random.key(0), (8,)), jnp.arange(3)

    ours, x = autoplan.parallelize(step, cluster="cpu:8"), np.ones(8, np.float32)
    contexts = [lambda: jax.enable_x64(False), lambda: jax.default_prng_impl("rbg"), lambda: jax.enable_x64(True)]
    for context in contexts:
        with context():
            for mine, its in zip(ours(x), jax.jit(step)(x)):
                assert same(mine, its)


def test_none_among_the_arguments_takes_no_pin() -> None:
    def step(w, mask, x):
        return w["m"] is None and x @ w["w"]

    args = ({"m": None, "w": np.ones((16, 8), "f4")}, None, np.ones((8, 16), "f4"))
    for pins in ((P("a", "b"), None, P("b")), ({"m": None, "w": P("a", "b")}, None, P("b"))):
        plan = autoplan.parallelize(step, cluster=mesh(2, 4), in_shardings=pins).plan(*args)
        assert plan.in_shardings == (P("a", "b"), P("b", None)), pins


@pytest.mark.parametrize(("pin", "words"), [
    (lambda: P("a", "a"), "each axis once"),
    (lambda: P(("a", "a")), "each axis once"),
    (lambda: NamedSharding(mesh(4, 2), P("a")), "mesh"),
    (lambda: NamedSharding(mesh(2, 4), P("a"), memory_kind="pinned_host"), "memory_kind"),
])
def test_pins_that_cannot_be_kept_are_refused(pin, words: str) -> None:
    with pytest.raises(autoplan.PlanError, match=words):
        step = autoplan.parallelize(lambda x: x + 1, cluster=mesh(2, 4), in_shardings=(pin(),))
        step.plan(np.ones((16, 16), "f4"))


def test_a_context_mesh_that_cannot_be_used_is_refused() -> None:
    step, x = autoplan.parallelize(lambda x: x + 1, cluster="cpu:4"), np.ones(8, "f4")
    with jax.set_mesh(mesh(2, 4)), pytest.raises(autoplan.PlanError, match="context mesh"):
        step(x)
