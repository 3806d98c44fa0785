"""Random programs compute on several devices what they compute on one, whatever layouts are chosen for them."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any
import zlib

import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest
import random_programs

import autoplan
from autoplan import planner
from autoplan.search import Problem, Solution, solve

# Programs per test, of which there are two. AUTOPLAN_RANDOM_PROGRAMS=20000 for a long run.
COUNT = int(os.environ.get("AUTOPLAN_RANDOM_PROGRAMS", "250"))
MESHES = ((8,), (2, 4), (2, 2, 2), (6,), (2, 3), (3,))
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}


@pytest.fixture(scope="module", autouse=True)
def _cheap_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def _drawn(problem: Problem, seed: int = 0, **kwargs: Any) -> Solution:
    """Any allowed choice: the best for costs that mean nothing."""
    drawn_by = np.concatenate([np.nan_to_num(c) for c in problem.node_costs]).tobytes()
    rng = np.random.default_rng([seed, zlib.crc32(drawn_by)])

    def shuffled(costs: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(costs), rng.random(costs.shape), np.inf)

    found = solve(
        dataclasses.replace(
            problem,
            node_costs=tuple(map(shuffled, problem.node_costs)),
            edge_costs=tuple(0.1 * shuffled(cost) for cost in problem.edge_costs),
        ),
        prove=False,
    )
    return dataclasses.replace(found, cost=problem.evaluate(found.choice).cost)


def check(program: random_programs.Program, mesh: tuple[int, ...]) -> None:
    """Runs a program on one device and on a mesh, and compares."""
    arrays = random_programs.inputs_of(program)
    expected = jax.jit(program)(*arrays)
    step = autoplan.parallelize(program, cluster=f"cpu:{np.prod(mesh)}", mesh_shape=mesh, memory="1TiB")
    try:
        computed = jax.block_until_ready(step(*arrays))
    except jax.errors.JaxRuntimeError as error:
        if "fft_thunk" in str(error):  # XLA:CPU cannot transform what was gathered along another dim than the first
            hypothesis.reject()
        raise
    for number, (got, want) in enumerate(zip(computed, expected, strict=True)):
        t = program.types[program.outputs[number]]
        assert got.dtype == want.dtype and got.shape == want.shape, number
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        if t.exact and t.dtype not in TOLERANCE:
            np.testing.assert_array_equal(got, want, err_msg=f"output {number}, {t}")
        else:
            close = TOLERANCE.get(t.dtype, 0.0)
            scale = 1 + np.nanmax(np.abs(want), initial=0, where=np.isfinite(want))
            np.testing.assert_allclose(got, want, rtol=close, atol=close * scale, err_msg=f"output {number}, {t}")


def _slice_beyond(x, i):
    return lax.dynamic_slice_in_dim(jnp.sin(x), i[0], 4, 0), lax.dynamic_slice(x, (i[1], i[2]), (3, 4))


def _update_beyond(x, i):
    return lax.dynamic_update_slice_in_dim(jnp.sin(x), x[:1], i[0], 0), lax.dynamic_update_slice(
        x, x[:2, :2], (i[1], i[2])
    )


def _update_one(x, i):
    k = jnp.arange(1)
    return lax.pad(x.at[k, k].set(2 * x[k, k]), 0.5, [(0, 0, 0), (0, 2, 0)]), x.at[i[1], i[2]].add(1.0, mode="clip")


@pytest.mark.parametrize("mesh", [(8,), (2, 4), (2, 3)])
@pytest.mark.parametrize("program", [_slice_beyond, _update_beyond, _update_one])
def test_indices_out_of_bounds_are_clamped_as_they_are_on_one_device(program, mesh, monkeypatch) -> None:
    x, i = np.arange(24 * 24, dtype=np.float32).reshape(24, 24) / 576, np.array([22, -30, 99], np.int32)
    expected = jax.jit(program)(x, i)
    for seed in range(4):
        monkeypatch.setattr(planner, "solve", functools.partial(_drawn, seed=seed))
        step = autoplan.parallelize(program, cluster=f"cpu:{np.prod(mesh)}", mesh_shape=mesh, memory="1TiB")
        for got, want in zip(step(x, i), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)


def _settings(count: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize="AUTOPLAN_RANDOM_PROGRAMS" not in os.environ,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=True,
    )


@pytest.mark.slow
@_settings(COUNT)
@hypothesis.given(random_programs.programs(), st.sampled_from(MESHES))
def test_planned_programs_compute_the_same(program, mesh) -> None:
    check(program, mesh)


@pytest.mark.slow
@_settings(COUNT)
@hypothesis.given(random_programs.programs(), st.sampled_from(MESHES))
def test_programs_compute_the_same_under_any_plan(program, mesh) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "solve", _drawn)
        check(program, mesh)
