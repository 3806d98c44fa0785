"""Steps made of public libraries: on 8 and on 6 devices they compute what they compute on one, over 3 steps."""

from __future__ import annotations

import contextlib
import functools
from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
import library_programs
import numpy as np
import pytest

import autoplan

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _cheap_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


def _arrays(tree: Any) -> dict[str, np.ndarray]:
    if any(
        isinstance(x, nnx.Module | nnx.Optimizer)
        for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Module))
    ):
        tree = jax.tree.map(
            lambda x: nnx.to_pure_dict(nnx.state(x)) if isinstance(x, nnx.Module) else x,
            tree,
            is_leaf=lambda x: isinstance(x, nnx.Module),
        )
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[jax.tree_util.keystr(path)] = np.array(leaf)  # a view would keep it from being donated
    return found


def _advance(case: library_programs.Case, step: Any, state: Any, i: int) -> tuple[Any, Any]:
    inputs = case.inputs(i)
    if case.stateless:
        return state, step(*(() if state is None else (state,)), *inputs)
    if case.in_place:
        return state, step(state, *inputs)
    return step(state, *inputs)


@functools.lru_cache(maxsize=2)
def plain(name: str) -> tuple[dict[str, np.ndarray], ...]:
    case = library_programs.load(name)
    compiled = nnx.jit(case.step) if case.in_place else jax.jit(case.step)
    state, found = case.make_state(), []
    for i in range(STEPS):
        state, aux = _advance(case, compiled, state, i)
        found.append(_arrays((state, aux)))
    return tuple(found)


def taken_by_jit(case: library_programs.Case, state: Any) -> list[bool]:
    """Which leaves of a donated state plain `jit` takes: not what the step does not read."""
    state = jax.tree.map(jnp.array, state)
    jax.jit(case.step, donate_argnums=0)(state, *case.inputs(0))
    return [leaf.is_deleted() for leaf in jax.tree.leaves(state)]


@contextlib.contextmanager
def _compilations():
    events: list[str] = []

    def listen(event: str, duration: float, **kwargs: Any) -> None:
        if event.startswith("/jax/core/compile/backend"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 6])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in library_programs.CASES])
def test_same_as_plain(name: str, count: int) -> None:
    case, expected = library_programs.load(name), plain(name)
    donate = (0,) if case.donate and not case.stateless else ()
    step = autoplan.parallelize(case.step, cluster=f"cpu:{count}", donate_argnums=donate)
    state = (
        jax.tree.map(lambda x: jnp.array(x) if isinstance(x, jax.Array) else x, case.make_state())
        if not case.in_place
        else case.make_state()
    )
    taken = taken_by_jit(case, state) if donate else []
    for i in range(STEPS):
        inputs_before = jax.tree.leaves(state)
        with _compilations() as events, warnings.catch_warnings():
            warnings.filterwarnings("error", "Some donated buffers were not usable")
            state, aux = _advance(case, step, state, i)
        got = _arrays((state, aux))
        assert got.keys() == expected[i].keys()
        for path, want in expected[i].items():
            assert got[path].dtype == want.dtype and got[path].shape == want.shape, (i, path)
            if want.dtype.kind in "fc":
                scale = 1e-3 + np.nanmax(np.abs(want), initial=0, where=np.isfinite(want))
                np.testing.assert_allclose(
                    got[path], want, rtol=case.tolerance, atol=case.tolerance * scale, err_msg=f"step {i}, {path}"
                )
            else:
                np.testing.assert_array_equal(got[path], want, err_msg=f"step {i}, {path}")
        if i > 0:
            assert not events, f"step {i} compiled again"
        if i > 0 and donate:
            kept = [x.shape for x, wanted in zip(inputs_before, taken, strict=True) if wanted and not x.is_deleted()]
            assert not kept, f"step {i} did not take the donated arrays {kept}"


def test_all_libraries_are_there() -> None:
    if library_programs.MISSING:
        pytest.skip(f"not installed: {', '.join(library_programs.MISSING)}")
    assert len(library_programs.CASES) >= 50
