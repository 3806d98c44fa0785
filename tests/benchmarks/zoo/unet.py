"""U-Net that predicts the noise in an image, as in DDPM (arXiv:2006.11239), in plain JAX: group norm, time
embedding, skip connections; AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
import functools

import jax
import jax.numpy as jnp
import optax

from .base import Program, dense, state_maker, train_step

GROUPS = 16
NOISE_STEPS = 1000


@dataclass(frozen=True)
class Size:
    """One residual block per entry of `widths` on the way down, and one on the way up, each at half the
    resolution of the one before.
    """

    widths: tuple[int, ...]
    pixels: int
    batch: int

    @property
    def embedding(self) -> int:
        return 4 * self.widths[0]


SIZES = {"large": Size((256, 512, 1024), 64, 128), "small": Size((32, 64, 128), 16, 16)}


def program(name: str, size: str) -> Program:
    config = SIZES[size]
    optimizer = optax.adamw(1e-4)
    return Program(
        name,
        train_step(functools.partial(_loss, config), optimizer),
        state_maker(functools.partial(_init, config), optimizer),
        functools.partial(_batch, config),
    )


def _batch(size: Size, key: jax.Array) -> dict[str, jax.Array]:
    image, noise, time = jax.random.split(key, 3)
    shape = (size.batch, size.pixels, size.pixels, 3)
    return {
        "image": jax.random.normal(image, shape),
        "noise": jax.random.normal(noise, shape),
        "time": jax.random.randint(time, (size.batch,), 0, NOISE_STEPS, jnp.int32),
    }


def _init(size: Size, key: jax.Array) -> dict:
    keys = iter(jax.random.split(key, 4 * len(size.widths) + 8))
    block = lambda inputs, outputs: _init_block(size, inputs, outputs, next(keys))  # noqa: E731
    params = {
        "time1": dense(next(keys), size.widths[0], size.embedding),
        "time2": dense(next(keys), size.embedding, size.embedding),
        "first": _kernel(next(keys), 3, 3, size.widths[0]),
        "down": [],
        "up": [],
    }
    width = size.widths[0]
    for wider in size.widths:
        params["down"].append({"block": block(width, wider), "shrink": _kernel(next(keys), 3, wider, wider)})
        width = wider
    params["middle"] = block(width, width)
    for narrower in reversed(size.widths):
        params["up"].append({"grow": _kernel(next(keys), 3, width, width), "block": block(width + narrower, narrower)})
        width = narrower
    return params | {"norm": _init_norm(width), "last": _kernel(next(keys), 3, width, 3)}


def _init_norm(width: int) -> dict:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _init_block(size: Size, inputs: int, outputs: int, key: jax.Array) -> dict:
    keys = jax.random.split(key, 4)
    return {
        "norm1": _init_norm(inputs),
        "conv1": _kernel(keys[0], 3, inputs, outputs),
        "time": dense(keys[1], size.embedding, outputs),
        "norm2": _init_norm(outputs),
        "conv2": _kernel(keys[2], 3, outputs, outputs),
        "shortcut": _kernel(keys[3], 1, inputs, outputs),
    }


def _kernel(key: jax.Array, size: int, inputs: int, outputs: int) -> jax.Array:
    return jax.random.normal(key, (size, size, inputs, outputs)) * (size * size * inputs) ** -0.5


def _loss(size: Size, params: dict, batch: dict[str, jax.Array]) -> jax.Array:
    signal = jnp.cos(0.5 * jnp.pi * batch["time"] / NOISE_STEPS)[:, None, None, None]
    noisy = signal * batch["image"] + jnp.sqrt(1 - signal**2) * batch["noise"]
    return jnp.square(_forward(size, params, noisy, batch["time"]) - batch["noise"]).mean()


def _forward(size: Size, params: dict, x: jax.Array, time: jax.Array) -> jax.Array:
    embedded = jax.nn.silu(_sinusoids(time, size.widths[0]) @ params["time1"]) @ params["time2"]
    x = _conv(x, params["first"])
    skips = []
    for level in params["down"]:
        x = _block(level["block"], x, embedded)
        skips.append(x)
        x = _conv(x, level["shrink"], stride=2)
    x = _block(params["middle"], x, embedded)
    for level in params["up"]:
        x = _conv(x.repeat(2, axis=1).repeat(2, axis=2), level["grow"])
        x = _block(level["block"], jnp.concatenate([x, skips.pop()], axis=-1), embedded)
    return _conv(jax.nn.silu(_group_norm(x, **params["norm"])), params["last"])


def _sinusoids(time: jax.Array, width: int) -> jax.Array:
    angle = time[:, None] * 10000.0 ** (-jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def _block(weights: dict, x: jax.Array, embedded: jax.Array) -> jax.Array:
    y = _conv(jax.nn.silu(_group_norm(x, **weights["norm1"])), weights["conv1"])
    y = y + (jax.nn.silu(embedded) @ weights["time"])[:, None, None, :]
    y = _conv(jax.nn.silu(_group_norm(y, **weights["norm2"])), weights["conv2"])
    return _conv(x, weights["shortcut"]) + y


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _group_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    grouped = x.reshape(*x.shape[:-1], GROUPS, x.shape[-1] // GROUPS)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    var = grouped.var((1, 2, 4), keepdims=True)
    return ((grouped - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape) * scale + bias
