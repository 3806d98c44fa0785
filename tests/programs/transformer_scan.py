"""The transformer with a scan over stacked layers, each rematerialised, and its forward pass under an inner
jit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from .base import Program, adamw, cross_entropy, layer_norm, tokens
from .transformer import LENGTH, VOCAB, apply_layer, init_params


@jax.jit
def _forward(params: dict, batch: jax.Array) -> jax.Array:
    x = params["embed"][batch] + params["position"]
    body = jax.checkpoint(lambda x, layer: (apply_layer(layer, x), None))
    x, _ = jax.lax.scan(body, x, params["layers"])
    return layer_norm(x, params["norm"]) @ params["embed"].T


def _step(state: dict, batch: jax.Array) -> tuple[dict, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        return cross_entropy(_forward(params, batch)[:, :-1], batch[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, moments = adamw().update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def _make_state(key: jax.Array) -> tuple[dict]:
    params = init_params(key)
    params["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
    return ({"params": params, "moments": adamw().init(params)},)


PROGRAMS = {
    "transformer_scan": lambda: Program("transformer_scan", _step, _make_state, tokens(VOCAB, LENGTH))
}
