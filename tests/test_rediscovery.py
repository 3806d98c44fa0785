"""The planner finds, with nobody telling it, the layouts that theory asks for. Planning only: shapes, no
devices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

import autoplan
from autoplan.cost_models import Cluster, parse_cluster
from autoplan.plan import LeafLayout, Plan
from programs.base import cross_entropy, layer_norm
from programs.moe import expert_layer

N = 8


def cluster(links: float = 1.0) -> Cluster:
    """One host with 8 H100s, its links `links` times as fast."""
    host = parse_cluster(f"{N}xH100")
    levels = tuple(
        dataclasses.replace(
            level,
            bytes_per_s=level.bytes_per_s * links,
            small_group_rates=tuple((size, rate * links) for size, rate in level.small_group_rates),
        )
        for level in host.levels
    )
    return dataclasses.replace(host, levels=levels)


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def leaf(plan: Plan, path: str) -> LeafLayout:
    """The only argument leaf whose path ends so."""
    found = [leaf for leaf in plan.inputs if leaf.path.endswith(path)]
    assert len(found) == 1, (path, [leaf.path for leaf in plan.inputs])
    return found[0]


def split_dims(layout: LeafLayout) -> dict[int, tuple[str, ...]]:
    """The dims that are split, with their axes."""
    return {dim: axes for dim, axes in enumerate(layout.spec) if axes}


def sent(kind: str, payload_bytes: float) -> float:
    """Bytes that a device sends around the ring of all N."""
    return (2 if kind == "all-reduce" else 1) * (N - 1) / N * payload_bytes


def size(layout: LeafLayout) -> float:
    return math.prod(layout.shape) * jnp.dtype(layout.dtype).itemsize


# Data parallelism


def mlp(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights[:-1]:
        x = jax.nn.relu(x @ w)
    return x @ weights[-1]


def momentum_step(state: dict, batch: dict) -> tuple[dict, jax.Array]:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((mlp(w, batch["x"]) - batch["y"]) ** 2))(state["w"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {"w": jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], momentum), "m": momentum}, loss


def test_cheap_communication_and_a_large_batch_give_data_parallelism() -> None:
    weights = [shape(512, 512)] * 4
    state = {"w": weights, "m": weights}
    batch = {"x": shape(2**17, 512), "y": shape(2**17, 512)}
    step = autoplan.parallelize(momentum_step, cluster=cluster(links=10), mesh_shape=(N,), donate_argnums=0)
    plan = step.plan(state, batch)
    for layout in plan.inputs:
        assert split_dims(layout) == ({0: ("x",)} if layout.role == "batch" else {}), layout
    assert {c.kind for c in plan.collectives} == {"all-reduce"}
    # What data parallelism must send: every gradient once around the ring, twice (N-1)/N of its bytes. The
    # loss is small.
    total = sum(c.wire_bytes * c.count for c in plan.collectives)
    assert math.isclose(total, sent("all-reduce", 4 * 512 * 512 * 4), rel_tol=0.01), total


# Megatron's pairs


def pairs_forward(weights: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for pair in weights:
        x = jax.nn.gelu(x @ pair["up"]) @ pair["down"]
    return x


def pairs_step(weights: list[dict[str, jax.Array]], batch: dict) -> tuple[list, jax.Array]:
    def loss_fn(weights: list) -> jax.Array:
        x = batch["x"]
        for pair in weights:
            x = x + jax.nn.gelu(layer_norm(x, pair["norm"]) @ pair["up"]) @ pair["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def pairs(count: int, width: int) -> list[dict[str, jax.ShapeDtypeStruct]]:
    return [{"norm": shape(width), "up": shape(width, 4 * width), "down": shape(4 * width, width)}] * count


def assert_column_row(plan: Plan, count: int) -> None:
    for i in range(count):
        assert split_dims(leaf(plan, f"[{i}]['up']")) == {1: ("x",)}
        assert split_dims(leaf(plan, f"[{i}]['down']")) == {0: ("x",)}


def test_large_weights_and_a_small_batch_give_column_row_pairs_with_one_all_reduce_each() -> None:
    count, width, rows = 3, 8192, 16
    weights = [{name: w for name, w in pair.items() if name != "norm"} for pair in pairs(count, width)]
    step = autoplan.parallelize(pairs_forward, cluster=cluster(), mesh_shape=(N,))
    plan = step.plan(weights, shape(rows, width))
    assert_column_row(plan, count)
    # One all-reduce between two pairs; the last result may stay split, half an all-reduce.
    kinds = [c.kind for c in plan.collectives for _ in range(int(c.count))]
    assert kinds[:-1] == ["all-reduce"] * (count - 1) and kinds[-1] in ("all-reduce", "reduce-scatter")
    payload = rows * width * 4
    assert all(math.isclose(c.wire_bytes, sent(c.kind, payload), rel_tol=0.01) for c in plan.collectives)


def test_training_keeps_the_pairs_with_one_all_reduce_forward_and_one_backward() -> None:
    count, width, rows = 3, 8192, 16
    step = autoplan.parallelize(pairs_step, cluster=cluster(), mesh_shape=(N,), donate_argnums=0)
    plan = step.plan(pairs(count, width), {"x": shape(rows, width), "y": shape(rows, width)})
    assert_column_row(plan, count)
    # The first pair's input needs no gradient, but its norm's scale does.
    large = [c for c in plan.collectives if c.wire_bytes > width * 4]
    assert {c.kind for c in large} == {"all-reduce"}
    assert sum(c.count for c in large if c.op.endswith("-> add")) == count  # forward, into the residual
    assert sum(c.count for c in large) == 2 * count, plan.collectives
    assert all(math.isclose(c.wire_bytes, sent(c.kind, rows * width * 4), rel_tol=0.01) for c in large)


# ZeRO


def adam_step(state: dict, batch: dict) -> tuple[dict, jax.Array]:
    optimizer = optax.adamw(1e-3)
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((mlp(w, batch["x"]) - batch["y"]) ** 2))(
        state["params"]
    )
    updates, moments = optimizer.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def test_a_tight_memory_limit_shards_parameters_and_optimizer_by_all_devices() -> None:
    layers, width, rows = 8, 4096, 2**15
    params = [shape(width, width)] * layers
    state = {"params": params, "moments": jax.eval_shape(optax.adamw(1e-3).init, params)}
    batch = {"x": shape(rows, width), "y": shape(rows, width)}
    weight, activation = width * width * 4, rows * width * 4 // N
    # A device's share of weights and two moments and of the batch, the activations that the backward pass reads (before
    # and after each relu: XLA keeps both), and room for what is gathered and not yet scattered. One layer's whole state
    # more would not fit.
    limit = 3 * layers * weight // N + (2 * layers + 2) * activation + 2 * weight
    step = autoplan.parallelize(adam_step, cluster=cluster(), mesh_shape=(N,), memory=limit, donate_argnums=0)
    plan = step.plan(state, batch)
    assert plan.peak_memory_bytes <= limit
    state_leaves = [layout for layout in plan.inputs if layout.role == "state"]
    # The weight that is gathered at the peak may as well stay whole.
    at_peak = max((layout for layout in state_leaves if "params" in layout.path), key=lambda s: s.bytes_per_device)
    others = [layout for layout in state_leaves if layout is not at_peak]
    held, whole = (sum(f(layout) for layout in others) for f in (lambda s: s.bytes_per_device, size))
    assert math.isclose(held, whole / N, rel_tol=0.03), (held, whole / N)
    for layout in plan.inputs:
        if layout.role == "batch":
            assert split_dims(layout) == {0: ("x",)}, layout
    data = next(c for c in plan.candidates if c.name == "data")
    assert not data.fits


# Vocabulary


def language_step(params: dict, batch: jax.Array) -> tuple[dict, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        x = params["embed"][batch]
        x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
        return cross_entropy(x @ params["embed"].T, batch)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def test_a_large_vocabulary_gives_a_vocabulary_parallel_embedding() -> None:
    vocab, width = 2**18, 2048
    params = {"embed": shape(vocab, width), "up": shape(width, 4 * width), "down": shape(4 * width, width)}
    step = autoplan.parallelize(language_step, cluster=cluster(), mesh_shape=(N,), donate_argnums=0)
    plan = step.plan(params, shape(8, 128, dtype=jnp.int32))
    assert split_dims(leaf(plan, "['embed']")) == {0: ("x",)}
    # Neither the embedding nor the logits are ever moved: a device sends less than its own share of either.
    share = min(vocab * width, 8 * 128 * vocab) * 4 / N
    assert all(c.wire_bytes < share for c in plan.collectives)


# Experts


def experts_step(params: dict, batch: dict) -> tuple[dict, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        mixed, balance = expert_layer(params, batch["x"], capacity=16)
        return jnp.mean((mixed - batch["y"]) ** 2) + 0.01 * balance

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def test_experts_go_over_devices() -> None:
    experts, width, hidden, rows, length = 64, 1024, 4096, 64, 128
    params = {
        "gate": shape(width, experts),
        "up": shape(experts, width, hidden),
        "down": shape(experts, hidden, width),
    }
    step = autoplan.parallelize(experts_step, cluster=cluster(), mesh_shape=(N,), donate_argnums=0)
    plan = step.plan(params, {"x": shape(rows, length, width), "y": shape(rows, length, width)})
    assert split_dims(leaf(plan, "['up']")) == {0: ("x",)}
    assert split_dims(leaf(plan, "['down']")) == {0: ("x",)}
    # Tokens travel to the experts and back, in both passes; no expert's weights or gradients do.
    assert any(c.kind == "all-to-all" for c in plan.collectives)
    assert all(c.wire_bytes < experts * width * hidden * 4 / N for c in plan.collectives)
