"""Transformer in flax NNX with `nnx.Optimizer` and `nnx.Rngs`: one step changes them in place, one returns
them.
"""

from __future__ import annotations

from flax import nnx
import jax

from .base import Program, adamw, cross_entropy, tokens

VOCAB, LENGTH, WIDTH, HEADS, HIDDEN, LAYERS = 96, 12, 48, 24, 96, 2


class _Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0])))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class _Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.layers = nnx.List([_Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, batch: jax.Array) -> jax.Array:
        x = self.embed(batch) + self.position[...]
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


def _loss(model: _Model, batch: jax.Array) -> jax.Array:
    return cross_entropy(model(batch)[:, :-1], batch[:, 1:])


def _in_place(model: _Model, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(_loss)(model, batch)
    optimizer.update(model, grads)
    return loss


def _returned(
    model: _Model, optimizer: nnx.Optimizer, batch: jax.Array
) -> tuple[_Model, nnx.Optimizer, jax.Array]:
    loss = _in_place(model, optimizer, batch)
    return model, optimizer, loss


def _make_state(key: jax.Array) -> tuple[_Model, nnx.Optimizer]:
    model = _Model(nnx.Rngs(key))
    return model, nnx.Optimizer(model, adamw(), wrt=nnx.Param)


PROGRAMS = {
    "nnx_in_place": lambda: Program(
        "nnx_in_place", _in_place, _make_state, tokens(VOCAB, LENGTH), True, (0, 1)
    ),
    "nnx_returned": lambda: Program(
        "nnx_returned", _returned, _make_state, tokens(VOCAB, LENGTH), donated=(0, 1)
    ),
}
