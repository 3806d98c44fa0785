"""MLP-mixer, plain JAX: products over tokens and over channels in turn; the optimizer factors second moments
(Adafactor).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from .base import Program, cross_entropy, images, layer_norm, normal
from .vit import patches

CLASSES, SIZE, PATCH, TOKENS, WIDTH, HIDDEN, LAYERS = 24, 8, 2, 16, 48, 96, 2


def _optimizer() -> optax.GradientTransformation:
    return optax.adafactor(1e-3, min_dim_size_to_factor=32)


def _forward(params: dict, x: jax.Array) -> jax.Array:
    x = patches(x, PATCH) @ params["patch"]
    for layer in params["layers"]:
        y = jnp.swapaxes(layer_norm(x, layer["norm1"]), 1, 2)
        x = x + jnp.swapaxes(jax.nn.gelu(y @ layer["token_up"]) @ layer["token_down"], 1, 2)
        x = x + jax.nn.gelu(layer_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    return x.mean(1) @ params["head"]


def _step(state: dict, batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        return cross_entropy(_forward(params, batch["image"]), batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, moments = _optimizer().update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def _init_layer(key: jax.Array) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 4)
    return {
        "norm1": jnp.ones(WIDTH),
        "token_up": normal(keys[0], TOKENS, HIDDEN),
        "token_down": normal(keys[1], HIDDEN, TOKENS),
        "norm2": jnp.ones(WIDTH),
        "up": normal(keys[2], WIDTH, HIDDEN),
        "down": normal(keys[3], HIDDEN, WIDTH),
    }


def _make_state(key: jax.Array) -> tuple[dict]:
    keys = jax.random.split(key, LAYERS + 2)
    params = {
        "patch": normal(keys[0], PATCH * PATCH * 3, WIDTH),
        "layers": [_init_layer(k) for k in keys[2:]],
        "head": normal(keys[1], WIDTH, CLASSES),
    }
    return ({"params": params, "moments": _optimizer().init(params)},)


PROGRAMS = {"mixer": lambda: Program("mixer", _step, _make_state, images(SIZE, CLASSES))}
