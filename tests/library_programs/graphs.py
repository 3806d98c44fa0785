"""jraph."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jraph
import optax

from .case import Case, integers, normal


def message_passing():
    tx = optax.adam(1e-2)

    def step(state, nodes, senders, receivers, target):
        w, opt = state

        def loss(w):
            net = jraph.GraphNetwork(
                update_edge_fn=lambda e, s, r, g: jnp.tanh(jnp.concatenate([e, s, r], -1) @ w["edge"]),
                update_node_fn=lambda n, s, r, g: jnp.tanh(jnp.concatenate([n, s, r], -1) @ w["node"]),
            )
            graph = jraph.GraphsTuple(
                nodes,
                jnp.ones((len(senders), 2)),
                receivers,
                senders,
                None,
                jnp.array([len(nodes)]),
                jnp.array([len(senders)]),
            )
            return ((net(graph).nodes - target) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(w)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(w, updates), opt), value

    def make_state():
        w = {"edge": 0.3 * jnp.asarray(normal(0, 18, 6)), "node": 0.3 * jnp.asarray(normal(1, 20, 8))}
        return w, tx.init(w)

    return Case(
        step, make_state, lambda i: (normal(i, 48, 8), integers(i, 48, 96), integers(i + 1, 48, 96), normal(i, 48, 8))
    )


def graph_attention():
    def step(w, nodes, senders, receivers):
        net = jraph.GAT(lambda n: n @ w["query"], lambda s, r, e: jax.nn.leaky_relu(s @ w["a"] + r @ w["b"]))
        graph = jraph.GraphsTuple(
            nodes, None, receivers, senders, None, jnp.array([len(nodes)]), jnp.array([len(senders)])
        )
        return net(graph).nodes

    w = {"query": normal(0, 8, 12), "a": normal(1, 12, 1), "b": normal(2, 12, 1)}
    return Case(
        step, lambda: w, lambda i: (normal(i, 24, 8), integers(i, 24, 72), integers(i + 1, 24, 72)), stateless=True
    )
