"""Transformer in plain JAX whose every other feed-forward network is a mixture of experts, top-2, dispatched
and combined by einsums as in GShard (arXiv:2006.16668); float32.
"""

from __future__ import annotations

from dataclasses import dataclass
import functools

import jax
import jax.numpy as jnp
import optax

from .base import Program, dense, layer_norm, next_token_loss, state_maker, token_batch, train_step
from .gpt import attention, feed_forward, init_attention, init_feed_forward


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    experts: int
    vocab: int
    length: int
    batch: int

    @property
    def capacity(self) -> int:
        """Tokens of one example that an expert takes: 1.25 times its share of two per token."""
        return int(1.25 * 2 * self.length / self.experts)


SIZES = {"large": Size(4, 1024, 16, 16, 32768, 512, 64), "small": Size(2, 128, 8, 8, 2048, 64, 16)}


def program(name: str, size: str) -> Program:
    config = SIZES[size]
    optimizer = optax.adamw(3e-4)
    return Program(
        name,
        train_step(functools.partial(_loss, config), optimizer),
        state_maker(functools.partial(_init, config), optimizer),
        token_batch(config.batch, config.length, config.vocab),
    )


def _init(size: Size, key: jax.Array) -> dict:
    embed, head, layers = jax.random.split(key, 3)
    keys = jax.random.split(layers, size.layers)
    return {
        "embed": 0.02 * jax.random.normal(embed, (size.vocab, size.width)),
        "position": jnp.zeros((size.length, size.width)),
        "layers": [
            init_attention(size.width, k) | (_init_experts if i % 2 else _init_dense)(size, k)
            for i, k in enumerate(keys)
        ],
        "norm": {"scale": jnp.ones(size.width), "bias": jnp.zeros(size.width)},
        "head": dense(head, size.width, size.vocab),
    }


def _init_dense(size: Size, key: jax.Array) -> dict:
    return init_feed_forward(size.width, jax.random.fold_in(key, 1))


def _init_experts(size: Size, key: jax.Array) -> dict:
    gate, up, down = jax.random.split(jax.random.fold_in(key, 1), 3)
    return {
        "norm2": {"scale": jnp.ones(size.width), "bias": jnp.zeros(size.width)},
        "gate": dense(gate, size.width, size.experts),
        "experts_up": dense(up, size.experts, size.width, 4 * size.width),
        "experts_down": dense(down, size.experts, 4 * size.width, size.width),
    }


def _loss(size: Size, params: dict, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens] + params["position"]
    balance = 0.0
    for layer in params["layers"]:
        x = attention(layer, x, size.heads)
        if "gate" in layer:
            y, loss = _experts(layer, layer_norm(x, **layer["norm2"]), size.capacity)
            x, balance = x + y, balance + loss
        else:
            x = feed_forward(layer, x)
    logits = layer_norm(x, **params["norm"]) @ params["head"]
    return next_token_loss(logits, tokens) + 0.01 * balance


def _experts(layer: dict, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The mixture on x [batch, length, width], and its balance loss."""
    combine, balance = _route(jax.nn.softmax(x @ layer["gate"]), capacity)
    inputs = jnp.einsum("btec,btd->ebcd", (combine > 0).astype(x.dtype), x)
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", inputs, layer["experts_up"]))
    outputs = jnp.einsum("ebcf,efd->ebcd", hidden, layer["experts_down"])
    return jnp.einsum("btec,ebcd->btd", combine, outputs), balance


def _route(probabilities: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Weights that combine the two best experts of each token, [batch, length, experts, capacity], and the
    balance loss.

    A token that finds its expert full (`capacity` tokens of the same example came first) is dropped by it.
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
    balance = experts * (first.mean((0, 1)) * probabilities.mean((0, 1))).sum()
    return combine, balance
