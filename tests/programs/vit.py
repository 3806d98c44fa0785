"""Vision transformer, plain JAX: patches by reshape, a class token (so the token count is odd), learned
positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from .base import Program, adamw, cross_entropy, images, layer_norm, normal

CLASSES, SIZE, PATCH, WIDTH, HEADS, HIDDEN, LAYERS = 24, 8, 2, 48, 24, 96, 2


def patches(x: jax.Array, patch: int) -> jax.Array:
    """[batch, size, size, channels] to [batch, (size/patch)^2, patch^2 * channels]."""
    batch, size, _, channels = x.shape
    x = x.reshape(batch, size // patch, patch, size // patch, patch, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, (size // patch) ** 2, patch * patch * channels)


def _layer(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    batch, length, _ = x.shape
    y = layer_norm(x, layer["norm1"])
    q, k, v = (jnp.reshape(y @ layer[name], (batch, length, HEADS, -1)) for name in ("q", "k", "v"))
    mixed = jax.nn.dot_product_attention(q, k, v).reshape(batch, length, WIDTH)
    x = x + mixed @ layer["out"]
    return x + jax.nn.gelu(layer_norm(x, layer["norm2"]) @ layer["up"] + layer["bias"]) @ layer["down"]


def _forward(params: dict, x: jax.Array) -> jax.Array:
    x = patches(x, PATCH) @ params["patch"]
    token = jnp.broadcast_to(params["token"], (x.shape[0], 1, WIDTH))
    x = jnp.concatenate([token, x], axis=1) + params["position"]
    for layer in params["layers"]:
        x = _layer(layer, x)
    return layer_norm(x[:, 0], params["norm"]) @ params["head"]


def _step(state: dict, batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        return cross_entropy(_forward(params, batch["image"]), batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, moments = adamw().update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def _init_layer(key: jax.Array) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 6)
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {name: normal(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return weights | {"norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH), "bias": jnp.zeros(HIDDEN)}


def _make_state(key: jax.Array) -> tuple[dict]:
    keys = jax.random.split(key, LAYERS + 3)
    params = {
        "patch": normal(keys[0], PATCH * PATCH * 3, WIDTH),
        "token": jnp.zeros(WIDTH),
        "position": 0.1 * jax.random.normal(keys[1], ((SIZE // PATCH) ** 2 + 1, WIDTH)),
        "layers": [_init_layer(k) for k in keys[3:]],
        "norm": jnp.ones(WIDTH),
        "head": normal(keys[2], WIDTH, CLASSES),
    }
    return ({"params": params, "moments": adamw().init(params)},)


PROGRAMS = {"vit": lambda: Program("vit", _step, _make_state, images(SIZE, CLASSES))}
