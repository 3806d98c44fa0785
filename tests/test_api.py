"""The API: stages, signatures, placement, one compile, NNX objects, births, and errors that lose nothing."""

from collections.abc import Iterator
import contextlib
import functools
import os
import subprocess
import sys
from typing import Any

from flax import nnx
from flax.training import train_state
import jax
from jax import monitoring
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import autoplan
from autoplan import (
    ClusterError,
    DeviceError,
    MemoryLimitError,
    PinError,
    PlanError,
    PlanFileError,
    StateError,
)

SIZE = 16
BATCH = 32


def make_params(key):
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (SIZE, 4 * SIZE)),
        "w2": jax.random.normal(second, (4 * SIZE, SIZE)),
    }


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"] - batch["y"]) ** 2)


def sgd(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def make_batch(seed=0, size=BATCH):
    draw = np.random.default_rng(seed)
    return {"x": draw.normal(size=(size, SIZE)).astype(np.float32), "y": np.ones((size, SIZE), np.float32)}


def assert_same(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), a, b)


@contextlib.contextmanager
def count_compiles(name: str) -> Iterator[list[str]]:
    """A list that grows by one for each time that a function is compiled meanwhile."""
    found: list[str] = []

    def listen(event: str, duration: float, fun_name: str = "", **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and fun_name == f"jit({name})":
            found.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def params() -> dict:
    return make_params(jax.random.key(0))


# Calls


def test_bare_and_with_options_keep_the_function(params):
    bare = autoplan.parallelize(sgd)
    with_options = autoplan.parallelize(layout="data")(sgd)
    assert bare.__name__ == with_options.__name__ == "sgd" and bare.__wrapped__ is sgd
    assert_same(with_options(params, make_batch()), sgd(params, make_batch()))


@pytest.mark.parametrize("layout", ["auto", "data", "fsdp", "tensor"])
def test_three_steps_equal_the_plain_ones(params, layout):
    step, plain = autoplan.parallelize(sgd, layout=layout), jax.jit(sgd)
    ours = theirs = params
    for i in range(3):
        ours, loss = step(ours, make_batch(i))
        theirs, plain_loss = plain(theirs, make_batch(i))
        assert_same((ours, loss), (theirs, plain_loss))
    plan = step.plan(params, make_batch())
    for path, leaf in [("params['w1']", ours["w1"]), ("params['w2']", ours["w2"])]:
        assert leaf.sharding.is_equivalent_to(
            NamedSharding(leaf.sharding.mesh, plan.partition_specs()[path]), 2
        )


def test_the_state_is_split(params):
    step = autoplan.parallelize(sgd, layout="fsdp")
    new, _ = step(params, make_batch())
    assert {shard.data.size for shard in new["w1"].addressable_shards} == {
        new["w1"].size // len(jax.devices())
    }


def test_one_compile_whatever_the_placement(params, devices):
    def step(state, batch):
        new, loss = sgd(state["params"], batch)
        return {"params": new, "count": state["count"] + 1}, loss

    step = autoplan.parallelize(step, layout="fsdp")
    state = {"params": jax.device_put(params, devices[3]), "count": 0}
    with count_compiles("step") as compiles:
        state, _ = step(state, make_batch())
    assert len(compiles) == 1
    batches = [
        make_batch(1),
        jax.tree.map(jnp.asarray, make_batch(2)),
        jax.device_put(make_batch(3), devices[5]),
        jax.device_put(make_batch(4), devices[5]),
    ]
    with count_compiles("step") as compiles:
        for batch in batches:
            state, _ = step(state, batch)
        state["count"] = jax.device_put(jnp.int32(7), devices[2])
        state, _ = step(state, batches[0])
        state["count"] = 7
        state, _ = step(state, batches[0])
        state["count"] = np.int32(7)
        state, _ = step(state, batches[0])
    assert not compiles and int(state["count"]) == 8
    assert [len(found) for found in step._executables.values()] == [1]


def test_a_scalar_of_an_optimizer_is_no_reason_to_compile_again(params):
    def make():
        return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    parallel, plain = autoplan.parallelize(step, layout="data"), jax.jit(step)
    ours = theirs = make()
    ours, _ = parallel(ours, make_batch())
    theirs, _ = plain(theirs, make_batch())
    with count_compiles("step") as compiles:
        for i in range(2):
            ours, _ = parallel(ours, make_batch(i))
    assert not compiles
    for i in range(2):
        theirs, _ = plain(theirs, make_batch(i))
    assert_same(ours.params, theirs.params)


def test_other_shapes_and_weak_types_get_programs_of_their_own(params):
    @autoplan.parallelize
    def scaled(w, x, scale):
        return w, x.astype(jnp.bfloat16) * scale

    x = make_batch()["x"]
    assert scaled(params, x, 2.0)[1].dtype == jnp.bfloat16
    assert scaled(params, x, np.float32(2))[1].dtype == jnp.float32
    assert scaled(params, x[:8], 2.0)[1].shape == (8, SIZE)
    with count_compiles("scaled") as compiles:
        assert scaled(params, x, 3.0)[1].dtype == jnp.bfloat16
        assert scaled(params, x, np.float32(3))[1].dtype == jnp.float32
        assert scaled(params, x[8:16], 3.0)[1].shape == (8, SIZE)
    assert not compiles


def test_static_arguments(params):
    @autoplan.parallelize(static_argnames="power")
    def step(w, x, power):
        return w, (x @ w["w1"]).sum() ** power

    x = make_batch()["x"]
    plain = float((x @ params["w1"]).sum())
    assert float(step(params, x, power=2)[1]) == pytest.approx(plain**2, rel=1e-4)
    assert float(step(params, x, 3)[1]) == pytest.approx(plain**3, rel=1e-4)
    assert float(step(params, x, 2)[1]) == pytest.approx(plain**2, rel=1e-4)


def test_donation_is_honoured(params):
    step = autoplan.parallelize(sgd, donate_argnums=0, layout="fsdp")
    first, _ = step(params, make_batch())
    second, _ = step(first, make_batch())
    assert all(leaf.is_deleted() for leaf in first.values())
    assert not any(leaf.is_deleted() for leaf in (*second.values(), *params.values()))


def test_random_draws_are_those_of_the_plain_step(params):
    def step(params, key, x):
        key, draw = jax.random.split(key)
        keep = jax.random.bernoulli(draw, 0.5, (BATCH, 4 * SIZE))
        return (
            jax.tree.map(lambda p: p + jax.random.normal(draw, p.shape), params),
            key,
            (x @ params["w1"]) * keep,
        )

    x = make_batch()["x"]
    ours = autoplan.parallelize(step, layout="data")(params, jax.random.key(1), x)
    theirs = jax.jit(step)(params, jax.random.key(1), x)
    assert_same(ours[::2], theirs[::2])
    assert jnp.array_equal(jax.random.key_data(ours[1]), jax.random.key_data(theirs[1]))


def test_large_closed_over_arrays_are_split_not_copied():
    table = jax.random.normal(jax.random.key(0), (1024, 64))
    step = autoplan.parallelize(lambda x: jnp.tanh(x @ table.T), memory="1GiB")
    x = np.ones((BATCH, 64), np.float32)
    assert_same(step(x), jnp.tanh(x @ table.T))
    compiled = step.compile(x)
    assert "closure[0]" in compiled.input_shardings
    assert compiled.memory_analysis().generated_code_size_in_bytes < table.nbytes
    assert not [
        line for line in compiled.as_text().splitlines() if "constant" in line and "f32[1024,64]" in line
    ]


def test_a_step_works_inside_other_transformations(params):
    step = autoplan.parallelize(loss_fn)
    batch = make_batch()
    assert_same(jax.grad(step)(params, batch), jax.grad(loss_fn)(params, batch))
    assert_same(jax.jit(lambda p: step(p, batch) * 2)(params), 2 * loss_fn(params, batch))


def test_methods():
    class Trainer:
        @functools.partial(autoplan.parallelize, static_argnums=0)
        def step(self, w, x):
            return w + x.mean()

    np.testing.assert_allclose(Trainer().step(np.ones((8, 8), np.float32), np.ones(8, np.float32)), 2.0)


# Stages


def test_stages(params, capsys):
    step = autoplan.parallelize(sgd, cluster="cpu:8")
    shapes = jax.eval_shape(make_params, jax.random.key(0)), make_batch()
    traced = step.trace(*shapes)
    assert "dot_general" in str(traced) and repr(traced).startswith("<Traced sgd")
    plan = traced.plan()
    assert plan.program == "sgd" and plan.fingerprint == traced.trace.fingerprint
    compiled = step.compile(*shapes)
    assert compiled.plan == plan and compiled.plan.mesh.num_devices == 8
    assert "HloModule jit_sgd" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert set(compiled.input_shardings) == {"params['w1']", "params['w2']", "batch['x']", "batch['y']"}
    assert_same(compiled(params, make_batch()), sgd(params, make_batch()))


def test_planning_is_done_once_for_a_program(params):
    step = autoplan.parallelize(sgd)
    assert step.plan(params, make_batch()) is step.plan(params, make_batch(1))
    assert step.compile(params, make_batch()).plan is step.plan(params, make_batch())


def test_planning_needs_no_devices():
    step = autoplan.parallelize(sgd, cluster="v5e:4x4", memory="16GB")
    plan = step.plan(jax.eval_shape(make_params, jax.random.key(0)), make_batch())
    assert plan.mesh.num_devices == 16 and plan.cluster == "v5e:4x4"
    with pytest.raises(DeviceError, match=r"xla_force_host_platform_device_count=16"):
        step(make_params(jax.random.key(0)), make_batch())


def test_a_compiled_step_refuses_other_arguments(params):
    compiled = autoplan.parallelize(sgd).compile(params, make_batch())
    with pytest.raises(PlanError, match=r"batch\['x'\] \(float32\[32, 16\]\).*got float32\[8, 16\]"):
        compiled(params, make_batch(size=8))
    with pytest.raises(PlanError, match="structure"):
        compiled(list(params.values()), make_batch())


def test_a_saved_plan_is_used_and_checked(params, tmp_path):
    shapes = params, make_batch()
    made = autoplan.parallelize(sgd, layout="tensor").plan(*shapes)
    made.save(tmp_path / "plan.json")
    plan = autoplan.Plan.load(tmp_path / "plan.json")
    for step in (autoplan.parallelize(sgd, plan=plan), autoplan.parallelize(sgd).use_plan(plan)):
        assert step.plan(*shapes) is plan
        assert_same(step(*shapes), sgd(*shapes))
    assert autoplan.parallelize(sgd).compile(*shapes, plan=plan).plan is plan
    with pytest.raises(PlanFileError, match="another program"):
        autoplan.parallelize(sgd, plan=plan)(params, make_batch(size=8))
    with pytest.raises(DeviceError, match="needs 8 devices"):
        autoplan.parallelize(sgd, plan=plan, cluster=jax.devices()[:4])(*shapes)


# Clusters, memory, pins


def test_a_mesh_is_kept(params, devices):
    mesh = Mesh(np.array(devices[:8]).reshape(4, 2), ("rows", "cols"), axis_types=(AxisType.Auto,) * 2)
    step = autoplan.parallelize(sgd, cluster=mesh)
    plan = step.plan(params, make_batch())
    assert (plan.mesh.axis_names, plan.mesh.axis_sizes) == (("rows", "cols"), (4, 2))
    new, _ = step(params, make_batch())
    assert new["w1"].sharding.mesh == mesh
    assert_same(new, sgd(params, make_batch())[0])


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_list_of_devices(params, devices, count):
    step = autoplan.parallelize(sgd, cluster=devices[2 : 2 + count])
    batch = make_batch(size=12)
    new, _ = step(params, batch)
    assert new["w1"].sharding.device_set <= set(devices[2 : 2 + count])
    assert_same(new, sgd(params, batch)[0])


def test_mesh_shape_is_kept(params):
    assert autoplan.parallelize(sgd, mesh_shape=(2, 4)).plan(params, make_batch()).mesh.axis_sizes == (2, 4)


def test_pins_are_kept(params, devices):
    mesh = jax.make_mesh((4, 2), ("a", "b"), devices=devices[:8], axis_types=(AxisType.Auto,) * 2)
    pins = ({"w1": NamedSharding(mesh, P(None, "b")), "w2": P("b")}, P("a", P.UNCONSTRAINED))
    step = autoplan.parallelize(sgd, in_shardings=pins)
    specs = step.plan(params, make_batch()).partition_specs()
    assert tuple(specs["params['w1']"]) == (None, "b") and tuple(specs["params['w2']"]) == ("b", None)
    assert specs["batch['x']"][0] == "a"
    new, _ = step(params, make_batch())
    assert new["w1"].sharding.is_equivalent_to(pins[0]["w1"], 2)
    assert_same(new, sgd(params, make_batch())[0])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cluster": "h1000:8"}, ClusterError, "h1000"),
        ({"cluster": 8}, ClusterError, "cluster='8xH100'"),
        ({"cluster": []}, ClusterError, "list of devices"),
        ({"memory": "lots"}, PlanError, "80GiB"),
        ({"memory": 0}, PlanError, "memory"),
        ({"mesh_shape": (0, 8)}, PlanError, r"mesh_shape=\(4, 2\)"),
        ({"layout": "zero3"}, PlanError, "'fsdp'"),
        ({"plan": "plan.json"}, PlanError, "Plan.load"),
    ],
)
def test_wrong_options_are_refused_at_once(options, error, words):
    with pytest.raises(error, match=words):
        autoplan.parallelize(sgd, **options)
    with pytest.raises(error, match=words):
        autoplan.parallelize(sgd).with_options(**options)


