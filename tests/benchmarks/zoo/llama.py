"""Decoder-only transformer like Llama in plain JAX: grouped-query attention, rotary positions, SwiGLU; weights
and moments in float32, products in bfloat16, gradients clipped by their global norm.
"""

from __future__ import annotations

from dataclasses import dataclass
import functools

import jax
import jax.numpy as jnp
import optax

from .base import Program, dense, next_token_loss, state_maker, token_batch, train_step


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    length: int
    batch: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SIZES = {"large": Size(4, 2048, 16, 8, 5632, 32000, 2048, 16), "small": Size(2, 256, 8, 4, 704, 2048, 64, 16)}


def program(name: str, size: str) -> Program:
    config = SIZES[size]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))
    return Program(
        name,
        train_step(functools.partial(_loss, config), optimizer),
        state_maker(functools.partial(_init, config), optimizer),
        token_batch(config.batch, config.length, config.vocab),
    )


def _init(size: Size, key: jax.Array) -> dict:
    embed, head, layers = jax.random.split(key, 3)
    return {
        "embed": 0.02 * jax.random.normal(embed, (size.vocab, size.width)),
        "layers": [_init_layer(size, k) for k in jax.random.split(layers, size.layers)],
        "norm": jnp.ones(size.width),
        "head": dense(head, size.width, size.vocab),
    }


def _init_layer(size: Size, key: jax.Array) -> dict:
    kv_width = size.kv_heads * size.head_width
    shapes = {
        "q": (size.width, size.width),
        "k": (size.width, kv_width),
        "v": (size.width, kv_width),
        "out": (size.width, size.width),
        "gate": (size.width, size.hidden),
        "up": (size.width, size.hidden),
        "down": (size.hidden, size.width),
    }
    keys = jax.random.split(key, len(shapes))
    weights = {name: dense(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return weights | {"norm1": jnp.ones(size.width), "norm2": jnp.ones(size.width)}


def _loss(size: Size, params: dict, tokens: jax.Array) -> jax.Array:
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = x + _attention(size, layer, _rms_norm(x, layer["norm1"]))
        y = _rms_norm(x, layer["norm2"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    return next_token_loss(_rms_norm(x, params["norm"]) @ params["head"], tokens)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale


def _attention(size: Size, layer: dict, x: jax.Array) -> jax.Array:
    """Causal attention on x [batch, length, width]; a key-value head serves heads / kv_heads query heads."""
    batch, length, width = x.shape
    q = (x @ layer["q"]).reshape(batch, length, size.heads, size.head_width)
    k = (x @ layer["k"]).reshape(batch, length, size.kv_heads, size.head_width)
    v = (x @ layer["v"]).reshape(batch, length, size.kv_heads, size.head_width)
    q, k = _rotate(q), _rotate(k)
    q = q.reshape(batch, length, size.kv_heads, size.heads // size.kv_heads, size.head_width)
    scores = jnp.einsum("bqhge,bkhe->bhgqk", q, k).astype(jnp.float32) * size.head_width**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhgqk,bkhe->bqhge", jax.nn.softmax(scores).astype(x.dtype), v)
    return mixed.reshape(batch, length, width) @ layer["out"]


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions on x [batch, length, heads, head width]."""
    length, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(length)[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
