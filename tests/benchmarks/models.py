"""Training steps of real sizes, plain JAX, as shapes only: what the benchmarks plan.

Layers are unrolled, parameters and AdamW moments float32, products in bfloat16. Neither attention nor layers
are rematerialised: the peak memory that the plan predicts is that of the step as written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import functools

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder-only transformer: GPT's (learned positions, GELU) or, with `llama`, Llama's."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    length: int
    batch: int
    llama: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def gpt(layers: int, batch: int = 64) -> Model:
    """GPT with the width of GPT-3 1.3B."""
    return Model(f"gpt-{layers}", layers, 2048, 16, 16, 8192, 50304, 1024, batch)


def llama3_8b(layers: int = 32, batch: int = 64) -> Model:
    """Llama 3 8B (arXiv:2407.21783)."""
    return Model(f"llama3-8b-{layers}", layers, 4096, 32, 8, 14336, 128256, 8192, batch, llama=True)


def step_and_arguments(model: Model) -> tuple[Callable, tuple[dict, jax.ShapeDtypeStruct]]:
    """`step(state, tokens) -> (state, loss)` with AdamW, and its arguments as shapes."""
    optimizer = optax.adamw(3e-4)

    def step(state: dict, tokens: jax.Array) -> tuple[dict, jax.Array]:
        loss, grads = jax.value_and_grad(functools.partial(_loss, model))(state["params"], tokens)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    params = _params(model)
    state = {"params": params, "moments": jax.eval_shape(optimizer.init, params)}
    return step, (state, jax.ShapeDtypeStruct((model.batch, model.length), jnp.int32))


def _params(model: Model) -> dict:
    def array(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    width, hidden, kv_width = model.width, model.hidden, model.kv_heads * model.head_width
    layer = {
        "norm1": array(width),
        "q": array(width, width),
        "k": array(width, kv_width),
        "v": array(width, kv_width),
        "out": array(width, width),
        "norm2": array(width),
        "up": array(width, hidden),
        "down": array(hidden, width),
    }
    if model.llama:
        layer["gate"] = array(width, hidden)
    params = {"embed": array(model.vocab, width), "layers": [layer] * model.layers, "norm": array(width)}
    if model.llama:
        params["head"] = array(width, model.vocab)
    else:
        params["position"] = array(model.length, width)
    return params


def _loss(model: Model, params: dict, tokens: jax.Array) -> jax.Array:
    x = params["embed"].astype(jnp.bfloat16)[tokens]
    if not model.llama:
        x = x + params["position"].astype(jnp.bfloat16)
    for layer in params["layers"]:
        x = x + _attention(model, layer, _norm(model, x, layer["norm1"]))
        x = x + _feed_forward(model, layer, _norm(model, x, layer["norm2"]))
    head = params["head"] if model.llama else params["embed"].T
    logits = (_norm(model, x, params["norm"]) @ head.astype(jnp.bfloat16)).astype(jnp.float32)
    labels = jnp.roll(tokens, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _norm(model: Model, x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm for Llama, else layer norm without a bias; in float32."""
    y = x.astype(jnp.float32)
    if not model.llama:
        y = y - y.mean(-1, keepdims=True)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def _attention(model: Model, layer: dict, x: jax.Array) -> jax.Array:
    """Causal attention on x [batch, length, width]; a key-value head serves heads / kv_heads query heads."""
    batch, length, width = x.shape
    q, k, v = (
        (x @ layer[name].astype(x.dtype)).reshape(batch, length, heads, model.head_width)
        for name, heads in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads))
    )
    if model.llama:
        q, k = _rotate(q), _rotate(k)
    q = q.reshape(batch, length, model.kv_heads, model.heads // model.kv_heads, model.head_width)
    scores = jnp.einsum("bqhge,bkhe->bhgqk", q, k).astype(jnp.float32) * model.head_width**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhgqk,bkhe->bqhge", jax.nn.softmax(scores).astype(x.dtype), v)
    return mixed.reshape(batch, length, width) @ layer["out"].astype(x.dtype)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions on x [batch, length, heads, head width]."""
    length, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(length)[:, None] * 500000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angle)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _feed_forward(model: Model, layer: dict, x: jax.Array) -> jax.Array:
    up = x @ layer["up"].astype(x.dtype)
    up = jax.nn.silu(x @ layer["gate"].astype(x.dtype)) * up if model.llama else jax.nn.gelu(up)
    return up @ layer["down"].astype(x.dtype)
