"""The parallel step computes what the plain step computes: aux, every leaf of the new state, random draws,
over 3 steps.

On 8 devices each program runs with every layout; on 6, 3 and 1 most run with the one that the planner
chooses. Along the way: the step is traced and compiled once, and donated buffers are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
from typing import Any
import warnings

import jax
import numpy as np
import pytest

import autoplan
from autoplan import planner
from autoplan.search import Problem, Solution, solve
import programs
from programs.base import leaves

STEPS = 3
LAYOUTS = ("auto", "data", "fsdp", "tensor")
# Sums in another order, and three updates that carry the difference on. Weights and losses are of the order
# of 1.
RTOL, ATOL = 1e-3, 2e-5
SHORT = ("mlp", "mlp_odd")
ENDTOEND = ("transformer", "linen", "nnx_in_place", "resnet_batch", "moe")
ELSEWHERE = (*SHORT, "transformer", "transformer_scan", "nnx_in_place", "resnet_batch", "moe", "vit")
# The planner chooses the mesh for these; the others get one, since searching all shapes takes longer than
# running one.
FREE_MESH = (*SHORT, "transformer", "nnx_in_place", "resnet_batch", "moe")
MESHES = {8: (2, 4), 6: (2, 3)}


def _case(name: str, layout: str, count: int) -> Any:
    marks = [pytest.mark.xdist_group(name)]  # one worker runs the plain step once for all of them
    if name not in SHORT:
        marks.append(pytest.mark.slow)
    if name in SHORT or (name in ENDTOEND and (layout, count) == ("auto", 8)):
        marks.append(pytest.mark.endtoend)
    free = layout != "auto" or count not in MESHES or name in SHORT or (name in FREE_MESH and count == 8)
    mesh = None if free else MESHES[count]
    return pytest.param(name, layout, count, mesh, id=f"{name}-{layout}-{count}", marks=marks)


CASES = [_case(name, layout, 8) for name in programs.NAMES for layout in LAYOUTS]
CASES += [_case(name, "auto", count) for name in ELSEWHERE for count in (6, 3, 1)]


@pytest.fixture(scope="module", autouse=True)
def _cheap_compilation() -> Iterator[None]:
    """Spend less on optimising machine code: partitioning is as always, and these programs run for
    milliseconds.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    plain_steps.cache_clear()


@functools.cache
def program(name: str) -> programs.Program:
    return programs.load(name)


@functools.cache
def _make_state(name: str) -> Callable[[jax.Array], tuple]:
    return jax.jit(program(name).make_state)


def new_state(name: str) -> tuple:
    """The program's first state, on one device."""
    return _make_state(name)(jax.random.key(0))


