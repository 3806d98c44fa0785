"""The next plan, where the compiler refuses the program of the best one."""

from __future__ import annotations

from dataclasses import replace
import math

import jax
from jax.experimental.custom_partitioning import custom_partitioning
import jax.numpy as jnp
import numpy as np
import pytest

import autoplan
from autoplan import CompilerError, PlanError
from autoplan.fallback import LESS, OTHERS, first_that_compiles, source_lines
from autoplan.plan import MeshShape


@custom_partitioning
def unsplittable(x):
    return jnp.sin(x)


def partition(mesh, args, result):
    if any(entry is not None for entry in args[0].sharding.spec):
        raise ValueError("this operation cannot be split")
    return mesh, jnp.sin, result.sharding, (args[0].sharding,)


# The rule promises what `partition` then refuses.
unsplittable.def_partition(partition=partition, infer_sharding_from_operands=lambda mesh, args, result:
                           args[0].sharding, sharding_rule="i j -> i j")  # fmt: skip


def refused(w, x):
    h = jnp.tanh(x @ w)
    return (unsplittable(h) ** 2).mean()


W, X = np.linspace(-1, 1, 1024 * 1024, dtype=np.float32).reshape(1024, 1024), np.ones((512, 1024), np.float32)


@pytest.fixture(scope="module")
def plan():
    return autoplan.parallelize(refused, cluster="cpu:8").plan(W, X)


@pytest.mark.parametrize("layout", ["auto", "data"])
def test_operations_of_the_line_that_the_compiler_names_are_left_whole(layout):
    step = autoplan.parallelize(refused, cluster="cpu:8", layout=layout)
    first = step.plan(W, X)
    with pytest.warns(UserWarning, match="the compiler refused 1 plan before this one: .*cannot be split"):
        got = step(W, X)
    np.testing.assert_allclose(got, jax.jit(refused)(W, X), rtol=1e-6)
    then = step.plan(W, X)
    assert then != first and "cannot be split" in then.notes[-1]
    assert any(any(leaf.spec) for leaf in then.inputs), "the other lines stay split"
    step(W, X)  # no warning: the suite makes errors of them


def test_a_given_plan_is_not_replaced(plan):
    with pytest.raises(CompilerError, match="must compile; got ValueError: this operation cannot be split"):
        autoplan.parallelize(refused, cluster="cpu:8", plan=plan)(W, X)


def test_verifying_goes_on_to_the_next_plan(plan):
    made = autoplan.parallelize(refused, cluster="cpu:8", verify=True).plan(W, X)
    assert made != plan
    assert any("cannot be split" in note for note in made.notes)
    assert made.verify().memory_error < math.inf


def walk(plan, says):
    """What is asked of the planner while the compiler says what `says` lists; every plan is a new one."""
    asked, messages = [], iter(says)

    def replan(**wishes):
        asked.append(wishes)
        return replace(plan, peak_memory_bytes=wishes["memory_bytes"] or plan.peak_memory_bytes,
                       mesh=MeshShape((f"x{len(asked)}",), (8,)), inputs=(), outputs=(), state_pairs=(),
                       constraints=(), collectives=())  # fmt: skip

    def compiled(made):
        if (said := next(messages, None)) is not None:
            raise CompilerError(said)
        return made.mesh

    return asked, lambda: first_that_compiles(plan, compiled, replan, plan._trace)


def test_what_runs_out_of_memory_is_planned_with_less(plan):
    asked, run = walk(plan, ["RESOURCE_EXHAUSTED: used 20G of 16G"] * 2)
    made, _ = run()
    assert [wish["memory_bytes"] for wish in asked] == pytest.approx(
        [LESS * plan.peak_memory_bytes, LESS**2 * plan.peak_memory_bytes])  # fmt: skip
    assert "refused 2 plans" in made.notes[-1] and "used 20G of 16G" in made.notes[-1]


def test_candidates_are_next_where_nothing_is_named(plan):
    asked, run = walk(plan, ["INTERNAL: of no line"] * 2)
    run()
    times = [wish["like"].step_time_s for wish in asked]
    assert len(times) == 2 and times == sorted(times)


def test_the_same_line_is_left_whole_once(plan):
    line = next(line for line in source_lines(plan._trace) if "test_fallback" in line)
    asked, run = walk(plan, [f"INTERNAL: bad\n\n  {line}:7 [refused]\n"] * 2)
    run()
    assert [wish["like"] is None for wish in asked] == [True, False]
    assert all(wish["whole"] == {line} for wish in asked)


def test_it_ends(plan):
    asked, run = walk(plan, [f"INTERNAL: {i}" for i in range(100)])
    with pytest.raises(CompilerError, match="INTERNAL: 0"):
        run()
    assert len(asked) <= OTHERS


def test_where_nothing_else_can_be_planned_the_first_refusal_is_told(plan):
    def replan(**wishes):
        raise PlanError("nothing")

    def compiled(made):
        raise CompilerError("INTERNAL: no")

    with pytest.raises(CompilerError, match="INTERNAL: no"):
        first_that_compiles(plan, compiled, replan, plan._trace)
