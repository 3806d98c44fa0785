"""Tracing: names of leaves, state pairs and what is refused, closed-over arrays, fingerprints."""

import os
import subprocess
import sys
from typing import NamedTuple

from flax import nnx
from flax.training import train_state
import jax
from jax.extend import core as jex_core
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from autoplan import PinError, StateError
from autoplan.trace import Trace, trace_step

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
B = jax.ShapeDtypeStruct((16,), jnp.float32)
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def paths(trace: Trace) -> list[str]:
    return [leaf.path for leaf in trace.inputs]


def pairs(trace: Trace) -> list[tuple[str, str]]:
    return [(trace.inputs[i].path, trace.outputs[j].path) for i, j in trace.state_pairs]


# Names


def test_leaves_are_named_by_parameters():
    def step(state, batch, *rest, scale, **more):
        return {"w": state["w"] * batch[0][0].sum() * scale * more["q"] + rest[0]}

    trace = trace_step(step, ({"w": W}, [(X,)], 1.0), {"scale": np.float32(2), "q": 3})
    assert paths(trace) == ["state['w']", "batch[0][0]", "rest[0]", "q", "scale"]
    assert [leaf.path for leaf in trace.outputs] == ["result['w']"]
    assert [str(leaf.dtype) for leaf in trace.inputs] == ["float32", "float32", "float32", "int32", "float32"]
    assert trace.name == "step" and trace.source.startswith(__file__) and trace.source.endswith("(step)")
    assert len(trace.jaxpr.in_avals) == 5


@pytest.mark.parametrize(
    "options", [{"static_argnums": 1}, {"static_argnames": "depth"}, {"static_argnums": -2}]
)
@pytest.mark.parametrize("by_name", [False, True])
def test_static_arguments_are_no_leaves(options, by_name):
    def step(w, depth, x):
        for _ in range(depth):
            x = x @ w
        return w, x

    args, kwargs = ((W,), {"depth": 3, "x": X}) if by_name else ((W, 3, X), {})
    trace = trace_step(step, args, kwargs, **options)
    assert paths(trace) == ["w", "x"]
    assert sum(eqn.primitive.name == "dot_general" for eqn in trace.jaxpr.eqns) == 3


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"donate_argnames": ("w",)}])
def test_donation_is_noted(options):
    trace = trace_step(lambda w, x: (w + x.sum(), x), (W, X), **options)
    assert [leaf.donated for leaf in trace.inputs] == [True, False]


def test_keys_scalars_and_none():
    trace = trace_step(
        lambda key, x, nothing: (jax.random.normal(key, (2,)), x + 1), (jax.random.key(0), 1, None)
    )
    assert paths(trace) == ["key", "x"] and str(trace.inputs[0].dtype) == "key<fry>"


def test_the_users_error_names_the_argument():
    def step(state, batch):
        return state if batch["x"].sum() > 0 else None

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"batch\['x'\]"):
        trace_step(step, ({"w": W}, {"x": X}))


# State pairs


def adam_step(params, opt_state, x):
    grads = jax.grad(lambda p: jnp.sum((x @ p["w"] + p["b"]) ** 2))(params)
    updates, opt_state = optax.adamw(1e-3).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, grads


def test_params_and_optimizer_are_told_apart():
    params = {"w": W, "b": B}
    trace = trace_step(adam_step, (params, jax.eval_shape(optax.adamw(1e-3).init, params), X))
    found = dict(pairs(trace))
    assert found["params['w']"] == "result[0]['w']"
    assert found["opt_state[0].mu['w']"] == "result[1][0].mu['w']"
    assert found["opt_state[0].nu['b']"] == "result[1][0].nu['b']"
    assert found["opt_state[0].count"] == "result[1][0].count"
    assert len(found) == 7 and "x" not in found


