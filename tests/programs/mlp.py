"""Multi-layer perceptron, plain JAX, SGD with momentum written by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .base import BATCH, Program, normal


def _loss(params: list[dict[str, jax.Array]], batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"]
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - batch["y"]) ** 2)


def _step(state: dict, batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
    loss, grads = jax.value_and_grad(_loss)(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.05 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "count": state["count"] + 1}, loss


def _program(name: str, widths: tuple[int, ...]) -> Program:
    def make_state(key: jax.Array) -> tuple[dict]:
        keys = jax.random.split(key, len(widths))
        params = [
            {"w": normal(k, m, n), "b": jnp.zeros(n)}
            for k, m, n in zip(keys, widths[:-1], widths[1:], strict=False)
        ]
        return ({"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "count": 0},)

    def batch(i: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(i)
        draw = lambda width: rng.standard_normal((BATCH, width), dtype=np.float32)  # noqa: E731
        return {"x": draw(widths[0]), "y": draw(widths[-1])}

    return Program(name, _step, make_state, batch)


PROGRAMS = {
    "mlp": lambda: _program("mlp", (48, 96, 96, 48)),
    # Widths that no mesh divides: whatever is planned, the numbers must not change.
    "mlp_odd": lambda: _program("mlp_odd", (10, 50, 31, 5)),
}
