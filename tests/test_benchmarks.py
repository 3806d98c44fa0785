"""The benchmarks' programs and criteria: a smoke, for what they say takes minutes to find out."""

from __future__ import annotations

import json
from pathlib import Path
import sys

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import fidelity
import iopddl
import solvers
import zoo
from zoo.flops import step_flops


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_step_gives_back_its_state(name):
    program = zoo.load(name, "small")
    state, batch = program.arguments()
    new, loss = jax.eval_shape(program.step, state, batch)
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert describe(new) == describe(state)
    assert loss.shape == ()


@pytest.mark.parametrize("name", zoo.NAMES)
def test_batches_divide_by_the_devices_of_every_cluster(name):
    for size, devices in (("large", 16), ("small", 8)):
        batch = jax.eval_shape(zoo.load(name, size).make_batch, jax.random.key(0))
        assert {leaf.shape[0] % devices for leaf in jax.tree.leaves(batch)} == {0}


def test_flops_count_loops_and_work_done_again():
    weights, x = jax.ShapeDtypeStruct((3, 8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")

    def step(weights, x):
        layer = lambda x, w: (jax.numpy.sin(x @ w), None)  # noqa: E731
        return jax.grad(lambda w: jax.lax.scan(jax.checkpoint(layer), x, w)[0].sum())(weights)

    assert step_flops(step, (weights, x)) == 3 * 4 * (2 * 4 * 8 * 8)  # forward, again, and two products backward


def _row(layout: str, predicted_s: float, true_s: float) -> dict:
    return {
        "program": "p", "cluster": "v5e:4x4", "layout": layout, "memory_bytes": 100.0,
        "predicted_memory_bytes": 90.0, "wire_bytes": {"all-reduce": [99.0, 100.0], "all-to-all": [0.5, 0.1]},
        "unplanned_share": 0.0, "rematerialised": 0, "predicted_step_time_s": predicted_s, "step_time_s": true_s,
        "flops": 10.0, "num_devices": 16, "step_flops": 160.0,
    }  # fmt: skip


def test_criteria_are_of_the_rows():
    rows = [_row("data", 1.0, 1.1), _row("fsdp", 2.0, 2.0), _row("tensor", 3.0, 3.3), _row("auto", 1.0, 1.2)]
    rows = [row | {"compiles_tight": row["layout"] != "tensor"} for row in rows]
    found = {c.name: c for c in fidelity.criteria([*rows, {"error": "crashed", "layout": "auto"}])}
    assert found["memory, worst error"].value == pytest.approx(0.1)
    assert found["compile into 1.15 x the predicted memory, share"].value == 0.75
    assert found["bytes by kind of collective, median error"].value == pytest.approx(0.01)  # the tiny kind is left out
    assert found["auto over the fastest classic layout, compiled, worst"].value == pytest.approx(1.2 / 1.1)
    assert "MISSED" in str(found["auto over the fastest classic layout, compiled, worst"])
    assert found["step time of the compiled program, worst rank correlation"].value > 0.9
    assert found["FLOPs of data-parallel programs, worst error"].value == 0
    assert found["step time measured, worst rank correlation"].value is None
    assert found["cases that failed"].value == 1


def test_a_case_that_fails_gives_rows_that_say_so():
    rows = fidelity.run_apart(fidelity.Case("gpt", "v5e:4x4", ("data", "auto")), limit_s=0.5)
    assert [row["layout"] for row in rows] == ["data", "auto"]
    assert all("no answer within 0.5 s" in row["error"] for row in rows)


@pytest.mark.slow
def test_a_small_program_is_planned_verified_and_measured(monkeypatch):
    monkeypatch.setattr(fidelity, "ROUNDS", (1, 1))
    (row,) = list(fidelity.run_case(fidelity.Case("mixer", "cpu:8", ("data",))))
    assert row["measured_rounds"] == 1
    assert row["measured_step_time_s"] > 0
    assert row["wire_bytes"]["all-reduce"][1] > 0
    assert fidelity.table([row]).count("\n") == 2


def test_contest_benchmark_writes_a_row_for_an_instance(tmp_path, capsys):
    instance = {
        "problem": {
            "nodes": {"costs": [[15, 55], [45, 65]], "usages": [[10, 25], [30, 10]], "intervals": [[0, 6], [2, 4]]},
            "edges": {"nodes": [[0, 1]], "costs": [[30, 40, 0, 5]]},
            "usage_limit": 36,
        }
    }
    (tmp_path / "tiny.json").write_text(json.dumps(instance))
    iopddl.main([str(tmp_path / "tiny.json"), "--json", str(tmp_path / "rows.json")])
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["cost"] == 120 == pytest.approx(row["bound"], rel=2e-6) and row["status"] == "optimal"
    assert 0 < row["seconds_to_first"] <= row["seconds"] and row["peak_rss_bytes"] > 1e6
    assert "tiny" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        iopddl.main([str(tmp_path / "missing.json")])


def test_solvers_benchmark_finds_the_same_optimum(tmp_path, capsys):
    solvers.main(["--programs", "mixer", "--json", str(tmp_path / "rows.json")])
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["same"] and row["ratio"] > 1 and row["nodes"] > 100
    assert "median ratio" in capsys.readouterr().out
