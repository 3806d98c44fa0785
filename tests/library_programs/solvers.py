"""diffrax, optimistix, lineax and jaxopt."""

from __future__ import annotations

import diffrax
import jax
import jax.numpy as jnp
import jaxopt
import lineax
import optax
import optimistix

from .case import Case, key, normal


def neural_ode():
    def field(t, y, w):
        return jnp.tanh(y @ w[0]) @ w[1]

    tx = optax.adam(1e-2)

    def step(state, x, y):
        w, opt = state

        def loss(w):
            found = diffrax.diffeqsolve(diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.25, x, w, max_steps=8)
            return ((found.ys[0] - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(w)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(w, updates), opt), value

    def make_state():
        w = (0.3 * jnp.asarray(normal(0, 8, 24)), 0.3 * jnp.asarray(normal(1, 24, 8)))
        return w, tx.init(w)

    return Case(step, make_state, lambda i: (normal(i, 24, 8), normal(i + 1, 24, 8)))


def stochastic_differential_equation():
    def step(y, k):
        noise = diffrax.UnsafeBrownianPath(y.shape, jax.random.wrap_key_data(k))
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, a: -y),
            diffrax.ControlTerm(lambda t, y, a: lineax.DiagonalLinearOperator(0.1 * jnp.ones_like(y)), noise),
        )
        found = diffrax.diffeqsolve(
            terms, diffrax.Euler(), 0.0, 1.0, 0.25, y, adjoint=diffrax.DirectAdjoint(), max_steps=8
        )
        return found.ys[0], found.stats["num_steps"]

    return Case(step, lambda: jnp.asarray(normal(0, 24)), lambda i: (jax.random.key_data(key(i)),))


def levenberg_marquardt():
    def step(p, x, y):
        def residuals(p, _):
            return p[0] * jnp.exp(-p[1] * x) + p[2] - y

        found = optimistix.least_squares(
            residuals, optimistix.LevenbergMarquardt(1e-4, 1e-4), p, max_steps=6, throw=False
        )
        return found.value, (residuals(found.value, None) ** 2).sum()

    x = jnp.linspace(0, 2, 48)
    return Case(
        step, lambda: jnp.array([1.0, 0.5, 0.0]), lambda i: (x, 2 * jnp.exp(-x) + 0.01 * normal(i, 48)), tolerance=1e-2
    )


def linear_least_squares():
    def step(a, b):
        return lineax.linear_solve(lineax.MatrixLinearOperator(a), b, lineax.QR()).value

    return Case(step, lambda: None, lambda i: (normal(i, 48, 12), normal(i + 1, 48)), stateless=True)


def projected_gradient():
    solver = jaxopt.ProjectedGradient(
        lambda w, x, y: ((x @ w - y) ** 2).mean(), jaxopt.projection.projection_simplex, stepsize=0.1, maxiter=4
    )

    def step(w, x, y):
        return solver.run(w, x=x, y=y).params, None

    return Case(step, lambda: jnp.ones(12) / 12, lambda i: (normal(i, 48, 12), normal(i + 1, 48)), donate=False)
