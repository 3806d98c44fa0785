"""Vision transformer in flax linen: patches by a strided convolution, a class token, AdamW in a `TrainState`."""

from __future__ import annotations

from dataclasses import dataclass

from flax import linen as nn
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import optax

from .base import Program, cross_entropy, image_batch

CLASSES = 1024


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    pixels: int
    patch: int
    batch: int


SIZES = {"large": Size(6, 1280, 16, 224, 14, 128), "small": Size(2, 128, 8, 32, 4, 16)}


class Layer(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(self.size.heads)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(4 * self.size.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.size.width)(y)


class VisionTransformer(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        width, patch = self.size.width, (self.size.patch, self.size.patch)
        x = nn.Conv(width, patch, patch, padding="VALID")(image)
        x = x.reshape(x.shape[0], -1, width)
        token = self.param("token", nn.initializers.zeros, (1, 1, width))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, width)), x], axis=1)
        x = x + self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], width))
        for _ in range(self.size.layers):
            x = Layer(self.size)(x)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x)[:, 0])


def program(name: str, size: str) -> Program:
    config = SIZES[size]
    model, optimizer = VisionTransformer(config), optax.adamw(1e-3)

    def make_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, config.pixels, config.pixels, 3)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return Program(name, _step, make_state, image_batch(config.batch, config.pixels, CLASSES))


def _step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        return cross_entropy(state.apply_fn({"params": params}, batch["image"]), batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss
