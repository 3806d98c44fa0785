"""What the planner promises: the same plan every time, never worse than a classic layout, pins kept, limits honest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

import autoplan

SHAPE = {"up": (256, 1024), "down": (1024, 256)}


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(weights, x):
    def loss(weights):
        return ((jax.nn.gelu(x @ weights["up"]) @ weights["down"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def arguments(batch: int = 64) -> tuple:
    return {name: array(*shape) for name, shape in SHAPE.items()}, array(batch, 256)


def plan_of(*args, cluster: str = "8xH100", **options) -> autoplan.Plan:
    return autoplan.parallelize(step, cluster=cluster, **options).plan(*(args or arguments()))


@pytest.mark.parametrize("cluster", ["8xH100", "v5e:2x4", "2x4xH100", "cpu:6", "cpu:1"])
def test_the_same_plan_every_time_and_never_worse_than_a_classic_one(cluster: str) -> None:
    args = arguments(48)
    plan = plan_of(*args, cluster=cluster)
    assert plan == plan_of(*args, cluster=cluster)
    assert plan.mesh.num_devices == {"cpu:6": 6, "cpu:1": 1}.get(cluster, 8)
    names = {c.name for c in plan.candidates}
    assert {"data", "fsdp", "tensor", "auto"} <= names
    for candidate in plan.candidates:
        assert not candidate.fits or plan.step_time_s <= candidate.step_time_s
    assert 0 <= plan.gap <= 0.02 and (plan.status == "OPTIMAL") == (plan.gap == 0)
    assert plan.compute_time_s + plan.communication_time_s == pytest.approx(plan.step_time_s)
    moved = sum(c.count * (c.time_s - c.hidden_s) for c in plan.collectives)
    assert moved == pytest.approx(plan.communication_time_s)


@pytest.mark.parametrize(("layout", "weights", "batch"), [
    ("data", {P(None, None)}, P("x", None)),
    ("fsdp", {P("x", None), P(None, "x")}, P("x", None)),
    ("tensor", {P("x", None), P(None, "x")}, P(None, None)),
])
def test_a_forced_layout_is_that_layout(layout: str, weights: set, batch: P) -> None:
    plan = plan_of(layout=layout)
    *specs, last = plan.in_shardings
    assert set(specs) <= weights and last == batch and plan.layout == layout


def test_pins_are_kept_and_free_dims_are_free() -> None:
    free = P.UNCONSTRAINED
    weights = {"up": P(None, "x"), "down": P(free, None)}
    plan = plan_of(mesh_shape=(8,), in_shardings=(weights, P()))
    specs = plan.partition_specs()
    assert specs["weights['up']"] == P(None, "x") and specs["x"] == P(None, None)
    assert specs["weights['down']"] in (P("x", None), P(None, None))
    assert plan.step_time_s >= plan_of(mesh_shape=(8,)).step_time_s * 0.98


@pytest.mark.parametrize("layout", ["data", "fsdp"])
def test_a_batch_that_does_not_divide_is_refused_where_it_must_be_split(layout: str) -> None:
    with pytest.raises(autoplan.PlanError) as refused:
        plan_of(*arguments(12), layout=layout)
    message = str(refused.value)
    words = ("x (float32[12, 256])", "dim 0", "axis 'x'", "12", "8", "16", "test_planner.py")
    assert all(word in message for word in words)


def test_a_batch_that_stays_whole_is_noted() -> None:
    plan = plan_of(*arguments(7))
    assert any("x is whole on every device" in note and "8" in note for note in plan.notes)
    assert {c.name for c in plan.candidates} == {"tensor", "auto"}


def test_the_smallest_memory_that_an_error_names_works_and_less_does_not() -> None:
    step_ = autoplan.parallelize(step, cluster="8xH100", mesh_shape=(8,), donate_argnums=0)
    with pytest.raises(autoplan.MemoryLimitError, match="smallest that works") as refused:
        step_.with_options(memory=1000).plan(*arguments())
    smallest = refused.value.smallest_bytes
    assert step_.with_options(memory=smallest).plan(*arguments()).peak_memory_bytes <= smallest
    with pytest.raises(autoplan.MemoryLimitError):
        step_.with_options(memory=int(smallest * 0.98)).plan(*arguments())


def test_depth_hardly_changes_what_the_planner_solves() -> None:
    def deep(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = h + jax.nn.gelu(h @ w["up"]) @ w["down"]
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    weights, x = arguments()
    plans = [autoplan.parallelize(deep, cluster="8xH100", mesh_shape=(8,)).plan([weights] * n, x) for n in (6, 12)]
    middles = [{spec for path, spec in plan.partition_specs().items() if "[3]" in path} for plan in plans]
    assert middles[0] == middles[1]


@pytest.mark.parametrize(("cluster", "precision", "size"), [
    ("v5e:2x4", "default", 2), ("v5e:2x4", "highest", 4), ("8xH100", "default", 4),
])
def test_a_tpu_gathers_in_bfloat16_what_only_its_matrix_unit_reads(cluster: str, precision: str, size: int) -> None:
    with jax.default_matmul_precision(precision):
        plan = plan_of(*arguments(4096), cluster=cluster, layout="fsdp", mesh_shape=(8,))
    gathers = [c for c in plan.collectives if c.kind == "all-gather"]
    sums = [c for c in plan.collectives if c.kind == "reduce-scatter"]
    assert gathers and {c.wire_bytes for c in gathers} == {7 / 8 * 256 * 1024 * size}
    assert {c.wire_bytes for c in sums} == {7 / 8 * 256 * 1024 * 4}


def test_classic_layouts_look_through_what_a_tpu_narrows() -> None:
    with jax.default_matmul_precision("default"):
        kinds = {layout: {c.kind for c in plan_of(*arguments(4096), cluster="v5e:2x4", layout=layout).collectives}
                 for layout in ("data", "fsdp", "tensor")}
    assert kinds["data"] == {"all-reduce"}
    assert kinds["fsdp"] == {"all-gather", "reduce-scatter", "all-reduce"}  # the last for the loss
    assert "all-gather" not in kinds["tensor"] or "reduce-scatter" in kinds["tensor"]


@pytest.mark.parametrize(("options", "words"), [
    ({"donate_argnames": "prams"}, ("`donate_argnames`", "'prams'", "weights, x")),
    ({"donate_argnums": 2}, ("`donate_argnums`", "got 2", "0 to 1")),
    ({"static_argnums": -3}, ("`static_argnums`", "got -3")),
    ({"static_argnames": ("x", "y")}, ("`static_argnames`", "'y'")),
    ({"mesh_shape": (2, 2, 2, 1)}, ("3 axes", "(2, 2, 2, 1)")),
    ({"mesh_shape": (3, 3)}, ("(3, 3)", "9 devices", "8xH100 has 8")),
    ({"budget_s": -1}, ("`budget_s`", "-1")),
])
def test_wrong_options_are_refused_by_name(options: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(autoplan.PlanError) as refused:
        plan_of(**options)
    assert all(word in str(refused.value) for word in words)
