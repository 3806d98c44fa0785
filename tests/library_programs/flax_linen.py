"""flax.linen modules under a TrainState."""

from __future__ import annotations

from typing import Any

from flax import linen as nn
from flax.training import train_state
import jax
import jax.numpy as jnp
import optax

from .case import Case, integers, key, normal


class _State(train_state.TrainState):
    batch_stats: Any = None


def _case(model: nn.Module, loss, inputs, *, tx=None, rngs: tuple[str, ...] = (), **more: Any) -> Case:
    """A step of `loss(outputs, *targets)`, where the model takes the first of `inputs(i)`."""
    tx = tx or optax.adam(1e-2)

    def make_state():
        variables = model.init({"params": key(1), **{r: key(2) for r in rngs}}, inputs(0)[0])
        return _State.create(
            apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables.get("batch_stats", {})
        )

    def step(state, x, *targets):
        draws = {r: jax.random.fold_in(key(3), state.step) for r in rngs}

        def compute(params):
            out, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, x, rngs=draws, mutable=["batch_stats"]
            )
            return loss(out, *targets), new

        (value, new), grads = jax.value_and_grad(compute, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads).replace(batch_stats=new.get("batch_stats", {}))
        return state, {"loss": value, "grad_norm": optax.global_norm(grads)}

    return Case(step, make_state, inputs, **more)


def _classify(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def cnn_batch_norm():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(16, (3, 3))(x)))
            x = nn.avg_pool(x, (2, 2), (2, 2))
            x = nn.relu(nn.GroupNorm(4)(nn.Conv(24, (3, 3), strides=2)(x)))
            return nn.Dense(10)(x.reshape(x.shape[0], -1))

    return _case(Net(), _classify, lambda i: (normal(i, 24, 12, 12, 3), integers(i, 10, 24)), tx=optax.sgd(0.1, 0.9))


def autoencoder_transposed_convolutions():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.gelu(nn.Conv(16, (3, 3), strides=2)(x))
            return nn.ConvTranspose(3, (3, 3), strides=(2, 2))(h)

    return _case(
        Net(), lambda out, y: ((out - y) ** 2).mean(), lambda i: (normal(i, 24, 8, 8, 3), normal(i + 9, 24, 8, 8, 3))
    )


def depthwise_separable():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(16, (1, 1))(x)
            x = nn.relu(nn.Conv(16, (3, 3), feature_group_count=16)(x))
            x = nn.max_pool(nn.Conv(32, (3, 3), feature_group_count=4, kernel_dilation=2)(x), (2, 2), (2, 2))
            return nn.Dense(10)(x.mean((1, 2)))

    return _case(Net(), _classify, lambda i: (normal(i, 24, 8, 8, 3), integers(i, 10, 24)))


def lstm_classifier():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.RNN(nn.OptimizedLSTMCell(24))(nn.Embed(50, 16)(x))
            return nn.Dense(10)(h[:, -1])

    return _case(Net(), _classify, lambda i: (integers(i, 50, 24, 12), integers(i, 10, 24)))


def bidirectional_gru():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(5)(nn.Bidirectional(nn.RNN(nn.GRUCell(12)), nn.RNN(nn.GRUCell(12)))(x))

    return _case(
        Net(),
        lambda out, y: optax.ctc_loss(out, jnp.zeros(out.shape[:2]), y, jnp.zeros(y.shape)).mean(),
        lambda i: (normal(i, 24, 10, 8), 1 + integers(i, 4, 24, 3)),
    )


def scanned_remat_layers():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False)(nn.LayerNorm()(x))
            return x + y + nn.Dense(24)(nn.gelu(nn.Dense(48)(x))), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Embed(48, 24)(x)
            layers = nn.scan(
                nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3
            )
            x, _ = layers()(x, None)
            return nn.Dense(48)(x)

    return _case(
        Net(),
        lambda out, y: _classify(out, y),
        lambda i: (integers(i, 48, 24, 8), integers(i + 5, 48, 24, 8)),
        rngs=("dropout",),
        tx=optax.sgd(0.1),
    )


def tied_embedding():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            embed = nn.Embed(50, 24)
            return embed.attend(nn.Dense(24)(nn.RMSNorm()(embed(x))))

    return _case(Net(), _classify, lambda i: (integers(i, 50, 24, 6), integers(i + 5, 50, 24, 6)))


def spectral_and_weight_norm():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.SpectralNorm(nn.Dense(32))(x, update_stats=True))
            return nn.WeightNorm(nn.Dense(10))(x)

    return _case(Net(), _classify, lambda i: (normal(i, 24, 16), integers(i, 10, 24)))


def decoding_with_a_cache():
    """One token at a time; the state is the cache."""
    attention = nn.MultiHeadDotProductAttention(4, decode=True)

    def variables():
        return attention.init(key(0), jnp.ones((24, 16, 32)), jnp.ones((24, 16, 32)))

    params = variables()["params"]

    def step(cache, weights, x):
        out, new = attention.apply({"params": weights, "cache": cache}, x, x, mutable=["cache"])
        return new["cache"], out

    return Case(step, lambda: variables()["cache"], lambda i: (params, normal(i, 24, 1, 32)))
