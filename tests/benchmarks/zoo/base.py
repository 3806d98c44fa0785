"""The interface of a benchmark program, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Program:
    """A training step `step(state, batch) -> (state, loss)` that gives its state's buffers away.

    `make_state(key)` and `make_batch(key)` make real arrays; `arguments` are the shapes of what they make.
    """

    name: str
    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    make_state: Callable[[jax.Array], Any]
    make_batch: Callable[[jax.Array], Any]

    def arguments(self) -> tuple[Any, Any]:
        """State and batch as `ShapeDtypeStruct`s; nothing is computed."""
        key = jax.random.key(0)
        return jax.eval_shape(self.make_state, key), jax.eval_shape(self.make_batch, key)


def train_step(
    loss_fn: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation
) -> Callable[[dict, Any], tuple[dict, jax.Array]]:
    """`step(state, batch)` for a state of "params" and "opt"."""

    def step(state: dict, batch: Any) -> tuple[dict, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def state_maker(
    init: Callable[[jax.Array], Any], optimizer: optax.GradientTransformation
) -> Callable[[jax.Array], dict]:
    """`make_state(key)` of parameters that `init(key)` makes."""

    def make_state(key: jax.Array) -> dict:
        params = init(key)
        return {"params": params, "opt": optimizer.init(params)}

    return make_state


def token_batch(batch: int, length: int, vocab: int) -> Callable[[jax.Array], jax.Array]:
    """Batches of random tokens int32 [batch, length]."""
    return lambda key: jax.random.randint(key, (batch, length), 0, vocab, jnp.int32)


def image_batch(batch: int, size: int, classes: int) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """Batches of random images float32 [batch, size, size, 3] and labels int32 [batch]."""

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        image, label = jax.random.split(key)
        return {
            "image": jax.random.normal(image, (batch, size, size, 3)),
            "label": jax.random.randint(label, (batch,), 0, classes, jnp.int32),
        }

    return make_batch


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all but the last dim; logits in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each token given those before it."""
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


def dense(key: jax.Array, *shape: int) -> jax.Array:
    """Float32 weights with variance 1 / fan-in, the fan-in being the next-to-last dim."""
    return jax.random.normal(key, shape) * shape[-2] ** -0.5


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer norm over the last dim."""
    mean = x.mean(-1, keepdims=True)
    var = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias
