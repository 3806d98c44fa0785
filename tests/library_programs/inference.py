"""blackjax, numpyro and distrax."""

from __future__ import annotations

import blackjax
import distrax
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax

from .case import Case, key, normal


def _regression(x, y):
    def density(w):
        return -0.5 * ((x @ w - y) ** 2).sum() - 0.5 * (w**2).sum()

    return density


def hamiltonian_monte_carlo():
    def step(state, k, x, y):
        sampler = blackjax.hmc(_regression(x, y), 0.01, jnp.ones(12), 4)
        new, info = jax.vmap(sampler.step)(jax.random.split(jax.random.wrap_key_data(k), 24), state)
        return new, info.acceptance_rate

    x, y = normal(0, 48, 12), normal(1, 48)
    return Case(
        step,
        lambda: jax.vmap(blackjax.hmc(_regression(x, y), 0.01, jnp.ones(12), 4).init)(jnp.zeros((24, 12))),
        lambda i: (jax.random.key_data(key(i)), x, y),
        tolerance=1e-2,
    )


def no_u_turn():
    def step(state, k, x, y):
        sampler = blackjax.nuts(_regression(x, y), 0.02, jnp.ones(12), max_num_doublings=3)
        new, info = sampler.step(jax.random.wrap_key_data(k), state)
        return new, info.num_integration_steps

    x, y = normal(0, 48, 12), normal(1, 48)
    return Case(
        step,
        lambda: blackjax.nuts(_regression(x, y), 0.02, jnp.ones(12)).init(jnp.zeros(12)),
        lambda i: (jax.random.key_data(key(i)), x, y),
        tolerance=1e-2,
    )


def variational_inference():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([12]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), Trace_ELBO(num_particles=2))

    def step(state, x, y):
        return svi.update(state, x, y)

    def inputs(i):
        return normal(i, 48, 12), (normal(i + 1, 48) > 0).astype(jnp.float32)

    return Case(step, lambda: svi.init(key(0), *inputs(0)), inputs, donate=False)


def normalising_flow():
    tx = optax.adam(1e-2)
    mask = jnp.arange(8) % 2 == 0

    def flow(w):
        def conditioner(x):
            return (jnp.tanh(x @ w["a"]) @ w["b"]).reshape(*x.shape, 2)

        def bijector(p):
            return distrax.ScalarAffine(shift=p[..., 0], log_scale=0.1 * p[..., 1])

        return distrax.Transformed(
            distrax.MultivariateNormalDiag(jnp.zeros(8)), distrax.MaskedCoupling(mask, conditioner, bijector)
        )

    def step(state, x):
        w, opt = state
        value, grads = jax.value_and_grad(lambda w: -flow(w).log_prob(x).mean())(w)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(w, updates), opt), value

    def make_state():
        w = {"a": 0.3 * jnp.asarray(normal(0, 8, 24)), "b": 0.3 * jnp.asarray(normal(1, 24, 16))}
        return w, tx.init(w)

    return Case(step, make_state, lambda i: (normal(i, 24, 8),))
