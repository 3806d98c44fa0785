"""Wide residual network (arXiv:1605.07146) in flax linen: batch norm with running statistics in a `TrainState`,
SGD with momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import linen as nn
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import optax

from .base import Program, cross_entropy, image_batch

CLASSES = 1024


@dataclass(frozen=True)
class Size:
    """`blocks` residual blocks in each of as many stages as there are `widths`; images of `pixels` squared."""

    widths: tuple[int, ...]
    blocks: int
    pixels: int
    batch: int


SIZES = {"large": Size((256, 512, 1024), 2, 64, 256), "small": Size((16, 32, 64), 1, 16, 32)}


class State(TrainState):
    stats: Any


class Block(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        strides = (self.stride, self.stride)
        y = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        shortcut = x
        if x.shape[-1] != self.width:
            shortcut = nn.Conv(self.width, (1, 1), strides, use_bias=False)(y)
        y = nn.Conv(self.width, (3, 3), strides, use_bias=False)(y)
        y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
        return shortcut + nn.Conv(self.width, (3, 3), use_bias=False)(y)


class WideResNet(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.size.widths[0] // 4, (3, 3), use_bias=False)(x)
        for stage, width in enumerate(self.size.widths):
            for block in range(self.size.blocks):
                x = Block(width, 2 if stage > 0 and block == 0 else 1)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


def program(name: str, size: str) -> Program:
    config = SIZES[size]
    model, optimizer = WideResNet(config), optax.sgd(0.1, momentum=0.9, nesterov=True)

    def make_state(key: jax.Array) -> State:
        variables = model.init(key, jnp.zeros((1, config.pixels, config.pixels, 3)))
        return State.create(
            apply_fn=model.apply, params=variables["params"], tx=optimizer, stats=variables["batch_stats"]
        )

    return Program(name, _step, make_state, image_batch(config.batch, config.pixels, CLASSES))


def _step(state: State, batch: dict[str, jax.Array]) -> tuple[State, jax.Array]:
    def loss_fn(params: dict) -> tuple[jax.Array, dict]:
        variables = {"params": params, "batch_stats": state.stats}
        logits, updated = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["label"]), updated["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, stats=stats), loss