def test_a_pin_that_does_not_divide_is_refused(params, devices):
    mesh = jax.make_mesh((8,), ("d",), devices=devices[:8], axis_types=(AxisType.Auto,))
    step = autoplan.parallelize(sgd, cluster=mesh, in_shardings=(None, P("d")))
    with pytest.raises(
        PinError, match=r"batch\['x'\] \(float32\[12, 16\]\), dim 0, axis 'd'.*test_api.py"
    ) as caught:
        step(params, make_batch(size=12))
    assert "12" in str(caught.value) and "16" in str(caught.value)
    with pytest.raises(PinError, match="'e'"):
        autoplan.parallelize(sgd, cluster=mesh, in_shardings=(None, P("e")))(params, make_batch())
    with pytest.raises(PinError, match="jax.make_mesh"):
        autoplan.parallelize(sgd, in_shardings=(None, P("e")))(params, make_batch())


def test_a_failure_loses_nothing(params):
    state = jax.tree.map(jnp.array, params)
    with pytest.raises(MemoryLimitError) as caught:
        autoplan.parallelize(sgd, memory="1kB", donate_argnums=0, layout="fsdp")(state, make_batch())
    assert caught.value.smallest_bytes > 1000
    with pytest.raises(StateError):
        autoplan.parallelize(lambda p, b: ({"w1": p["w1"]}, b["x"].sum()), donate_argnums=0)(
            state, make_batch()
        )
    with pytest.raises(DeviceError):
        autoplan.parallelize(sgd, cluster="cpu:16", donate_argnums=0)(state, make_batch())
    assert_same(state, params)


