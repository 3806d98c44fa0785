"""optax optimizers and ways to combine them, on one small network of plain arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from .case import Case, integers, key, normal


def _params():
    k = jax.random.split(key(5), 3)
    return {
        "hidden": {"w": 0.3 * jax.random.normal(k[0], (16, 48)), "b": jnp.zeros(48)},
        "out": {"w": 0.3 * jax.random.normal(k[1], (48, 12)), "b": jnp.zeros(12)},
    }


def _loss(params, x, labels):
    h = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["out"]["w"] + params["out"]["b"], labels).mean()


def _inputs(i):
    return normal(i, 24, 16), integers(i, 12, 24)


def _case(tx, **more) -> Case:
    def step(state, x, labels):
        params, opt = state
        value, grads = jax.value_and_grad(_loss)(params, x, labels)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    return Case(step, lambda: (_params(), tx.init(_params())), _inputs, **more)


def adafactor():
    return _case(optax.adafactor(1e-2, min_dim_size_to_factor=8))


def muon():
    return _case(contrib.muon(1e-2))


def shampoo_like_matrix_roots():
    """Preconditioners by eigh, as Shampoo's."""

    def init(params):
        return jax.tree.map(lambda p: (jnp.eye(p.shape[0]), jnp.eye(p.shape[1])) if p.ndim == 2 else (), params)

    def root(m):
        values, vectors = jnp.linalg.eigh(m)
        return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

    def update(grads, state, params=None):
        def one(g, s):
            if g.ndim != 2:
                return g, s
            left, right = s[0] + g @ g.T, s[1] + g.T @ g
            return root(left) @ g @ root(right), (left, right)

        flat, tree = jax.tree.flatten(grads)
        done = [one(g, s) for g, s in zip(flat, tree.flatten_up_to(state), strict=True)]
        return tree.unflatten([-0.1 * d[0] for d in done]), tree.unflatten([d[1] for d in done])

    return _case(optax.GradientTransformation(init, update), tolerance=5e-3)


def multi_transform():
    tx = optax.partition({"sgd": optax.sgd(0.1, 0.9), "adam": optax.adam(1e-2)}, {"hidden": "sgd", "out": "adam"})
    return _case(tx)


def multi_steps():
    return _case(optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2))


def clipped_with_schedule_and_averages():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule), optax.ema(0.9))
    return _case(tx)


def lookahead():
    tx = optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5)

    def step(state, x, labels):
        params, opt = state
        value, grads = jax.value_and_grad(_loss)(params.fast, x, labels)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    def make_state():
        params = optax.LookaheadParams.init_synced(_params())
        return params, tx.init(params)

    return Case(step, make_state, _inputs, donate=False)


def schedule_free():
    return _case(contrib.schedule_free_adamw(1e-2))


def prodigy():
    return _case(contrib.prodigy())


def skips_non_finite_gradients():
    return _case(optax.apply_if_finite(optax.adam(1e-2), 3))


def noisy_gradients_with_keys_in_state():
    return _case(optax.chain(optax.add_noise(0.01, 0.5, 7), optax.sgd(0.1)))


def lbfgs_with_line_search():
    tx = optax.lbfgs()

    def step(state, x, labels):
        params, opt = state

        def loss(p):
            return _loss(p, x, labels)

        value, grads = optax.value_and_grad_from_state(loss)(params, state=opt)
        updates, opt = tx.update(grads, opt, params, value=value, grad=grads, value_fn=loss)
        return (optax.apply_updates(params, updates), opt), value

    return Case(step, lambda: (_params(), tx.init(_params())), _inputs, tolerance=2e-2)


def sharpness_aware():
    tx = contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
    return _case(tx)


def averaged_copy_and_per_example_clipping():
    """Differentially private gradients, and an exponential average of the weights beside them."""
    tx = optax.adam(1e-2)

    def step(state, x, labels):
        params, opt, average = state
        grads = jax.vmap(jax.grad(_loss), (None, 0, 0))(params, x[:, None], labels[:, None])
        norms = jax.vmap(optax.global_norm)(grads)
        scale = jnp.minimum(1.0, 1.0 / norms)
        grads = jax.tree.map(lambda g: jnp.einsum("b...,b->...", g, scale) / len(scale), grads)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        return (params, opt, optax.incremental_update(params, average, 0.1)), {
            "norms": norms,
            "clipped": (scale < 1).sum(),
        }

    return Case(step, lambda: (_params(), tx.init(_params()), _params()), _inputs, donate=False)


def adversarial_pair():
    """Generator and discriminator with an optimizer each."""
    tx = optax.adam(1e-2)

    def generate(g, z):
        return jnp.tanh(z @ g["a"]) @ g["b"]

    def score(d, x):
        return (jax.nn.leaky_relu(x @ d["a"]) @ d["b"])[:, 0]

    def step(state, real, z):
        g, d, og, od = state

        def judge(d):
            return (
                jax.nn.softplus(-score(d, real)) + jax.nn.softplus(score(d, jax.lax.stop_gradient(generate(g, z))))
            ).mean()

        def fool(g):
            return jax.nn.softplus(-score(d, generate(g, z))).mean()

        loss_d, grads_d = jax.value_and_grad(judge)(d)
        loss_g, grads_g = jax.value_and_grad(fool)(g)
        ud, od = tx.update(grads_d, od)
        ug, og = tx.update(grads_g, og)
        return (optax.apply_updates(g, ug), optax.apply_updates(d, ud), og, od), (loss_d, loss_g, None)

    def make_state():
        k = jax.random.split(key(1), 4)
        g = {"a": jax.random.normal(k[0], (8, 24)), "b": 0.2 * jax.random.normal(k[1], (24, 16))}
        d = {"a": 0.2 * jax.random.normal(k[2], (16, 24)), "b": 0.2 * jax.random.normal(k[3], (24, 1))}
        return g, d, tx.init(g), tx.init(d)

    return Case(step, make_state, lambda i: (normal(i, 24, 16), normal(i + 3, 24, 8)))


def several_batches_in_a_scan():
    tx = optax.adam(1e-2)

    def step(state, xs, labels):
        def one(state, batch):
            params, opt = state
            value, grads = jax.value_and_grad(_loss)(params, *batch)
            updates, opt = tx.update(grads, opt)
            return (optax.apply_updates(params, updates), opt), value

        return jax.lax.scan(one, state, (xs, labels))

    return Case(step, lambda: (_params(), tx.init(_params())), lambda i: (normal(i, 3, 24, 16), integers(i, 12, 3, 24)))
