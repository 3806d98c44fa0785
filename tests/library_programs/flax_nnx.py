"""flax.nnx modules, changed in place."""

from __future__ import annotations

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from .case import Case, integers, normal


def _in_place(make_model, inputs, tx=None) -> Case:
    def make_state():
        model = make_model()
        return model, nnx.Optimizer(model, tx or optax.adamw(1e-2), wrt=nnx.Param)

    def step(state, x, labels):
        model, optimizer = state

        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return Case(step, make_state, inputs, in_place=True, donate=False)


def cnn_batch_norm_dropout():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 16, (3, 3), use_bias=False, rngs=rngs)  # its gradient would be rounding only
            self.norm, self.drop = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
            self.out = nnx.Linear(16 * 16, 10, rngs=rngs)

        def __call__(self, x):
            x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
            return self.out(self.drop(x.reshape(x.shape[0], -1)))

    return _in_place(lambda: Net(nnx.Rngs(0)), lambda i: (normal(i, 24, 8, 8, 3), integers(i, 10, 24)))


def attention_block():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(40, 24, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 24, decode=False, rngs=rngs)
            self.norm, self.out = nnx.LayerNorm(24, rngs=rngs), nnx.Linear(24, 40, rngs=rngs)

        def __call__(self, x):
            h = self.embed(x)
            return self.out(self.norm(h + self.attention(h)))

    return _in_place(
        lambda: Net(nnx.Rngs(1)),
        lambda i: (integers(i, 40, 24, 8), integers(i + 3, 40, 24, 8)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    )


def stacked_layers_by_vmap_and_scan():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(24, 24, rngs=rngs)

        def __call__(self, x):
            return x + jnp.tanh(self.linear(x))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.vmap(Layer, in_axes=0, out_axes=0)(rngs.fork(split=3))
            self.out = nnx.Linear(24, 10, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, layer):
                return layer(x)

            return self.out(forward(x, self.layers))

    return _in_place(lambda: Net(nnx.Rngs(2)), lambda i: (normal(i, 24, 24), integers(i, 10, 24)))


def lora():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.base = nnx.LoRALinear(16, 32, lora_rank=4, rngs=rngs)
            self.out = nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x):
            return self.out(jax.nn.silu(self.base(x)))

    return _in_place(lambda: Net(nnx.Rngs(3)), lambda i: (normal(i, 24, 16), integers(i, 10, 24)))