def test_no_array_is_named():
    with pytest.raises(TypeError, match="batch"):
        autoplan.parallelize(sgd)(make_params(jax.random.key(0)), {"x": "text", "y": np.ones(3)})


# Births


def test_a_state_is_born_split(params):
    step = autoplan.parallelize(sgd, layout="fsdp")
    with pytest.raises(PlanError, match=r"sgd\.plan\(\.\.\.\) first"):
        step.init(make_params, jax.random.key(0))
    step.plan(jax.eval_shape(make_params, jax.random.key(0)), make_batch())
    state = step.init(make_params, jax.random.key(0))
    assert {shard.data.size for shard in state["w1"].addressable_shards} == {
        state["w1"].size // len(jax.devices())
    }
    assert_same(state, params)
    assert_same(step(state, make_batch()), sgd(params, make_batch()))


def test_several_states_are_born_together(params):
    def step(params, moments, batch):
        new, loss = sgd(params, batch)
        return new, jax.tree.map(lambda m, p: m + p, moments, new), loss

    def make(key, scale):
        return make_params(key), jax.tree.map(lambda p: jnp.zeros_like(p) * scale, make_params(key))

    parallel = autoplan.parallelize(step, layout="fsdp")
    parallel.plan(*jax.eval_shape(lambda: make(jax.random.key(0), 1)), make_batch())
    ours, moments = parallel.init(make, jax.random.key(0), 1)
    assert ours["w1"].sharding == moments["w1"].sharding
    assert_same(ours, params)


def test_a_train_state_is_born_with_a_new_optimizer():
    def make(key):
        return train_state.TrainState.create(apply_fn=loss_fn, params=make_params(key), tx=optax.adamw(1e-3))

    @autoplan.parallelize(layout="fsdp")
    def step(state, batch):
        loss, grads = jax.value_and_grad(state.apply_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    plan = step.plan(jax.eval_shape(make, jax.random.key(0)), make_batch())
    state = step.init(make, jax.random.key(0))
    state, _ = step(state, make_batch())
    assert int(state.step) == 1 and step.plan(state, make_batch()) == plan
    with count_compiles("step") as compiles:
        state, _ = step(state, make_batch())
    assert not compiles


def test_a_birth_that_fits_no_argument_is_refused():
    step = autoplan.parallelize(sgd)
    step.plan(jax.eval_shape(make_params, jax.random.key(0)), make_batch())
    with pytest.raises(StateError, match=r"params\['w2'\] is missing"):
        step.init(lambda key: {"w1": make_params(key)["w1"]}, jax.random.key(0))
    with pytest.raises(StateError, match=r"params\['w1'\] is bfloat16\[16, 64\]"):
        step.init(
            lambda key: jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_params(key)), jax.random.key(0)
        )


# NNX


WIDTH = 64


def make_inputs():
    return np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.tied = self.first
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.frozen = nnx.Variable(jnp.ones(WIDTH))

    def __call__(self, x):
        return self.tied(self.drop(self.norm(nnx.relu(self.first(x))))) * self.frozen[...]


def make_objects(rngs=None):
    model = Net(rngs or nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def numbers(*objects):
    def raw(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [np.asarray(raw(leaf)) for leaf in jax.tree.leaves([nnx.state(one) for one in objects])]


@pytest.mark.parametrize("donate", [(), ("model", "optimizer")])
def test_nnx_objects_change_in_place(donate):
    step, plain = autoplan.parallelize(nnx_step, donate_argnames=donate, layout="fsdp"), nnx.jit(nnx_step)
    ours, theirs = make_objects(), make_objects()
    x = make_inputs()
    for i in range(3):
        with count_compiles("nnx_step") as compiles:
            loss = step(*ours, x)
        assert len(compiles) == (i == 0)
        np.testing.assert_allclose(loss, plain(*theirs, x), rtol=1e-4)
    assert_same(numbers(*ours), numbers(*theirs))
    before = jax.tree.leaves(nnx.state(ours[0], nnx.Param))
    step(*ours, x)
    assert all(leaf.is_deleted() == bool(donate) for leaf in before)
    assert ours[0].tied is ours[0].first and len(ours[0].frozen[...].sharding.device_set) == len(
        jax.devices()
    )


def test_nnx_objects_in_containers_and_results():
    def step(objects, x):
        loss = nnx_step(*objects["all"], x)
        return loss, objects["all"][0], nnx.Param(jnp.ones(3) * loss)

    ours, theirs = make_objects(), make_objects()
    x = make_inputs()
    step = autoplan.parallelize(step, layout="data")
    for _ in range(2):
        loss, model, made = step({"all": ours}, x)
        plain_loss = nnx.jit(nnx_step)(*theirs, x)
    assert model is ours[0] and isinstance(made, nnx.Param)
    np.testing.assert_allclose([loss, made[...][0]], [plain_loss, plain_loss], rtol=1e-4)
    assert_same(numbers(*ours), numbers(*theirs))


def test_an_optimizer_that_holds_its_model():
    def step(optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(optimizer.model)
        optimizer.update(grads)
        return loss

    pairs = [nnx.ModelAndOptimizer(model, optax.adam(1e-2)) for model in (Net(nnx.Rngs(0)), Net(nnx.Rngs(0)))]
    x = make_inputs()
    parallel = autoplan.parallelize(step, layout="fsdp")
    for _ in range(2):
        np.testing.assert_allclose(parallel(pairs[0], x), nnx.jit(step)(pairs[1], x), rtol=1e-4)
    assert_same(numbers(pairs[0]), numbers(pairs[1]))


def test_nnx_in_functional_style():
    def step(graph, state, x):
        model = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        state = nnx.state(model)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        return nnx.merge_state(state, params), loss

    x = make_inputs()
    found = []
    for jit in (functools.partial(autoplan.parallelize, layout="data"), nnx.jit):
        graph, state = nnx.split(Net(nnx.Rngs(0)))
        step_now = jit(step)
        for _ in range(2):
            state, loss = step_now(graph, state, x)
        found.append([loss, *numbers(nnx.merge(graph, state))])
    assert_same(*found)


def test_nnx_objects_are_born_split():
    step = autoplan.parallelize(nnx_step, layout="fsdp")
    step.plan(*nnx.eval_shape(make_objects), make_inputs())
    model, optimizer = step.init(make_objects)
    assert model.tied is model.first
    kernel = model.first.kernel[...]
    assert {shard.data.size for shard in kernel.addressable_shards} == {kernel.size // len(jax.devices())}
    theirs = make_objects()
    assert_same(numbers(model, optimizer), numbers(*theirs))
    x = make_inputs()
    np.testing.assert_allclose(step(model, optimizer, x), nnx.jit(nnx_step)(*theirs, x), rtol=1e-4)


def test_nnx_objects_are_born_from_rngs_and_called_by_name():
    step = autoplan.parallelize(nnx_step, layout="data")
    step.plan(*nnx.eval_shape(make_objects), make_inputs())
    model, optimizer = step.init(make_objects, nnx.Rngs(0))
    theirs = make_objects(nnx.Rngs(0))
    for _ in range(2):
        loss = step(x=make_inputs(), optimizer=optimizer, model=model)
        np.testing.assert_allclose(loss, nnx.jit(nnx_step)(*theirs, make_inputs()), rtol=1e-4)


# Manners


def test_flax_is_not_imported():
    program = "import sys, autoplan; print([m for m in sys.modules if m.split('.')[0] in ('flax', 'optax')])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_there():
    assert all(hasattr(autoplan, name) for name in autoplan.__all__)
    assert autoplan.__version__
