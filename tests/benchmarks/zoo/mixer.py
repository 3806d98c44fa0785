"""MLP-mixer (arXiv:2105.01601) in plain JAX, float32: products over patches and over channels in turn."""

from __future__ import annotations

from dataclasses import dataclass
import functools

import jax
import jax.numpy as jnp
import optax

from .base import Program, cross_entropy, dense, image_batch, layer_norm, state_maker, train_step

CLASSES = 1024


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    pixels: int
    patch: int
    batch: int

    @property
    def patches(self) -> int:
        return (self.pixels // self.patch) ** 2


SIZES = {"large": Size(4, 2048, 256, 16, 128), "small": Size(2, 128, 32, 4, 16)}


def program(name: str, size: str) -> Program:
    config = SIZES[size]
    optimizer = optax.adamw(1e-3)
    return Program(
        name,
        train_step(functools.partial(_loss, config), optimizer),
        state_maker(functools.partial(_init, config), optimizer),
        image_batch(config.batch, config.pixels, CLASSES),
    )


def _init(size: Size, key: jax.Array) -> dict:
    patch, head, layers = jax.random.split(key, 3)
    return {
        "patch": dense(patch, 3 * size.patch**2, size.width),
        "layers": [_init_layer(size, k) for k in jax.random.split(layers, size.layers)],
        "norm": _init_norm(size.width),
        "head": dense(head, size.width, CLASSES),
    }


def _init_norm(width: int) -> dict:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _init_layer(size: Size, key: jax.Array) -> dict:
    tokens, channels = jax.random.split(key)
    return {
        "norm1": _init_norm(size.width),
        "tokens": _init_mlp(size.patches, size.width // 2, tokens),
        "norm2": _init_norm(size.width),
        "channels": _init_mlp(size.width, 4 * size.width, channels),
    }


def _init_mlp(width: int, hidden: int, key: jax.Array) -> dict:
    up, down = jax.random.split(key)
    return {
        "up": dense(up, width, hidden),
        "up_bias": jnp.zeros(hidden),
        "down": dense(down, hidden, width),
        "down_bias": jnp.zeros(width),
    }


def _loss(size: Size, params: dict, batch: dict[str, jax.Array]) -> jax.Array:
    side, patch = size.pixels // size.patch, size.patch
    x = batch["image"].reshape(-1, side, patch, side, patch, 3)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, size.patches, 3 * patch**2) @ params["patch"]
    for layer in params["layers"]:
        y = layer_norm(x, **layer["norm1"]).swapaxes(1, 2)
        x = x + _mlp(layer["tokens"], y).swapaxes(1, 2)
        x = x + _mlp(layer["channels"], layer_norm(x, **layer["norm2"]))
    return cross_entropy(layer_norm(x, **params["norm"]).mean(1) @ params["head"], batch["label"])


def _mlp(weights: dict, x: jax.Array) -> jax.Array:
    x = jax.nn.gelu(x @ weights["up"] + weights["up_bias"])
    return x @ weights["down"] + weights["down_bias"]
