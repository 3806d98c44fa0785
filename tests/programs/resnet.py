"""Wide-ResNet-like convolutional net, plain JAX: with group norm, or with batch norm whose statistics are
state.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .base import Program, cross_entropy, images, normal

CLASSES, SIZE, WIDTHS, GROUPS = 24, 8, (24, 48), 6


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _group_norm(x: jax.Array, scale: jax.Array, name: str, stats: dict) -> jax.Array:
    grouped = x.reshape(*x.shape[:-1], GROUPS, x.shape[-1] // GROUPS)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    variance = grouped.var((1, 2, 4), keepdims=True)
    return ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale


def _batch_norm(x: jax.Array, scale: jax.Array, name: str, stats: dict) -> jax.Array:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    old = stats[name]
    stats[name] = {"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * variance}
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale


def _forward(
    norm: Callable[..., jax.Array], params: dict, stats: dict, x: jax.Array
) -> tuple[jax.Array, dict]:
    stats = dict(stats)
    x = _conv(x, params["stem"])
    for i, block in enumerate(params["blocks"]):
        stride = 1 if i == 0 else 2
        y = jax.nn.relu(norm(x, block["norm1"], f"{i}.1", stats))
        shortcut = _conv(y, block["shortcut"], stride)
        y = jax.nn.relu(norm(_conv(y, block["conv1"], stride), block["norm2"], f"{i}.2", stats))
        x = shortcut + _conv(y, block["conv2"])
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return x.mean((1, 2)) @ params["head"] + params["bias"], jax.lax.stop_gradient(stats)


def _make_state(with_stats: bool, key: jax.Array) -> tuple[dict]:
    keys = iter(jax.random.split(key, 16))
    blocks, stats, width = [], {}, WIDTHS[0]
    params = {"stem": normal(next(keys), 3, 3, 3, width), "blocks": blocks}
    for i, out in enumerate(WIDTHS):
        blocks.append(
            {
                "norm1": jnp.ones(width),
                "shortcut": normal(next(keys), 1, 1, width, out),
                "conv1": normal(next(keys), 3, 3, width, out),
                "norm2": jnp.ones(out),
                "conv2": normal(next(keys), 3, 3, out, out),
            }
        )
        if with_stats:
            for j, size in ((1, width), (2, out)):
                stats[f"{i}.{j}"] = {"mean": jnp.zeros(size), "var": jnp.ones(size)}
        width = out
    params |= {"head": normal(next(keys), width, CLASSES), "bias": jnp.zeros(CLASSES)}
    return ({"params": params, "stats": stats, "momentum": jax.tree.map(jnp.zeros_like, params)},)


def _program(name: str, norm: Callable[..., jax.Array]) -> Program:
    def step(state: dict, batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
        def loss_fn(params: dict) -> tuple[jax.Array, dict]:
            logits, stats = _forward(norm, params, state["stats"], batch["image"])
            return cross_entropy(logits, batch["label"]), stats

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], momentum)
        return {"params": params, "stats": stats, "momentum": momentum}, loss

    with_stats = norm is _batch_norm
    return Program(name, step, lambda key: _make_state(with_stats, key), images(SIZE, CLASSES))


PROGRAMS = {
    "resnet_group": lambda: _program("resnet_group", _group_norm),
    "resnet_batch": lambda: _program("resnet_batch", _batch_norm),
}
