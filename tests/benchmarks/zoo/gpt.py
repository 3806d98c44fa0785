"""Decoder-only transformer like GPT-2 in plain JAX, float32: layers unrolled, or scanned and rematerialised."""

from __future__ import annotations

from dataclasses import dataclass
import functools

import jax
import jax.numpy as jnp
import optax

from .base import Program, dense, layer_norm, next_token_loss, state_maker, token_batch, train_step


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    vocab: int
    length: int
    batch: int
    scan: bool


SIZES = {
    ("gpt", "large"): Size(4, 2048, 16, 32768, 1024, 32, scan=False),
    ("gpt", "small"): Size(2, 256, 8, 2048, 64, 16, scan=False),
    ("gpt_scan", "large"): Size(24, 1024, 16, 32768, 1024, 32, scan=True),
    ("gpt_scan", "small"): Size(4, 256, 8, 2048, 64, 8, scan=True),
}


def program(name: str, size: str) -> Program:
    config = SIZES[name, size]
    optimizer = optax.adamw(3e-4)
    return Program(
        name,
        train_step(functools.partial(_loss, config), optimizer),
        state_maker(functools.partial(_init, config), optimizer),
        token_batch(config.batch, config.length, config.vocab),
    )


def _init(size: Size, key: jax.Array) -> dict:
    embed, position, layers = jax.random.split(key, 3)
    keys = jax.random.split(layers, size.layers)
    init = functools.partial(init_layer, size.width)
    return {
        "embed": 0.02 * jax.random.normal(embed, (size.vocab, size.width)),
        "position": 0.02 * jax.random.normal(position, (size.length, size.width)),
        "layers": jax.vmap(init)(keys) if size.scan else [init(k) for k in keys],
        "norm": {"scale": jnp.ones(size.width), "bias": jnp.zeros(size.width)},
    }


def init_layer(width: int, key: jax.Array) -> dict:
    """Weights of attention and of the feed-forward network."""
    return init_attention(width, key) | init_feed_forward(width, jax.random.fold_in(key, 1))


def init_attention(width: int, key: jax.Array) -> dict:
    """`qkv` [width, 3 width] and `out` [width, width], with biases, and the norm before them."""
    qkv, out = jax.random.split(key)
    return {
        "norm1": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        "qkv": {"w": dense(qkv, width, 3 * width), "b": jnp.zeros(3 * width)},
        "out": {"w": dense(out, width, width), "b": jnp.zeros(width)},
    }


def init_feed_forward(width: int, key: jax.Array) -> dict:
    """`up` [width, 4 width] and `down` [4 width, width], with biases, and the norm before them."""
    up, down = jax.random.split(key)
    return {
        "norm2": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        "up": {"w": dense(up, width, 4 * width), "b": jnp.zeros(4 * width)},
        "down": {"w": dense(down, 4 * width, width), "b": jnp.zeros(width)},
    }


def _loss(size: Size, params: dict, tokens: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: dict) -> tuple[jax.Array, None]:
        x = attention(weights, x, size.heads)
        return feed_forward(weights, x), None

    x = params["embed"][tokens] + params["position"]
    if size.scan:
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    else:
        for weights in params["layers"]:
            x, _ = layer(x, weights)
    return next_token_loss(layer_norm(x, **params["norm"]) @ params["embed"].T, tokens)


def attention(weights: dict, x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention on x [batch, length, width], with its norm and residual."""
    batch, length, width = x.shape
    y = layer_norm(x, **weights["norm1"])
    q, k, v = jnp.split(y @ weights["qkv"]["w"] + weights["qkv"]["b"], 3, axis=-1)
    q, k, v = (z.reshape(batch, length, heads, width // heads) for z in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(batch, length, width)
    return x + mixed @ weights["out"]["w"] + weights["out"]["b"]


def feed_forward(weights: dict, x: jax.Array) -> jax.Array:
    """The feed-forward network on x [batch, length, width], with its norm and residual."""
    y = layer_norm(x, **weights["norm2"])
    y = jax.nn.gelu(y @ weights["up"]["w"] + weights["up"]["b"])
    return x + y @ weights["down"]["w"] + weights["down"]["b"]
