"""dm-haiku transforms."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from .case import Case, integers, key, normal


def _case(forward, inputs, loss) -> Case:
    net, tx = hk.transform_with_state(forward), optax.rmsprop(1e-3)

    def make_state():
        params, extra = net.init(key(0), inputs(0)[0])
        return params, extra, tx.init(params)

    def step(state, x, *targets):
        params, extra, opt = state

        def compute(p):
            out, new = net.apply(p, extra, key(2), x)
            return loss(out, *targets), new

        (value, extra), grads = jax.value_and_grad(compute, has_aux=True)(params)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(params, updates), extra, opt), value

    return Case(step, make_state, inputs)


def _classify(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mobile_net():
    return _case(
        lambda x: hk.nets.MobileNetV1(strides=(1, 2), channels=(8, 16), num_classes=10)(x, is_training=True),
        lambda i: (normal(i, 24, 16, 16, 3), integers(i, 10, 24)),
        _classify,
    )


def vector_quantised_autoencoder():
    def forward(x):
        z = hk.Linear(8)(jax.nn.relu(hk.Linear(24)(x)))
        quantised = hk.nets.VectorQuantizerEMA(8, 12, 0.25, 0.9)(z, is_training=True)
        return hk.Linear(16)(quantised["quantize"]), quantised["loss"]

    return _case(
        forward, lambda i: (normal(i, 24, 16), normal(i, 24, 16)), lambda out, y: ((out[0] - y) ** 2).mean() + out[1]
    )


def deep_lstm():
    def forward(x):
        core = hk.DeepRNN([hk.LSTM(16), jax.nn.relu, hk.LSTM(16)])
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.BatchApply(hk.Linear(4))(out)

    return _case(
        forward, lambda i: (normal(i, 6, 24, 8), normal(i + 1, 6, 24, 4)), lambda out, y: jnp.abs(out - y).mean()
    )
