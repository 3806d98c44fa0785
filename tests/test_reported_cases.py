"""Cases that people met while doing this job by hand, each with the right outcome."""

from __future__ import annotations

import functools
import warnings

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint
import pytest

import autoplan


def mesh(*sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def batch(i: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(i)
    return rng.normal(size=(24, 16)).astype(np.float32), rng.normal(size=(24, 12)).astype(np.float32)


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def make_state(key: jax.Array) -> dict:
    up, down = jax.random.split(key)
    params = {"up": jax.random.normal(up, (16, 48)) / 4, "down": jax.random.normal(down, (48, 12)) / 7}
    return {"params": params, "opt": TX.init(params), "key": jax.random.key(7)}


def train_step(state: dict, x: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
    """Dropout under remat, clipping by the global norm, Adam."""
    key, draw = jax.random.split(state["key"])

    def loss(params):
        @jax.checkpoint
        def hidden(x):
            h = jnp.tanh(x @ params["up"])
            return jnp.where(jax.random.bernoulli(draw, 0.8, h.shape), h, 0) / 0.8

        return ((hidden(x) @ params["down"] - y) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, value


def assert_close(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-3, atol=1e-5)


@functools.cache
def plain_run(steps: int) -> tuple[dict, list[float]]:
    state, losses, step = make_state(jax.random.key(0)), [], jax.jit(train_step)
    for i in range(steps):
        state, loss = step(state, *batch(i))
        losses.append(float(loss))
    return state, losses


def test_a_move_that_the_partitioner_would_rematerialise_goes_step_by_step(capfd) -> None:
    """On (4, 2): an add of P(y, -, x) values that is wanted as P(-, (x, y), -)."""
    grid = mesh(4, 2)

    def at(v, *spec):
        return lax.with_sharding_constraint(v, NamedSharding(grid, P(*spec)))

    def step(p, q):
        return at(at(p, "y", None, "x") + at(q, "y", None, "x"), None, ("x", "y"), None)[None]

    p = np.random.default_rng(0).normal(size=(8, 16, 32)).astype(np.float32)
    planned = autoplan.parallelize(step, cluster=grid)
    verified = planned.plan(p, p).verify()
    np.testing.assert_allclose(planned(p, p)[0], 2 * p, rtol=1e-6)
    assert verified.unplanned_share == 0
    assert max(c.wire_bytes for c in verified.collectives) < p.nbytes / 4, (
        "nothing like a gather of the whole"
    )
    assert "rematerialization" not in capfd.readouterr().err


def test_an_argument_that_does_not_divide_is_named_with_a_way_out() -> None:
    step = autoplan.parallelize(lambda state: state["w"] * 2, cluster=mesh(8), in_shardings=P("x", None))
    with pytest.raises(autoplan.PlanError) as caught:
        step({"w": np.ones((17, 16), np.float32)})
    for word in ("state['w']", "dim 0", "'x'", "size 17", "8 ways", "Pad the dim to 24"):
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_two_pads_and_concatenations_of_one_element_per_device(sizes) -> None:
    def step(x, y):
        z = jnp.concatenate([jnp.pad(x, (1, 1)), y])
        w = jnp.concatenate([jnp.pad(z, (2, 0)), jnp.concatenate([x[1:], x[:1]])])
        return z.sum(), 2 * w, jnp.pad(y, (0, 1))[1:]

    x = np.arange(8, dtype=np.float32)
    got = autoplan.parallelize(step, cluster=f"cpu:{np.prod(sizes)}", mesh_shape=sizes)(x, x[::-1].copy())
    assert_close(got, jax.jit(step)(x, x[::-1].copy()))


def test_scalars_of_the_optimizer_that_lie_on_one_device_compile_nothing_again() -> None:
    """`tx.init` of sharded weights leaves Adam's count on one device."""
    step = autoplan.parallelize(train_step, cluster="cpu:8", layout="fsdp", donate_argnums=0)
    step.plan(make_state(jax.random.key(0)), *batch())
    state = step.init(make_state, jax.random.key(0))
    state["opt"] = jax.tree.map(
        lambda x: jax.device_put(jnp.array(x), jax.devices()[0]) if x.ndim == 0 else x, state["opt"]
    )
    state, _ = step(state, *batch(0))
    seen: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        listen := lambda event, seconds, **more: seen.append(event)
    )
    try:
        step(state, *batch(1))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in seen if event.startswith("/jax/core/compile")]


def test_optimizer_state_laid_out_apart_from_its_parameter() -> None:
    """ZeRO-1: whole parameters, moments in parts."""

    def lay(tree, spec):
        return jax.tree.map(lambda x: spec if x.ndim == 2 else P(), tree)

    state = make_state(jax.random.key(0))
    pins = {"params": lay(state["params"], P()), "opt": lay(state["opt"], P("x")), "key": P()}
    step = autoplan.parallelize(
        train_step, cluster=mesh(2), in_shardings=(pins, P("x"), P("x")), donate_argnums=0
    )
    plan = step.plan(state, *batch())
    specs = plan.partition_specs()
    assert specs["state['params']['up']"] == P(None, None) or specs["state['params']['up']"] == P()
    assert specs["state['opt'][1][0].mu['up']"] == P("x", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Some donated buffers were not usable")
        for i in range(2):
            state, loss = step(state, *batch(i))
    assert_close(state, plain_run(2)[0])


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8])
def test_draws_do_not_depend_on_the_number_of_devices(count) -> None:
    step, state, losses = (
        autoplan.parallelize(train_step, cluster=f"cpu:{count}"),
        make_state(jax.random.key(0)),
        [],
    )
    for i in range(2):
        state, loss = step(state, *batch(i))
        losses.append(float(loss))
    np.testing.assert_allclose(losses, plain_run(2)[1], rtol=1e-4)


@pytest.mark.parametrize("count", [2, 6])
def test_a_checkpoint_of_8_devices_goes_on_elsewhere_under_another_plan(count, tmp_path) -> None:
    step = autoplan.parallelize(train_step, cluster="cpu:8", layout="fsdp", donate_argnums=0)
    step.plan(make_state(jax.random.key(0)), *batch())
    state = step.init(make_state, jax.random.key(0))
    state, _ = step(state, *batch(0))
    raw = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state
    )
    with orbax.checkpoint.StandardCheckpointer() as keeper:
        keeper.save(tmp_path / "state", raw)

    other = autoplan.parallelize(train_step, cluster=f"cpu:{count}", layout="data", donate_argnums=0)
    plan = other.plan(state, *batch())
    target = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    specs = plan.partition_specs()

    def like(path, leaf):
        spec = specs.get(f"state{jax.tree_util.keystr(path)}", P()) if leaf.ndim == 2 else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(target, spec))

    with orbax.checkpoint.StandardCheckpointer() as keeper:
        back = keeper.restore(tmp_path / "state", jax.tree_util.tree_map_with_path(like, raw))
    back["key"] = jax.random.wrap_key_data(back["key"])
    again, _ = other(back, *batch(1))
    assert_close(again, plain_run(2)[0])


def test_eager_work_after_a_step_is_as_before() -> None:
    step = autoplan.parallelize(train_step, cluster="cpu:8")
    step(make_state(jax.random.key(0)), *batch())
    assert jax.sharding.get_abstract_mesh().empty
    assert len((jnp.ones(5) + 1).sharding.device_set) == 1


def test_a_batch_of_one() -> None:
    x, y = (part[:1] for part in batch())
    state = make_state(jax.random.key(0))
    assert_close(
        autoplan.parallelize(train_step, cluster="cpu:8")(state, x, y), jax.jit(train_step)(state, x, y)
    )


def test_a_limit_that_nothing_fits_says_what_blocks() -> None:
    step = autoplan.parallelize(train_step, cluster="cpu:8", memory=4096)
    with pytest.raises(autoplan.MemoryLimitError, match="the smallest that works.*at the peak"):
        step.plan(make_state(jax.random.key(0)), *batch())
