"""Plans against what the compiler makes of them."""

from __future__ import annotations

from dataclasses import replace
import importlib.util
import json
import math
import pickle

import jax
import jax.numpy as jnp
import pytest

import autoplan
from autoplan.cost_models import parse_cluster
from autoplan.executable import compiler_options
from autoplan.plan import Collective
from autoplan.verification import CompiledCollective
from autoplan.verification.result import unplanned


def mlp(params, batch):
    def loss(params):
        hidden = jnp.tanh(batch @ params["up"])
        return jnp.mean((hidden @ params["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


PARAMS = {"up": shape(64, 256), "down": shape(256, 64)}
BATCH = shape(128, 64)


def plan_for(cluster, **options):
    return autoplan.parallelize(mlp, cluster=cluster, donate_argnums=0, **options).plan(PARAMS, BATCH)


@pytest.mark.endtoend
def test_data_parallel_gradients_are_reduced_as_planned():
    verification = plan_for("cpu:8", layout="data", mesh_shape=(8,)).verify()
    gradients = 4 * (64 * 256 + 256 * 64)
    planned, compiled = verification.wire_bytes_by_kind["all-reduce"]
    assert planned == pytest.approx(2 * 7 / 8 * gradients, rel=1e-3)
    assert compiled == pytest.approx(planned, rel=1e-3)
    assert verification.ok and verification.unplanned_share < 1e-3
    assert verification.flops == 5 * 2 * 128 * 64 * 256 / 8  # two products forward, three backward
    assert any(c.source.startswith(__file__) for c in verification.collectives)
    assert verification.step_time_s is None


def test_fsdp_gathers_weights_as_planned():
    verification = plan_for("cpu:8", layout="fsdp", mesh_shape=(8,)).verify()
    planned, compiled = verification.wire_bytes_by_kind["all-gather"]
    assert compiled == pytest.approx(planned, rel=1e-3) and planned > 0
    assert verification.ok


def test_the_report_and_the_json_say_the_same():
    verification = plan_for("cpu:8", layout="data", mesh_shape=(8,)).verify()
    text, values = str(verification), json.loads(verification.to_json())
    assert text.startswith("mlp on cpu:8, compiled in ") and "fits, and communicates as planned" in text
    assert values["ok"] is True and values["peak_memory_bytes"] == verification.peak_memory_bytes


def test_a_plan_from_a_file_says_how_to_verify_it(tmp_path):
    plan = plan_for("cpu:8", layout="data")
    plan.save(tmp_path / "plan.json")
    loaded = autoplan.Plan.load(tmp_path / "plan.json")
    with pytest.raises(autoplan.PlanError, match=r"use_plan\(plan\)\.plan\(\.\.\.\)\.verify\(\)"):
        loaded.verify()
    with_program = autoplan.parallelize(mlp, cluster="cpu:8", donate_argnums=0).use_plan(loaded).plan(PARAMS, BATCH)
    assert with_program == plan and with_program.verify().fits


def test_a_plan_is_pickled_without_its_program():
    plan = plan_for("cpu:8", layout="data")
    assert pickle.loads(pickle.dumps(plan)) == plan


# What is set off against what.


def planned(kind, axes, wire_bytes, count=1.0):
    return Collective(kind, axes, wire_bytes, count, 0.0)


def compiled(kind, axes, wire_bytes, count=1.0):
    return CompiledCollective(kind, axes, 4, 0.0, wire_bytes, count, "train.py:1 (step)", "dot_general")


def test_what_the_plan_has_is_planned():
    assert unplanned((planned("all-reduce", ("x",), 10, 4),), (compiled("all-reduce", ("x",), 40),), "tpu") == ()


def test_another_axis_is_unplanned():
    (found,) = unplanned((planned("all-reduce", ("x",), 10),), (compiled("all-reduce", ("y",), 10),), "tpu")
    assert (found.excess_bytes, found.share, found.source) == (10, 1, "train.py:1 (step)")


def test_bytes_beyond_the_plan_are_unplanned():
    (found,) = unplanned((planned("all-gather", ("x",), 10),), (compiled("all-gather", ("x",), 16),), "tpu")
    assert found.excess_bytes == 6


def test_a_gather_over_two_axes_is_planned_as_two():
    plan = (planned("all-gather", ("x",), 10), planned("all-gather", ("y",), 5))
    assert unplanned(plan, (compiled("all-gather", ("x", "y"), 15),), "tpu") == ()


def test_an_all_reduce_for_a_reduce_scatter_is_an_excess_but_on_cpu():
    plan, have = (planned("reduce-scatter", ("x",), 10),), (compiled("all-reduce", ("x",), 20),)
    assert unplanned(plan, have, "cpu") == ()
    assert math.isclose(unplanned(plan, have, "tpu")[0].excess_bytes, 10)


# For devices that are not there.


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


@pytest.mark.slow
@needs("flatbuffers")
def test_more_cpu_devices_than_there_are_in_a_child():
    verification = plan_for("cpu:16", layout="data", mesh_shape=(16,)).verify()
    planned_bytes, compiled_bytes = verification.wire_bytes_by_kind["all-reduce"]
    assert compiled_bytes == pytest.approx(planned_bytes, rel=1e-3) and verification.ok


@pytest.mark.slow
def test_the_tpu_compiler_is_told_of_a_limit_below_the_devices_own():
    device = parse_cluster("v5e:4x4").device
    plan = plan_for("v5e:4x4", layout="data")
    assert compiler_options(plan, device) == {}
    plan = plan_for("v5e:4x4", layout="data", memory="3GiB")
    assert compiler_options(plan, device) == {"xla_tpu_max_hbm_size_mib": "3072"}
    assert compiler_options(plan, parse_cluster("8xH100").device) == {}


@pytest.mark.slow
@needs("libtpu", "flatbuffers")
def test_a_program_that_does_not_fit_is_refused_by_the_tpu_compiler():
    step = autoplan.parallelize(mlp, cluster="v5e:4x4", layout="data")
    plan = step.plan({"up": shape(1024, 4096), "down": shape(4096, 1024)}, shape(128, 1024))
    with pytest.raises(autoplan.CompilerError, match="must fit the memory") as refusal:
        replace(plan, memory_limit_bytes=plan.peak_memory_bytes / 4).with_trace(plan._trace).verify()
    assert refusal.value.out_of_memory


@needs("libtpu", "flatbuffers")
def test_a_tpu_slice_without_a_tpu():
    verification = plan_for("v5e:4x4", layout="data", mesh_shape=(16,)).verify()
    planned_bytes, compiled_bytes = verification.wire_bytes_by_kind["all-reduce"]
    assert compiled_bytes == pytest.approx(planned_bytes, rel=0.02)
    assert verification.step_time_s > 0 and 0 < verification.peak_memory_bytes < verification.memory_limit_bytes
    assert any(c.source.startswith(__file__) for c in verification.collectives)