@functools.cache
def plain_steps(name: str) -> tuple[dict[str, np.ndarray], ...]:
    """State and aux after each step of the plain program on one device."""
    this = program(name)

    def pure(*args: Any) -> tuple[tuple, Any]:
        return this.advance(this.step, args[:-1], args[-1])

    compiled, state, found = jax.jit(pure), new_state(name), []
    for i in range(STEPS):
        state, aux = compiled(*state, this.next_batch(i))
        found.append(leaves((state, aux)))
    return tuple(found)


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], step: int) -> None:
    """Floats to tolerance, everything else exactly; no leaf more or less."""
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        assert actual[path].dtype == value.dtype and actual[path].shape == value.shape, f"step {step}, {path}"
        tolerance = {"rtol": RTOL, "atol": ATOL} if value.dtype.kind == "f" else {"rtol": 0, "atol": 0}
        np.testing.assert_allclose(actual[path], value, **tolerance, err_msg=f"step {step}, {path}")


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that fills with what jax traces, lowers and compiles meanwhile."""
    events: list[str] = []

    def listen(event: str, duration: float, **kwargs: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(("name", "layout", "count", "mesh"), CASES)
def test_same_as_plain(name: str, layout: str, count: int, mesh: tuple[int, ...] | None) -> None:
    this, expected = program(name), plain_steps(name)
    step = autoplan.parallelize(
        this.step, cluster=f"cpu:{count}", layout=layout, mesh_shape=mesh, donate_argnums=this.donated
    )
    state = new_state(name)
    for i in range(STEPS):
        batch, before = this.next_batch(i), jax.tree.leaves(state)
        with compilations() as events, warnings.catch_warnings():
            warnings.filterwarnings("error", "Some donated buffers were not usable")
            state, aux = this.advance(step, state, batch)
        assert_same(leaves((state, aux)), expected[i], i)
        if i > 0:
            assert not events, f"step {i} traced or compiled again"
            # Placeholders of one element, which Adafactor never reads, are not inputs of the compiled program.
            kept = [leaf.shape for leaf in before
                    if isinstance(leaf, jax.Array) and leaf.size > 1 and not leaf.is_deleted()]
            assert not kept, f"step {i} did not take the donated arrays {kept}"
        for leaf in jax.tree.leaves(state):
            assert len(leaf.sharding.device_set) == count


def _with_random_costs(problem: Problem, seed: int) -> Problem:
    """The same choices and the same forbidden pairs, at costs that mean nothing."""
    rng = np.random.default_rng(seed)

    def shuffled(costs: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(costs), rng.random(costs.shape), np.inf)

    return dataclasses.replace(
        problem,
        node_costs=tuple(map(shuffled, problem.node_costs)),
        edge_costs=tuple(0.1 * shuffled(cost) for cost in problem.edge_costs),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("mlp", (2, 4)), ("mlp", (2, 2, 2)), ("transformer_scan", (2, 2, 2)), ("resnet_group", (2, 4))],
)
def test_any_plan_computes_the_same(name: str, mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also plans that no cost model would choose: layouts drawn at random, resharded at every other use."""

    def drawn(problem: Problem, **kwargs: Any) -> Solution:
        found = solve(_with_random_costs(problem, seed=len(mesh)), prove=False)
        return dataclasses.replace(found, cost=problem.evaluate(found.choice).cost)

    monkeypatch.setattr(planner, "solve", drawn)
    this, state, batch = program(name), new_state(name), program(name).next_batch(0)
    step = autoplan.parallelize(this.step, cluster="cpu:8", mesh_shape=mesh, memory="1TiB")
    state, aux = this.advance(step, state, batch)
    assert_same(leaves((state, aux)), plain_steps(name)[0], 0)


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_a_plan_for_a_tpu_computes_the_same_here(layout: str) -> None:
    """There, weights are gathered as bfloat16, by narrow nodes that the program does not have."""
    this, state, batch = program("mlp"), new_state("mlp"), program("mlp").next_batch(0)
    with jax.default_matmul_precision("default"):
        plan = autoplan.parallelize(this.step, cluster="v5e:2x4", layout=layout).plan(*state, batch)
        step = autoplan.parallelize(this.step, cluster="cpu:8", plan=plan)
        state, aux = this.advance(step, state, batch)
    assert any(c.where == "operand" for c in plan.constraints)
    assert_same(leaves((state, aux)), plain_steps("mlp")[0], 0)


@pytest.mark.endtoend
@pytest.mark.parametrize("name", ["transformer", "linen", "nnx_returned"])
def test_state_is_born_as_the_plain_one(name: str) -> None:
    this, key = program(name), jax.random.key(0)
    step = autoplan.parallelize(this.step, cluster="cpu:8", layout="fsdp")
    plan = step.plan(*jax.eval_shape(this.make_state, key), this.next_batch(0))
    state = step.init(this.make_state, key)
    assert_same(leaves(state), leaves(new_state(name)), 0)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim >= 2)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim >= 2)
    assert held < whole / 4, f"a device holds {held} of {whole} bytes"
    assert plan.layout == "fsdp"
