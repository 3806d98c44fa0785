"""Decoder-only transformer, plain JAX: unrolled layers, dropout with a key carried in the state, AdamW from
optax.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .base import Program, adamw, cross_entropy, layer_norm, normal, tokens

VOCAB, LENGTH, WIDTH, HEADS, HIDDEN, LAYERS = 96, 12, 48, 24, 96, 2


class State(NamedTuple):
    """What training carries from step to step; `key` is a typed random key."""

    params: dict
    moments: optax.OptState
    key: jax.Array
    count: jax.Array


def init_layer(key: jax.Array) -> dict[str, jax.Array]:
    """Weights of one layer; `qkv` is [width, 3, heads, head width]."""
    keys = jax.random.split(key, 4)
    return {
        "norm1": jnp.ones(WIDTH),
        "qkv": normal(keys[0], WIDTH, 3 * WIDTH).reshape(WIDTH, 3, HEADS, WIDTH // HEADS),
        "out": normal(keys[1], HEADS, WIDTH // HEADS, WIDTH),
        "norm2": jnp.ones(WIDTH),
        "up": normal(keys[2], WIDTH, HIDDEN),
        "down": normal(keys[3], HIDDEN, WIDTH),
    }


def apply_layer(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """One pre-norm layer on x [batch, length, width]."""
    q, k, v = jnp.einsum("btd,dshe->sbthe", layer_norm(x, layer["norm1"]), layer["qkv"])
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    mixed = jnp.einsum("bhqk,bkhe->bqhe", weights, v)
    x = x + jnp.einsum("bqhe,hed->bqd", mixed, layer["out"])
    return x + jax.nn.gelu(layer_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]


def init_params(key: jax.Array) -> dict:
    """Weights of the whole model; the embedding is also the output layer."""
    keys = jax.random.split(key, LAYERS + 2)
    return {
        "embed": 0.1 * jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "position": 0.1 * jax.random.normal(keys[1], (LENGTH, WIDTH)),
        "layers": [init_layer(k) for k in keys[2:]],
        "norm": jnp.ones(WIDTH),
    }


def _dropout(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)


def _loss(params: dict, batch: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = params["embed"][batch] + params["position"]
    for i, layer in enumerate(params["layers"]):
        x = _dropout(jax.random.fold_in(key, i), apply_layer(layer, x))
    logits = layer_norm(x, params["norm"]) @ params["embed"].T
    correct = (logits[:, :-1].argmax(-1) == batch[:, 1:]).sum()
    return cross_entropy(logits[:, :-1], batch[:, 1:]), correct


def _step(state: State, batch: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    key, draw = jax.random.split(state.key)
    (loss, correct), grads = jax.value_and_grad(_loss, has_aux=True)(state.params, batch, draw)
    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)
    updates, moments = adamw().update(grads, state.moments, state.params)
    params = optax.apply_updates(state.params, updates)
    noise = jax.random.uniform(draw, (8,))
    return State(params, moments, key, state.count + 1), {
        "loss": loss,
        "correct": correct,
        "norm": norm,
        "noise": noise,
    }


def _make_state(key: jax.Array) -> tuple[State]:
    params = init_params(key)
    return (State(params, adamw().init(params), jax.random.fold_in(key, 1), jnp.zeros((), jnp.int32)),)


PROGRAMS = {"transformer": lambda: Program("transformer", _step, _make_state, tokens(VOCAB, LENGTH))}
