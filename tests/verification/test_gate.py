"""Planning until the compiled program fits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import autoplan
from autoplan import MemoryLimitError
from autoplan.verification import plan_that_fits


def step(params, batch):
    grads = jax.grad(lambda p: jnp.mean(jnp.tanh(batch @ p["w"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


ARGUMENTS = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, jax.ShapeDtypeStruct((64, 64), jnp.float32)


@pytest.fixture(scope="module")
def plan():
    return autoplan.parallelize(step, cluster="cpu:4").plan(*ARGUMENTS)


def gate(plan, limit, takes):
    """The gate over plans that predict all of their limit, whose programs take `takes` of what is predicted."""
    asked = []

    def replan(*, memory_bytes=None):
        asked.append(limit if memory_bytes is None else memory_bytes)
        if asked[-1] < 100:
            raise MemoryLimitError("nothing that small", smallest_bytes=100)
        return replace(plan, memory_limit_bytes=asked[-1], peak_memory_bytes=asked[-1])

    def verify(made):
        peak = takes * made.peak_memory_bytes
        return SimpleNamespace(peak_memory_bytes=peak, fits=peak <= made.memory_limit_bytes, memory_error=0.0,
                               unplanned_share=0.0)  # fmt: skip

    return plan_that_fits(replan, verify, plan._trace), asked


def test_a_plan_that_fits_is_taken(plan):
    made, asked = gate(plan, 1000.0, 1.0)
    assert asked == [1000.0] and made.peak_memory_bytes == 1000.0
    assert "compiled" in made.notes[-1]


def test_the_search_goes_on_with_what_was_learned(plan):
    made, asked = gate(plan, 1000.0, 1.25)
    assert len(asked) == 2 and 1.25 * asked[1] <= 1000.0
    assert made.memory_limit_bytes == 1000.0  # the user's, not the one that was planned with
    assert "did not fit" in made.notes[-1]


def test_what_never_fits_is_said(plan):
    with pytest.raises(MemoryLimitError, match="the smallest compiled plan takes"):
        gate(plan, 1000.0, 20.0)


@pytest.mark.endtoend
def test_plans_are_compiled_when_asked():
    made = autoplan.parallelize(step, cluster="cpu:8", verify=True).plan(*ARGUMENTS)
    assert any(note.startswith("compiled: ") for note in made.notes)
    again = autoplan.parallelize(step, cluster="cpu:8").plan(*ARGUMENTS, verify=True)
    assert again.notes == made.notes


def test_verify_is_a_yes_or_no():
    with pytest.raises(autoplan.PlanError, match="verify"):
        autoplan.parallelize(step, cluster="cpu:8", verify="yes")
