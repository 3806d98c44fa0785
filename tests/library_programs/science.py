"""Programs that train nothing, of jax and jax.scipy alone."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental.ode import odeint
import jax.numpy as jnp
import jax.scipy as jsp

from .case import Case, normal


def heat_equation():
    def step(u, source):
        def advance(i, u):
            around = sum(jnp.roll(u, s, a) for a in (0, 1) for s in (1, -1))
            return u + 0.1 * (around - 4 * u) + 0.01 * source

        u = lax.fori_loop(0, 5, advance, u)
        return u, jnp.abs(u).max()

    return Case(step, lambda: jnp.asarray(normal(0, 48, 24)), lambda i: (normal(i, 48, 24),))


def spectral_poisson():
    def step(f):
        k = jnp.fft.fftfreq(24) * 24
        squares = k[:, None] ** 2 + k[None] ** 2
        return jnp.fft.ifft2(jnp.fft.fft2(f) / jnp.where(squares == 0, 1, squares)).real

    return Case(step, lambda: None, lambda i: (normal(i, 24, 24),), stateless=True)


def wave_with_boundaries():
    def step(state, kick):
        u, v = state
        u = u.at[0].set(0.0).at[-1].set(0.0)
        inner = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
        v = v.at[1:-1, 1:-1].add(0.2 * inner)
        return (u + 0.2 * v + 0.01 * kick, v), (u**2).sum()

    return Case(step, lambda: (jnp.asarray(normal(0, 24, 32)), jnp.zeros((24, 32))), lambda i: (normal(i, 24, 32),))


def n_body():
    def step(state, dt):
        x, v = state

        def acceleration(x):
            d = x[None] - x[:, None]
            return (d / ((d**2).sum(-1, keepdims=True) + 0.1) ** 1.5).sum(1)

        v = v + dt * acceleration(x)
        return (x + dt * v, v), 0.5 * (v**2).sum()

    return Case(step, lambda: (jnp.asarray(normal(0, 48, 3)), jnp.asarray(normal(1, 48, 3))), lambda i: (0.01,))


def k_means():
    def step(centres, points):
        nearest = jnp.argmin(((points[:, None] - centres[None]) ** 2).sum(-1), -1)
        counts = jax.ops.segment_sum(jnp.ones(len(points)), nearest, 8)
        sums = jax.ops.segment_sum(points, nearest, 8)
        return jnp.where(counts[:, None] > 0, sums / jnp.maximum(counts, 1)[:, None], centres), counts

    return Case(step, lambda: jnp.asarray(normal(0, 8, 4)), lambda i: (normal(7, 240, 4),))


def expectation_maximisation():
    def step(state, points):
        means, logs = state
        scores = jsp.stats.norm.logpdf(points[:, None], means[None], 1.0).sum(-1) + jax.nn.log_softmax(logs)
        parts = jax.nn.softmax(scores, -1)
        weight = parts.sum(0)
        return (parts.T @ points / weight[:, None], jnp.log(weight)), jax.nn.logsumexp(scores, -1).sum()

    return Case(step, lambda: (jnp.asarray(normal(0, 6, 4)), jnp.zeros(6)), lambda i: (normal(3, 240, 4),))


def conjugate_gradients():
    def step(x, a, b):
        solution, _ = jsp.sparse.linalg.cg(lambda v: a.T @ (a @ v) + v, b, x0=x, maxiter=5)
        return solution, jnp.linalg.norm(solution - x)

    return Case(step, lambda: jnp.zeros((24, 6)), lambda i: (0.2 * normal(0, 48, 24), normal(1, 24, 6)), tolerance=1e-2)


def gaussian_process():
    def step(params, x, y):
        def loss(p):
            d = (x[:, None] - x[None]) ** 2
            k = jnp.exp(p["scale"] - 0.5 * jnp.exp(p["length"]) * d.sum(-1)) + 0.1 * jnp.eye(len(x))
            c = jsp.linalg.cho_factor(k, lower=True)
            return 0.5 * y @ jsp.linalg.cho_solve(c, y) + jnp.log(jnp.diagonal(c[0])).sum()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    return Case(
        step,
        lambda: {"scale": jnp.float32(0.1), "length": jnp.float32(0.2)},
        lambda i: (normal(i, 48, 2), normal(i + 1, 48)),
        tolerance=1e-2,
    )


def kalman_filter():
    def step(state, observations):
        f, h = 0.9 * jnp.eye(6), jnp.ones((2, 6)) / 6

        def one(state, z):
            m, p = state
            m, p = f @ m, f @ p @ f.T + 0.1 * jnp.eye(6)
            s = h @ p @ h.T + jnp.eye(2)
            gain = jnp.linalg.solve(s, h @ p).T
            return (m + gain @ (z - h @ m), p - gain @ h @ p), m

        return jax.vmap(lambda s, zs: lax.scan(one, s, zs))(state, observations)

    return Case(step, lambda: (jnp.zeros((24, 6)), jnp.tile(jnp.eye(6), (24, 1, 1))), lambda i: (normal(i, 24, 5, 2),))


def neural_ode_by_the_adjoint():
    def step(w, x):
        def loss(w):
            return (odeint(lambda y, t, w: jnp.tanh(y @ w) - 0.1 * y, x, jnp.array([0.0, 0.5]), w)[-1] ** 2).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    return Case(step, lambda: 0.3 * jnp.asarray(normal(0, 12, 12)), lambda i: (normal(i, 24, 12),), tolerance=1e-2)


def metropolis():
    def step(state, scale):
        x, k = state

        def density(x):
            return -0.5 * (x**2).sum(-1) + jnp.sin(x).sum(-1)

        k, propose, accept = jax.random.split(k, 3)
        new = x + scale * jax.random.normal(propose, x.shape)
        better = jnp.log(jax.random.uniform(accept, x.shape[:1])) < density(new) - density(x)
        return (jnp.where(better[:, None], new, x), k), better.mean()

    return Case(step, lambda: (jnp.asarray(normal(0, 48, 6)), jax.random.key(3)), lambda i: (0.3,))


def power_iteration_until_converged():
    def step(v, a):
        def going_on(s):
            return (s[2] < 40) & (s[1] > 1e-3)

        def again(s):
            v, _, n = s
            new = a @ (a.T @ v)
            new = new / jnp.linalg.norm(new)
            return new, jnp.linalg.norm(new - v), n + 1

        v, _, n = lax.while_loop(going_on, again, (v, jnp.float32(1), 0))
        return v, n > 0

    return Case(step, lambda: jnp.ones(24) / 24**0.5, lambda i: (normal(0, 24, 48),), tolerance=1e-2)


def game_of_life():
    def step(board):
        around = lax.reduce_window(board.astype(jnp.int32), 0, lax.add, (3, 3), (1, 1), "SAME") - board
        return ((around == 3) | ((board == 1) & (around == 2))).astype(jnp.int8), board.sum()

    return Case(step, lambda: (jnp.asarray(normal(0, 48, 24)) > 0).astype(jnp.int8), lambda i: ())


def sorting_and_ranking():
    def step(x):
        order = jnp.argsort(x, axis=1)
        return {
            "sorted": jnp.take_along_axis(x, order, 1),
            "ranks": jnp.argsort(order, 1),
            "median": jnp.median(x, 1),
            "top": lax.top_k(x, 3),
            "quantile": jnp.quantile(x, 0.3, axis=0),
            "unique": jnp.unique(jnp.round(x), size=8),
            "histogram": jnp.histogram(x, 10, (-3, 3))[0],
            "bins": jnp.digitize(x, jnp.linspace(-2, 2, 5)),
        }

    return Case(step, lambda: None, lambda i: (normal(i, 24, 18),), stateless=True)
