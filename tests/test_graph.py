"""The graph of a step: regions and their weights, folding, liveness."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from autoplan import compat
from autoplan.cost_models import parse_cluster
from autoplan.folding import fold
from autoplan.fusion import fusions_of, last_reads
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


def test_loops_within_loops_multiply() -> None:
    def step(x, weights):
        def outer(h, ws):
            return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0], None

        return jax.lax.scan(outer, x, weights)[0]

    graph, _ = graph_of(step, array(4, 8), array(3, 5, 8, 8))
    assert ops(graph, "dot_general")[0].weight == 15
    slices = [node for node in graph.nodes if node.kind == "slice"]
    assert sorted(node.weight for node in slices) == [1, 3]


def test_a_carry_has_one_layout_before_in_and_after_its_loop() -> None:
    def step(x, w):
        x = jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=3)[0]
        return jax.lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ w, x)

    graph, trace = graph_of(step, array(16, 16), array(16, 16))
    cluster = parse_cluster("cpu:8")
    shell = build_problem(fold(graph, trace), Machine(cluster.device, cluster.mesh((2, 4))), {})
    carries = [node for node in graph.nodes if node.kind == "carry"]
    assert len(carries) == 2
    for node in carries:
        options = shell.strategies[shell.folded.class_of[node.index]]
        initial, around = options.operands
        assert len(options) == 3**2  # each axis splits dim 0, dim 1 or none
        assert (initial == around).all() and (initial == options.results[0]).all()
    # What follows the loop reads the carry itself: there is no layout in which only the loop has it.
    second = next(node for node in carries if node.position > carries[0].position)
    assert graph.values[graph.uses[second.operands[0]].value].producer == carries[0].index


def test_the_branches_of_a_condition_join_in_one_layout() -> None:
    def step(n, x):
        return jax.lax.switch(n, [lambda x: x @ x, lambda x: x, jnp.zeros_like], x)

    graph, _ = graph_of(step, array(dtype=jnp.int32), array(8, 8))
    (join,) = (node for node in graph.nodes if node.kind == "join")
    assert {graph.uses[u].weight for u in join.operands} == {1 / 3}
    dims = graph.rules[join.rule]
    assert all(operand == dims.results[0] for operand in dims.operands)


def test_every_use_is_at_the_address_where_the_program_reads_it() -> None:
    def step(x, weights):
        def body(h, w):
            h, total = h
            return (jax.jit(jnp.tanh)(h @ w), total + h.sum()), (h.mean(0), h)

        return jax.lax.scan(jax.checkpoint(body), (x, 0.0), weights)

    graph, trace = graph_of(step, array(4, 8), array(5, 8, 8))
    for use in graph.uses:
        where, site, index = use.address
        jaxpr, eqn = compat.open_jaxpr(trace.jaxpr), None
        for depth, number in enumerate(site):
            if depth % 2 == 0:
                eqn = jaxpr.eqns[number]
            else:
                jaxpr, eqn = compat.subjaxprs(eqn)[number].jaxpr, None
        found = (eqn.invars if where == "operand" else jaxpr.outvars)[index]
        assert found.aval.shape == graph.values[use.value].shape, use


def test_narrow_nodes_come_before_what_reads_them_and_are_shared() -> None:
    def step(x, w):
        return jnp.tanh(x @ w) @ w.T + x @ w, w + 1

    with jax.default_matmul_precision("default"):
        trace = trace_step(step, (array(8, 8), array(8, 8)), {})
    graph = build_graph(trace, narrow=True)
    narrow = [node for node in graph.nodes if node.kind == "narrow"]
    assert len(narrow) == 4  # of x, w, tanh and w.T; the second x @ w reads those of the first
    for node in graph.nodes:
        assert all(graph.values[graph.uses[u].value].producer < node.index for u in node.operands)
    assert not any(node.kind == "narrow" for node in build_graph(trace).nodes)


def updates_and_gradients(clip: bool, donate: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Positions of the updates of four weights, and of the dots that make their gradients."""
    def step(ws, x):
        def loss(ws):
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return (h**2).sum()

        value, grads = jax.value_and_grad(loss)(ws)
        scale = jax.lax.rsqrt(sum((g**2).sum() for g in grads)) if clip else 0.1
        return [w - scale * g for w, g in zip(ws, grads)], value

    graph, trace = graph_of(step, [array(8, 8)] * 4, array(16, 8), donate_argnums=donate)
    updates = [graph.nodes[graph.values[graph.uses[use].value].producer].position for use in graph.outputs[:4]]
    dots = [node.position for node in ops(graph, "dot_general") if graph.values[node.results[0]].shape == (8, 8)]
    assert len(dots) == 4
    return updates, dots


def test_updates_of_a_donated_state_run_as_soon_as_their_gradient_is_there() -> None:
    updates, dots = updates_and_gradients(clip=False, donate=(0,))
    assert sorted(updates)[0] < sorted(dots)[1] and sorted(updates)[1] < sorted(dots)[2]
    for clip, donate in ((True, (0,)), (False, ())):
        updates, dots = updates_and_gradients(clip, donate)
        assert min(updates) > max(dots)


def test_long_chains_and_wide_sums_are_planned_in_time() -> None:
    def step(x, leaves):
        y = x
        for _ in range(1500):
            y = y * y + y  # each read twice: without a cap, counts of readers double at every step
        total = leaves[0]
        for leaf in leaves[1:]:
            total = total + leaf
        return x + 1, y.sum() + total

    graph, _ = graph_of(step, array(8), [array()] * 2000, donate_argnums=(0,))
    found = fusions_of(graph, "tpu")
    assert max(map(len, found.sources)) <= 3 * 64
    assert len(last_reads(graph, found.written)) == len(graph.values)
