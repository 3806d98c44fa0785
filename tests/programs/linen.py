"""Transformer in flax linen with a `TrainState`; dropout keys are folded from the step count."""

from __future__ import annotations

from flax import linen as nn
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp

from .base import Program, adamw, cross_entropy, tokens

VOCAB, LENGTH, WIDTH, HEADS, HIDDEN, LAYERS = 96, 12, 48, 24, 96, 2


class _Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(y, mask=mask)
        x = x + nn.Dropout(0.1, deterministic=False)(y)
        y = nn.Dense(HIDDEN)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.relu(y))


class _Model(nn.Module):
    @nn.compact
    def __call__(self, batch: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(batch) + self.param("position", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        for _ in range(LAYERS):
            x = _Layer()(x)
        return embed.attend(nn.LayerNorm()(x))


def _step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(7), state.step)
        logits = state.apply_fn({"params": params}, batch, rngs={"dropout": key})
        return cross_entropy(logits[:, :-1], batch[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def _program() -> Program:
    model, optimizer = _Model(), adamw()

    def make_state(key: jax.Array) -> tuple[TrainState]:
        example = jnp.zeros((1, LENGTH), jnp.int32)
        params = model.init({"params": key, "dropout": key}, example)["params"]
        return (TrainState.create(apply_fn=model.apply, params=params, tx=optimizer),)

    return Program("linen", _step, make_state, tokens(VOCAB, LENGTH))


PROGRAMS = {"linen": _program}