def test_names_decide_among_equals():
    trace = trace_step(
        lambda gen, disc, x: {"disc": jax.tree.map(jnp.sin, disc), "gen": gen, "loss": x.sum()},
        ({"w": W, "b": B}, {"w": W, "b": B}, X),
    )
    assert ("disc['w']", "result['disc']['w']") in pairs(trace)
    assert ("gen['w']", "result['gen']['w']") in pairs(trace)


def test_positions_decide_without_names():
    trace = trace_step(lambda a, b, x: (a + x.sum(), b * 2, x.sum()), ({"w": W, "b": B}["w"], W, X))
    assert pairs(trace) == [("a", "result[0]"), ("b", "result[1]")]


def test_a_single_state():
    assert pairs(trace_step(lambda centroids, points: centroids + points.sum(), (W, X))) == [
        ("centroids", "result")
    ]


def test_a_position_needs_an_update():
    def step(params, momentum, x):
        grads = jax.grad(lambda w: ((x @ w) ** 2).mean())(params["w"])
        momentum = jnp.where(jnp.isfinite(grads), 0.9 * momentum + grads, momentum)
        return {"w": params["w"] - momentum, "b": params["b"]}, momentum, x @ params["w"]

    found = dict(pairs(trace_step(step, ({"w": W, "b": B}, W, X))))
    assert found["momentum"] == "result[1]"
    assert "x" not in found  # the prediction has its shape and position, but is no new x


def test_a_layer_is_no_state():
    assert trace_step(lambda x, p: x @ p["w"] + p["b"], (X, {"w": W, "b": B})).state_pairs == ()


def test_a_key_and_a_counter_by_position():
    def step(params, key, count, x):
        key, draw = jax.random.split(key)
        return jax.tree.map(lambda p: p + jax.random.normal(draw, p.shape), params), key, count + 1, x.mean()

    trace = trace_step(step, ({"w": W, "b": B}, jax.random.key(0), 0, X))
    assert [pair[0] for pair in pairs(trace)] == ["params['b']", "params['w']", "key", "count"]


def test_inference_has_no_state():
    trace = trace_step(lambda params, x: jax.nn.softmax(x @ params["w"] + params["b"]), ({"w": W, "b": B}, X))
    assert trace.state_pairs == ()


def test_metrics_and_batches_are_no_state():
    def step(params, batch):
        return params, {"loss": batch["x"].sum(), "x": batch["x"] * 2}

    trace = trace_step(step, ({"w": W}, {"x": X, "y": X}))
    assert ("batch['y']") not in dict(pairs(trace))


def test_a_gradient_tree_of_norms_is_no_broken_state():
    def norms(params, x):
        return jax.tree.map(lambda p: jnp.linalg.norm(p) * x.sum(), params)

    assert trace_step(norms, ({"w": W, "b": B}, X)).state_pairs == ()


class State(NamedTuple):
    step: jax.Array
    params: dict


def state_of(dtype=jnp.float32) -> State:
    return State(jax.ShapeDtypeStruct((), jnp.int32), {"w": jax.ShapeDtypeStruct((16, 16), dtype), "b": B})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: s._replace(params={**s.params, "w": s.params["w"].astype(jnp.float16)}),
            ("state.params['w']", "float32[16, 16]", "float16[16, 16]", "astype"),
        ),
        (lambda s: s._replace(params={"w": s.params["w"]}), ("state.params['b'] is not in result[0]",)),
        (lambda s: s._replace(params={**s.params, "c": jnp.ones(3)}), ("result[0].params['c'] was not",)),
        (
            lambda s: s._replace(params={**s.params, "b": s.params["b"][:8]}),
            ("state.params['b']", "float32[8]"),
        ),
    ],
)
def test_a_state_in_another_form_is_refused(change, words):
    with pytest.raises(StateError) as caught:
        trace_step(lambda state, x: (change(state), x.sum()), (state_of(), X), donate_argnums=0)
    for word in words:
        assert word in str(caught.value)
    (note,) = trace_step(lambda state, x: (change(state), x.sum()), (state_of(), X)).notes
    assert words[0] in note and words[-1] in f"{note} astype"


def test_a_dict_state_that_changes_dtype_is_refused_if_it_is_donated_and_noted_if_not():
    def halve(params, x):
        return {"w": params["w"].astype(jnp.bfloat16), "b": params["b"] + x.sum()}

    with pytest.raises(StateError, match=r"params\['w'\].*bfloat16"):
        trace_step(halve, ({"w": W, "b": B}, X), donate_argnums=0)
    trace = trace_step(halve, ({"w": W, "b": B}, X))
    assert len(trace.state_pairs) == 1 and "params['w'] went in as float32[16, 16]" in trace.notes[0]


@pytest.mark.parametrize(
    "step",
    [
        lambda b: {"x": b["x"] * 2},
        lambda b: {"x": b["x"].astype(jnp.bfloat16), "y": b["y"]},
        lambda b: {k: v.reshape(-1) for k, v in b.items()},
        lambda b: [b["x"]],
    ],
)
def test_results_may_resemble_a_batch(step):
    assert trace_step(step, ({"x": X, "y": X},)).outputs


def test_a_donated_array_that_changes_dtype_is_refused():
    with pytest.raises(StateError, match="w went in as float32"):
        trace_step(lambda w, x: (w.astype(jnp.bfloat16), x.sum()), (W, X), donate_argnums=0)


def test_a_weak_counter_becomes_strong_as_on_the_second_call():
    def step(state, x):
        return {"n": jnp.int32(state["n"] + 1), "w": state["w"]}, x.sum()

    trace = trace_step(step, ({"n": 0, "w": W}, X))
    assert not trace.jaxpr.in_avals[0].weak_type and len(trace.state_pairs) == 2


def test_linen_train_state():
    state = jax.eval_shape(
        lambda: train_state.TrainState.create(
            apply_fn=lambda p, x: x @ p["w"],
            params={"w": jnp.ones((16, 16))},
            tx=optax.sgd(0.1, momentum=0.9),
        )
    )

    def step(state, x):
        grads = jax.grad(lambda p: state.apply_fn(p, x).sum())(state.params)
        return state.apply_gradients(grads=grads), x.sum()

    assert [pair[0] for pair in pairs(trace_step(step, (state, X)))] == [
        "state.step",
        "state.params['w']",
        "state.opt_state[0].trace['w']",
    ]


# NNX


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.tied = self.first
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.frozen = nnx.Variable(jnp.ones(16))

    def __call__(self, x):
        return self.tied(self.drop(self.first(x))) * self.frozen[...]


def nnx_step(model, optimizer, x):
    grads = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)


def test_nnx_objects_keep_paths_aliases_and_untouched_arrays():
    def trace(**options):
        model = Net(nnx.Rngs(0))
        args = model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), X
        return trace_step(nnx_step, args, **options)

    plain = trace()
    names = {"model.first.kernel", "optimizer.opt_state[0].mu.first.kernel", "optimizer.step", "x"}
    assert names <= set(paths(plain)) and not any("tied" in path for path in paths(plain))
    assert all(before == after for before, after in pairs(plain))
    untouched = {plain.inputs[i].path for i in plain.kept if i is not None}
    assert {"model.frozen", "model.drop.rngs.key"} <= untouched  # nothing is copied
    assert not untouched & {leaf.path for leaf in plain.outputs}
    donated = trace(donate_argnums=(0, 1))
    assert set(donated.kept) == {None} and len(donated.state_pairs) == len(donated.inputs) - 1
    assert [leaf.path for leaf in donated.inputs if not leaf.donated] == ["x"]


def test_an_nnx_variable_that_changes_dtype_is_refused():
    def step(model, x):
        model.frozen[...] = model.frozen[...].astype(jnp.bfloat16) * x.sum().astype(jnp.bfloat16)
        model.frozen.set_value(model.frozen.get_value().astype(jnp.bfloat16))

    with pytest.raises(StateError, match=r"model\.frozen.*bfloat16"):
        trace_step(step, (Net(nnx.Rngs(0)), X))


