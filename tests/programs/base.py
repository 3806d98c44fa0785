"""The interface of a test program, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH = 24


@dataclass(frozen=True)
class Program:
    """A training step and what it eats.

    `step(*state, batch)` returns `(*new_state, aux)`; with `in_place` it changes the objects of `state` and
    returns `aux`. `make_state(key)` gives the tuple `state`; `next_batch(i)` the i-th batch as numpy arrays.
    `donated` are the numbers of the arguments whose buffers the step may take over.
    """

    name: str
    step: Callable[..., Any]
    make_state: Callable[[jax.Array], tuple]
    next_batch: Callable[[int], Any]
    in_place: bool = False
    donated: tuple[int, ...] = (0,)

    def advance(self, step: Callable[..., Any], state: tuple, batch: Any) -> tuple[tuple, Any]:
        """One call of `step`, this program's or a compiled form of it: the new state and aux."""
        out = step(*state, batch)
        if self.in_place:
            return state, out
        *state, aux = out
        return tuple(state), aux


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """Every leaf of a pytree as a numpy array, by its path. Typed random keys become their data."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[jax.tree_util.keystr(path)] = np.array(leaf)
    return found


def adamw() -> optax.GradientTransformation:
    """AdamW with an epsilon so large that rounding noise in a tiny gradient stays noise in the update."""
    return optax.adamw(1e-3, eps=1e-4)


def tokens(vocab: int, length: int) -> Callable[[int], np.ndarray]:
    """Batches of random tokens int32 [BATCH, length]."""
    return lambda i: np.random.default_rng(i).integers(0, vocab, (BATCH, length), dtype=np.int32)


def images(size: int, classes: int) -> Callable[[int], dict[str, np.ndarray]]:
    """Batches of random images float32 [BATCH, size, size, 3] with labels int32 [BATCH]."""

    def batch(i: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(i)
        image = rng.standard_normal((BATCH, size, size, 3), dtype=np.float32)
        return {"image": image, "label": rng.integers(0, classes, BATCH, dtype=np.int32)}

    return batch


def normal(key: jax.Array, *shape: int) -> jax.Array:
    """Weights with variance 1 / fan-in, the fan-in being all dims but the last."""
    return jax.random.normal(key, shape) * np.prod(shape[:-1], dtype=float) ** -0.5


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer norm over the last dim, without a bias."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all but the last dim."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
