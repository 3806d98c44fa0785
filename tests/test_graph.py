"""The graph of a step: regions and their weights, folding, liveness."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from autoplan.cost_models import parse_cluster
from autoplan.folding import fold
from autoplan.graph import Graph, build_graph
from autoplan.memory import memory_model
from autoplan.problem import build_problem
from autoplan.reshard import Machine
from autoplan.trace import Trace, trace_step


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(fun, *args, **options) -> tuple[Graph, Trace]:
    trace = trace_step(fun, args, {}, **options)
    return build_graph(trace), trace


def ops(graph: Graph, name: str):
    return [node for node in graph.nodes if node.kind == "op" and node.name == name]


def test_calls_are_looked_through_and_a_scan_runs_its_length() -> None:
    def step(x, weights):
        @jax.checkpoint
        def body(x, w):
            return jax.jit(jnp.tanh)(x @ w), x.sum()

        return jax.lax.scan(body, x, weights)

    graph, _ = graph_of(step, array(4, 8), array(5, 8, 8))
    (dot,) = ops(graph, "dot_general")
    assert dot.weight == 5
    kinds = [node.kind for node in graph.nodes]
    assert (kinds.count("carry"), kinds.count("slice"), kinds.count("stack")) == (1, 1, 1)
    carry = next(node for node in graph.nodes if node.kind == "carry")
    assert [graph.uses[u].weight for u in carry.operands] == [1, 5]  # the initial value, and the body's


def test_branches_share_the_weight_and_an_unknown_loop_is_said() -> None:
    def step(x, n):
        x = jax.lax.cond(n > 3, lambda x: x @ x, lambda x: x + 1, x)
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))

    graph, _ = graph_of(step, array(4, 4), array(dtype=jnp.int32))
    assert ops(graph, "dot_general")[0].weight == 0.5
    assert len(ops(graph, "sin")) == 1
    assert any("while loop" in note and "test_graph.py" in note for note in graph.notes)


def test_an_operation_without_a_rule_is_in_the_notes_with_its_line() -> None:
    def step(x):
        return jax.pure_callback(np.sin, x, x)

    graph, _ = graph_of(step, array(64, 64))
    assert any("pure_callback" in note and "test_graph.py" in note for note in graph.notes)


def deep(layers: int):
    def step(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = h + jnp.tanh(h @ w["up"]) @ w["down"]
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return step, [{"up": array(16, 64), "down": array(64, 16)}] * layers, array(32, 16)


def test_depth_costs_nothing_after_folding() -> None:
    found = []
    for layers in (6, 12, 24):
        step, weights, x = deep(layers)
        graph, trace = graph_of(step, weights, x)
        folded = fold(graph, trace)
        found.append(len(folded.members))
        assert sum(map(len, folded.members)) == folded.num_vertices
        for members in folded.members:
            keys = {graph.nodes[m].key for m in members if m < len(graph.nodes)}
            assert len(keys) <= 1
    assert found[0] == found[1] == found[2]


def memory_of(donate) -> tuple[float, np.ndarray]:
    def step(w, x):
        return w - x.T @ jnp.exp(x @ w)

    graph, trace = graph_of(step, array(8, 8), array(16, 8), donate_argnums=donate)
    cluster = parse_cluster("cpu:1")
    shell = build_problem(fold(graph, trace), Machine(cluster.device, cluster.mesh((1,))), {})
    model = memory_model(shell, trace)
    choice = np.zeros(shell.problem.num_nodes, np.int64)
    return model.profile(choice, shell.problem.edge_nodes), model


def test_memory_of_a_tiny_step_counted_by_hand() -> None:
    w, x, product, gradient = 8 * 8 * 4, 16 * 8 * 4, 16 * 8 * 4, 8 * 8 * 4
    kept, _ = memory_of(())
    # While x.T is multiplied: the arguments, exp(x @ w), x.T, and the product; then the new w beside the old one.
    assert kept.max() <= w + x + 3 * product + gradient
    assert kept[0] == w + x
    assert kept[-1] == w + x + w
    donated, model = memory_of(0)
    assert donated[-1] == w + x  # the new w takes the old one's place
    rows = model.rows().toarray()
    sizes = np.array([b.usage[0] if b.usage.ndim == 1 else b.usage[0, 0] for b in model.buffers])
    assert (rows @ sizes).max() == donated.max()
