"""equinox modules: their arrays are the state, the rest is static and closed over."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .case import Case, integers, key, normal


def _case(make_model, inputs, *, dropout: bool = False, **more) -> Case:
    tx = optax.adam(1e-2)
    static = eqx.partition(make_model(), eqx.is_array)[1]

    def make_state():
        arrays = eqx.filter(make_model(), eqx.is_array)
        return arrays, tx.init(eqx.filter(arrays, eqx.is_inexact_array)), key(9)

    def step(state, x, labels):
        arrays, opt, k = state
        k, use = jax.random.split(k)

        def loss(model):
            keys = jax.random.split(use, len(x))
            logits = jax.vmap(lambda v, k: model(v, key=k) if dropout else model(v))(x, keys)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = eqx.filter_value_and_grad(loss)(eqx.combine(arrays, static))
        updates, opt = tx.update(grads, opt)
        return (eqx.filter(eqx.apply_updates(eqx.combine(arrays, static), updates), eqx.is_array), opt, k), value

    return Case(step, make_state, inputs, donate=False, **more)


def mlp():
    return _case(lambda: eqx.nn.MLP(16, 10, 48, 2, key=key(0)), lambda i: (normal(i, 24, 16), integers(i, 10, 24)))


def convolutional():
    def model():
        k = jax.random.split(key(0), 2)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, 8, 3, key=k[0]),
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Dropout(0.2),
                eqx.nn.Linear(8 * 9, 10, key=k[1]),
            ]
        )

    return _case(model, lambda i: (normal(i, 24, 3, 8, 8), integers(i, 10, 24)), dropout=True)


class _Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __call__(self, x):
        start = jnp.zeros(self.cell.hidden_size)
        return self.out(jax.lax.scan(lambda h, v: (self.cell(v, h), None), start, x)[0])


def recurrent():
    return _case(
        lambda: _Recurrent(eqx.nn.GRUCell(8, 24, key=key(0)), eqx.nn.Linear(24, 10, key=key(1))),
        lambda i: (normal(i, 24, 6, 8), integers(i, 10, 24)),
    )


class _Attention(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __call__(self, x):
        h = jax.vmap(self.norm)(x + self.attention(x, x, x))
        return self.out(h.mean(0))


def attention():
    return _case(
        lambda: _Attention(
            eqx.nn.MultiheadAttention(4, 24, key=key(0)), eqx.nn.LayerNorm(24), eqx.nn.Linear(24, 10, key=key(1))
        ),
        lambda i: (normal(i, 24, 6, 24), integers(i, 10, 24)),
    )
