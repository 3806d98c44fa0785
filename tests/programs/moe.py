"""Transformer layer with a top-2 mixture of experts, dispatched and combined by einsums as in GShard
(arXiv:2006.16668).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from .base import Program, adamw, cross_entropy, layer_norm, normal, tokens
from .transformer import apply_layer, init_layer

VOCAB, LENGTH, WIDTH, HIDDEN, EXPERTS, CAPACITY = 96, 12, 48, 48, 24, 2


def route(probabilities: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Weights to combine the two best experts of each token, [batch, length, experts, capacity], and the
    balance loss.

    A token that finds its expert full (`capacity` tokens of the same example came first) is dropped by that
    expert.
    """
    weights, chosen = jax.lax.top_k(probabilities, 2)
    weights = weights / weights.sum(-1, keepdims=True)
    experts = probabilities.shape[-1]
    first, second = (jax.nn.one_hot(chosen[..., i], experts) for i in range(2))
    place_first = jnp.cumsum(first, 1) * first - first
    place_second = (jnp.cumsum(second, 1) + first.sum(1, keepdims=True)) * second - second
    combine = 0.0
    for mask, place, weight in (
        (first, place_first, weights[..., 0]),
        (second, place_second, weights[..., 1]),
    ):
        mask = mask * (place < capacity)
        slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
        combine += jnp.einsum("bt,bte,btc->btec", weight, mask, slot)
    balance = experts * jnp.mean(first.mean(1) * probabilities.mean(1))
    return combine, balance


def expert_layer(params: dict, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The mixture on x [batch, length, width], and its balance loss."""
    combine, balance = route(jax.nn.softmax(x @ params["gate"]), capacity)
    inputs = jnp.einsum("btec,btd->ebcd", (combine > 0).astype(x.dtype), x)
    hidden = jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", inputs, params["up"]))
    outputs = jnp.einsum("ebcf,efd->ebcd", hidden, params["down"])
    return jnp.einsum("btec,ebcd->btd", combine, outputs), balance


def init_experts(key: jax.Array, width: int, hidden: int, experts: int) -> dict[str, jax.Array]:
    """Weights of the gate and of the experts."""
    keys = jax.random.split(key, 3)
    return {
        "gate": normal(keys[0], width, experts),
        "up": normal(keys[1], width, experts * hidden).reshape(width, experts, hidden).swapaxes(0, 1),
        "down": normal(keys[2], hidden, experts * width).reshape(hidden, experts, width).swapaxes(0, 1),
    }


def _step(state: dict, batch: jax.Array) -> tuple[dict, dict[str, jax.Array]]:
    def loss_fn(params: dict) -> tuple[jax.Array, jax.Array]:
        x = apply_layer(params["layer"], params["embed"][batch])
        mixed, balance = expert_layer(params["experts"], layer_norm(x, params["norm"]), CAPACITY)
        logits = (x + mixed) @ params["head"]
        return cross_entropy(logits[:, :-1], batch[:, 1:]) + 0.01 * balance, balance

    (loss, balance), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, moments = adamw().update(grads, state["moments"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "moments": moments}, {"loss": loss, "balance": balance}


def _make_state(key: jax.Array) -> tuple[dict]:
    keys = jax.random.split(key, 4)
    params = {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "layer": init_layer(keys[1]),
        "norm": jnp.ones(WIDTH),
        "experts": init_experts(keys[2], WIDTH, HIDDEN, EXPERTS),
        "head": normal(keys[3], WIDTH, VOCAB),
    }
    return ({"params": params, "moments": adamw().init(params)},)


PROGRAMS = {"moe": lambda: Program("moe", _step, _make_state, tokens(VOCAB, LENGTH))}
