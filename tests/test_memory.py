"""The memory of a step over program order, against counts by hand and against brute force over positions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoplan.cost_models import parse_cluster
from autoplan.folding import fold
from autoplan.graph import build_graph
from autoplan.layouts import WHOLE
from autoplan.memory import MemoryModel, memory_model
from autoplan.problem import ClassProblem, build_problem
from autoplan.reshard import Machine
from autoplan.trace import trace_step

KIB = 1024


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SQUARE = array(16, 16)  # 1 KiB


def model_of(fun: Callable, *args, devices: int = 1, **options) -> tuple[MemoryModel, ClassProblem]:
    trace = trace_step(fun, args, {}, **options)
    cluster = parse_cluster(f"cpu:{devices}")
    machine = Machine(cluster.device, cluster.mesh((devices,)))
    shell = build_problem(fold(build_graph(trace), trace), machine, {})
    return memory_model(shell, trace), shell


def whole(shell: ClassProblem) -> np.ndarray:
    """The choice that splits nothing."""
    choice = np.zeros(shell.problem.num_nodes, np.int64)
    for c, options in enumerate(shell.strategies):
        plain = np.ones(len(options), bool)
        for codes in (*options.operands, *options.results):
            plain &= (codes == WHOLE).all(axis=1)
        choice[c] = int(np.flatnonzero(plain)[0])
    return choice


def kib(model: MemoryModel, shell: ClassProblem, choice: np.ndarray | None = None) -> np.ndarray:
    choice = whole(shell) if choice is None else choice
    return model.profile(choice, shell.problem.edge_nodes) / KIB


def chain(a, b):
    c = a @ b
    d = c @ b
    return d @ b


def test_a_chain_of_products_holds_two_of_them_at_a_time() -> None:
    model, shell = model_of(chain, SQUARE, SQUARE)
    # a and b throughout; then c; c and d; d and the result; the result.
    assert kib(model, shell).tolist() == [2, 3, 4, 4, 3]


def test_a_value_that_is_read_late_is_held_till_then() -> None:
    def late(a, b):
        c = a @ b
        d = c @ b
        return (d @ b) @ c

    model, shell = model_of(late, SQUARE, SQUARE)
    assert kib(model, shell).tolist() == [2, 3, 4, 5, 5, 3]


def test_elementwise_work_between_products_takes_nothing() -> None:
    def long(a, b):
        return jnp.sin(jnp.exp(a @ b) + 1.0) @ b

    def short(a, b):
        return jnp.exp(a @ b) @ b

    peaks = [kib(*model_of(fun, SQUARE, SQUARE)).max() for fun in (long, short)]
    # a, b, the first product, what the second reads, and its result at most; no more for more steps between.
    assert peaks[0] == peaks[1] <= 5
    model, _ = model_of(long, SQUARE, SQUARE)
    assert {"exp", "add"}.isdisjoint(model.labels) and "sin" in model.labels


@pytest.mark.parametrize(("donate", "last", "peak"), [((), 3, 4), (0, 2, 3)])
def test_a_donated_state_and_its_new_value_are_one_buffer(donate, last: int, peak: int) -> None:
    def step(w, x):
        return w - (x @ w) @ w

    model, shell = model_of(step, SQUARE, SQUARE, donate_argnums=donate)
    found = kib(model, shell)
    assert found[0] == 2 and found[-1] == last
    assert found.max() >= peak  # the update is held beside what is not donated


def test_donation_never_costs_memory() -> None:
    def step(state, x):
        grads = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(state["w"])
        momentum = 0.9 * state["m"] + grads
        return {"w": state["w"] - momentum, "m": momentum}

    state = {"w": SQUARE, "m": SQUARE}
    kept, given = (kib(*model_of(step, state, SQUARE, donate_argnums=donate)) for donate in ((), 0))
    assert given.max() <= kept.max() and given[-1] == kept[-1] - 2


def test_what_a_scan_reads_from_outside_is_held_through_its_body() -> None:
    def step(x, w):
        outside = x @ w
        # Read first in the body, which then goes on: the next iteration reads it again.
        carried, _ = jax.lax.scan(lambda h, _: (((h @ outside) @ w) @ w, None), x, None, length=3)
        return carried

    model, shell = model_of(step, SQUARE, SQUARE)
    graph = shell.folded.graph
    made_of = {value.index: graph.nodes[value.producer] for value in graph.values}
    first, *_, last = [node for node in graph.nodes if node.kind == "op" and node.region]
    makers = [made_of[graph.uses[u].value] for u in first.operands]
    (maker,) = [node for node in makers if node.kind == "op"]
    # The carry starts at the same position.
    alive = [stop for start, stop, b in zip(model.start, model.stop, model.interval_buffer)
             if start == maker.position and model.labels[b] == maker.name]
    assert last.position > first.position and max(alive) > last.position
    # x, w; `outside`; what the last product reads and gives
    assert kib(model, shell)[last.position] >= 2 + 1 + 2


def test_rows_for_the_search_contain_the_peak_of_any_choice() -> None:
    def step(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
            return (h**2).sum()

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    model, shell = model_of(step, [array(32, 32)] * 3, array(64, 32), devices=8)
    edge_nodes, rows = shell.problem.edge_nodes, model.rows().toarray()
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = np.array([rng.integers(len(options)) for options in shell.strategies])
        sizes, profile = model.sizes(choice, edge_nodes), model.profile(choice, edge_nodes)
        assert (rows @ sizes).max() == pytest.approx(profile.max())
        for position in range(model.num_positions):
            assert model.at(position) @ sizes == pytest.approx(profile[position])
    assert len(rows) < model.num_positions


def test_a_split_value_takes_its_share() -> None:
    model, shell = model_of(chain, SQUARE, SQUARE, devices=8)
    for buffer in model.buffers:
        if buffer.edge is None:
            assert buffer.usage.max() == KIB and buffer.usage.min() == KIB / 8
    assert kib(model, shell).max() == 4  # whole, it is as on one device