def test_a_failed_trace_leaves_nnx_objects_alone():
    model = Net(nnx.Rngs(0))

    def step(model, x):
        model.frozen[...] = model.frozen[...] + x.sum()
        raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        trace_step(step, (model, X))
    np.testing.assert_array_equal(model.frozen[...], np.ones(16))


# Closed-over arrays


def test_large_closed_over_arrays_become_inputs():
    table, small = jnp.arange(64 * 1024.0).reshape(1024, 64), jnp.ones(64)
    inner = jax.jit(lambda x: x @ table.T + 1)

    def step(x):
        return inner(x) + (x @ table.T) * small.sum()

    trace = trace_step(step, (jax.ShapeDtypeStruct((8, 64), jnp.float32),))
    assert paths(trace) == ["x", "closure[0]"] and trace.consts[0] is table
    assert [const.shape for const in trace.jaxpr.consts if const.size > 1] == [(64,)]
    x = jnp.ones((8, 64))
    (got,) = jex_core.jaxpr_as_fun(trace.jaxpr)(x, table)
    np.testing.assert_allclose(got, step(x), rtol=1e-6)


# Pins


def test_pins_are_a_prefix(devices):
    mesh = jax.make_mesh((8,), ("d",), devices=devices[:8])
    args = ({"w": W, "b": B}, (X, X))
    trace = trace_step(
        lambda p, xs: (p, xs[0]), args, pins=({"w": P(None, "d"), "b": None}, NamedSharding(mesh, P("d")))
    )
    assert [leaf.spec for leaf in trace.inputs] == [None, P(None, "d"), P("d"), P("d")]
    trace = trace_step(lambda p, xs: (p, xs[0]), args, pins=P(P.UNCONSTRAINED))
    assert all(leaf.spec == P(P.UNCONSTRAINED) for leaf in trace.inputs)


@pytest.mark.parametrize("pins", [(P("d"),), (P("d"), None, None), ({"v": P("d")}, None)])
def test_pins_of_another_structure_are_refused(pins):
    with pytest.raises(PinError, match="in_shardings must be a pytree prefix"):
        trace_step(lambda p, x: (p, x), ({"w": W}, X), pins=pins)


def test_a_pin_that_is_no_layout_is_refused(devices):
    with pytest.raises(PinError, match=r"x: a layout is a PartitionSpec"):
        trace_step(lambda x: x, (X,), pins=jax.sharding.SingleDeviceSharding(devices[0]))


# Fingerprints

PROGRAM = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, functools
from autoplan.trace import trace_step

@jax.custom_vjp
def f(x):
    return jnp.sin(x)
f.defvjp(lambda x: (f(x), x), lambda x, g: (g * jnp.cos(x),))

def step(params, x):
    def body(carry, w):
        return jax.checkpoint(lambda c: f(c @ w), policy=jax.checkpoint_policies.dots_saveable)(carry), None
    return jax.grad(lambda p: jax.lax.scan(body, x, p)[0].sum())(params)

print(trace_step(step, (jnp.ones((3, 16, 16)), jnp.ones((8, 16)))).fingerprint)
"""


def test_a_fingerprint_is_the_same_in_every_process():
    def run(seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
        ).stdout

    first = run("1")
    assert len(first.strip()) == 32 and first == run("2")


def test_a_fingerprint_tells_programs_apart():
    def step(scale):
        return lambda w, x: (w * scale, x)

    prints = {
        trace_step(step(2.0), (W, X)).fingerprint,
        trace_step(step(3.0), (W, X)).fingerprint,
        trace_step(step(2.0), (W, W)).fingerprint,
        trace_step(step(2.0), (W, X), donate_argnums=0).fingerprint,
        trace_step(step(2.0), (W, X), pins=P("x")).fingerprint,
        trace_step(lambda w, y: (w * 2.0, y), (W, X)).fingerprint,
    }
    assert len(prints) == 6
    assert trace_step(step(2.0), (W, X)).fingerprint in prints
