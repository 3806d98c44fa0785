"""Plans are values: validated, hashable, kept in files that are checked and never change on their own."""

import dataclasses
import json
import math
import re
import subprocess
import sys

from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from autoplan import planfile, units
from autoplan.errors import PlanError, PlanFileError
from autoplan.plan import (
    Candidate,
    Collective,
    Constraint,
    LeafLayout,
    MeshShape,
    Plan,
    to_partition_spec,
)


def make_plan(**changes) -> Plan:
    mesh = MeshShape(("x", "y"), (4, 2))
    weight = LeafLayout("state['w']", (16, 8), "bfloat16", (("x",), ("y",)), 32, "state")
    fields = {
        "program": "train_step", "fingerprint": "f00", "cluster": "v5e:2x4", "mesh": mesh, "layout": "auto",
        "status": "FEASIBLE", "gap": math.inf, "planning_time_s": 0.1,
        "phases_s": {"trace": 0.03, "search": 0.07},
        "step_time_s": 1e-3, "compute_time_s": 7e-4, "communication_time_s": 3e-4, "peak_memory_bytes": 1 / 3,
        "memory_limit_bytes": math.inf,
        "inputs": [weight, LeafLayout("batch['ä']", (8,), "int32", (("x", "y"),), 4, "batch")],
        "outputs": [dataclasses.replace(weight, path="result[0]['w']", role="output")],
        "state_pairs": [(0, 0)],
        "collectives": [Collective("all-reduce", ("x",), 64, 24, 1e-6, "a.py:1 (f)", "dot_general -> add")],
        "candidates": [Candidate("data", mesh, math.inf, math.inf, math.inf, 1e12, False, "INFEASIBLE",
                                 "no")],
        "constraints": [Constraint((3, 0), "operand", 1, ((), ("y",)), (((), ()), (("x",), ())), True)],
        "notes": ["state['w'] is small"],
    }  # fmt: skip
    return Plan(**fields | changes)


# Values.


def test_sequences_are_frozen_and_numbers_are_python_s():
    plan = make_plan(step_time_s=np.float32(0.5), state_pairs=[[np.int64(0), 0]])
    assert plan.phases_s == (("trace", 0.03), ("search", 0.07))
    assert type(plan.step_time_s) is float and plan.step_time_s == 0.5
    assert plan.state_pairs == ((0, 0),) and type(plan.state_pairs[0][0]) is int
    assert hash(plan) == hash(make_plan(step_time_s=0.5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.program = "other"


def test_equality_ignores_how_long_planning_took():
    assert make_plan() == make_plan(planning_time_s=9, phases_s={})
    assert make_plan() != make_plan(step_time_s=9)


def test_partition_specs():
    plan = make_plan()
    assert plan.in_shardings == (P("x", "y"), P(("x", "y")))
    assert plan.out_shardings == (P("x", "y"),)
    assert plan.partition_specs() == {"state['w']": P("x", "y"), "batch['ä']": P(("x", "y"))}
    assert to_partition_spec(((), ("x",))) == P(None, "x")
    assert to_partition_spec(()) == P()


def test_mesh_shape():
    mesh = MeshShape(("x", "y"), (4, 2))
    assert (mesh.num_devices, mesh.size("y"), mesh.size(("x", "y")), mesh.size(())) == (8, 2, 8, 1)
    assert str(mesh) == "x=4, y=2"
    assert make_plan().inputs[1].shards(mesh) == 8


def test_repr_is_one_line():
    assert repr(make_plan(peak_memory_bytes=2**30)) == (
        "<Plan of train_step on v5e:2x4: auto on x=4, y=2, 1 ms, 1 GiB per device, FEASIBLE>"
    )


LEAF = LeafLayout("a", (2, 2), "int32", ((), ()), 16, "input")
CONSTRAINT = Constraint((0,), "result", 0, ((),))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MeshShape(("x",), (2, 2)), "one size per axis"),
        (lambda: MeshShape(("x", "x"), (2, 2)), "different names"),
        (lambda: MeshShape(("x",), (0,)), "at least 1"),
        (lambda: MeshShape("xy", (2, 2)), "tuple of names"),
        (lambda: dataclasses.replace(LEAF, spec=((),)), "one entry per dim"),
        (lambda: dataclasses.replace(LEAF, spec=(("x",), ("x",))), "one dim only"),
        (lambda: dataclasses.replace(LEAF, role="weight"), "role: expected one of"),
        (lambda: dataclasses.replace(LEAF, bytes_per_device=math.inf), "finite"),
        (lambda: dataclasses.replace(LEAF, shape=(2.0, 2)), "shape: expected an integer"),
        (lambda: dataclasses.replace(CONSTRAINT, where="middle"), "where: expected one of"),
        (lambda: dataclasses.replace(CONSTRAINT, way=("x",)), "way"),
        (lambda: make_plan(version=3), "version: expected 2"),
        (lambda: make_plan(step_time_s=math.nan), "step_time_s: expected a finite number"),
        (lambda: make_plan(step_time_s=-1), "at least 0"),
        (lambda: make_plan(gap="none"), "gap: expected a number"),
        (lambda: make_plan(notes=[""]), "non-empty"),
        (lambda: make_plan(mesh=(4, 2)), "mesh: expected MeshShape"),
        (lambda: make_plan(inputs=["w"]), "inputs: expected LeafLayout"),
        (lambda: make_plan(inputs=make_plan().inputs[:1] * 2), "two leaves have the path \"state['w']\""),
        (lambda: make_plan(mesh=MeshShape(("x",), (8,))), "not all in the mesh"),
        (lambda: make_plan(state_pairs=[(0, 1)]), "state_pairs"),
        (lambda: make_plan(state_pairs=[(1, 0)]), "must come out as it goes in"),
    ],
)
def test_contradictions_are_refused(make, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


# Files.


def test_round_trip_and_identical_bytes(tmp_path):
    plan, path, again = make_plan(), tmp_path / "plan.json", tmp_path / "again.json"
    plan.save(path)
    loaded = Plan.load(str(path))
    assert loaded == plan and hash(loaded) == hash(plan)
    assert loaded.phases_s == plan.phases_s and loaded.planning_time_s == plan.planning_time_s
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes() == plan.to_json().encode()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.json", "plan.json"]


def test_file_is_strict_json_with_a_record_per_line():
    text = make_plan().to_json()
    value = json.loads(text, parse_constant=pytest.fail)
    assert (value["format"], value["version"], value["gap"]) == ("autoplan-plan", 2, "Infinity")
    assert sum("state['w']" in line for line in text.splitlines()) == 2  # the input and the note


def test_saving_replaces_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        make_plan(program="other").save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_numbers_and_specs_may_be_edited_by_hand():
    text = make_plan().to_json().replace('"step_time_s": 0.001', '"step_time_s": 2')
    plan = planfile.loads(text, Plan)
    assert plan.step_time_s == 2.0 and planfile.dumps(plan) == text.replace(
        '"step_time_s": 2', '"step_time_s": 2.0'
    )


def _edited(**changes):
    return json.dumps(json.loads(make_plan().to_json()) | changes)


def _edited_leaf(drop=None, **changes):
    value = json.loads(make_plan().to_json())
    value["inputs"][0] |= changes
    value["inputs"][0].pop(drop, None)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be JSON; got 'Expecting value' at line 1, column 1: the text may be cut off there"),
        (make_plan().to_json()[:400], "the text may be cut off there"),
        ("format: autoplan-plan", "must be JSON; got 'Expecting value' at line 1, column 1"),
        ("[" * 100_000, "must be strict JSON"),
        ("[1, 2]", '"format": "autoplan-plan"; got an array of 2'),
        ('{"a": 1}', '"format": "autoplan-plan"; got an object with 1 fields'),
        (_edited(format="onnx"), 'got "onnx"'),
        (_edited(version=1), "reads plan files of version 2; got version 1"),
        (_edited(version=True), "got version true"),
        (_edited(step_time_s="fast"), 'step_time_s: must be a number; got "fast"'),
        (_edited(step_time_s=None), "step_time_s: must be a number; got null"),
        (_edited(step_time_s="Infinity"), "step_time_s: expected a finite number"),
        (_edited(program=7), "program: must be a string; got 7"),
        (_edited(notes={}), "notes: must be an array; got an object with 0 fields"),
        (_edited(extra=1), "a Plan has only the fields version, program"),
        (_edited(mesh={"axis_names": ["x"], "axis_sizes": [8.5]}),
         "mesh.axis_sizes[0]: must be a whole number"),
        (_edited(mesh={"axis_names": ["x"], "axis_sizes": [8]}), "not all in the mesh (x=8)"),
        (_edited(state_pairs=[[0]]), "state_pairs[0]: must be an array of 2; got an array of 1"),
        (_edited(phases_s=[["trace", "long"]]), "phases_s[0][1]: must be a number"),
        (_edited(candidates=[[]]), "candidates[0]: must be an object with the fields of a Candidate"),
        (_edited_leaf(drop="dtype"), "inputs[0]: the field 'dtype' of the LeafLayout is missing"),
        (_edited_leaf(spec=[["x"], ["x"]]), "inputs[0]: spec: an axis can split one dim only"),
        (_edited_leaf(spec=[["z"], []]), "uses axes ('z',)"),
        (_edited_leaf(shape=["16", 8]), 'inputs[0].shape[0]: must be a whole number; got "16"'),
        (_edited_leaf(bytes_per_device=-1),
         "inputs[0]: bytes_per_device: expected a finite number of at least 0"),
        (make_plan().to_json().replace("0.001", "NaN"), "strict JSON; got NaN is no JSON number"),
        (make_plan().to_json().replace("0.001", "1e999"),
         "step_time_s: must be within the range of a double"),
        (make_plan().to_json().replace('"cluster"', '"program"'), "'program' appears twice"),
    ],
)  # fmt: skip
def test_broken_files_are_refused_with_the_place_and_the_remedy(text, words, tmp_path):
    path = tmp_path / "my.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanFileError) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and words in message
    assert "ake the plan again, with `step.plan(...).save(path)`" in message
    assert len(message) < 800


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(PlanFileError, match="must be UTF-8"):
        Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")


def test_a_plan_of_another_program_says_what_changed():
    plan = make_plan()
    weight, batch = plan.inputs
    planfile.check_program(plan, "f00", plan.inputs)
    for fingerprint, leaves, words in [
        ("other", plan.inputs, "takes the same arguments, but its operations differ"),
        ("other", (dataclasses.replace(weight, shape=(16, 4)), batch),
         "bfloat16[16, 8] in the plan and bfloat16[16, 4]"),
        ("other", (dataclasses.replace(weight, dtype="float32"), batch), "float32[16, 8] in this program"),
        ("other", (batch, weight), "where it has the argument state['w'], this program has batch['ä']"),
        ("other", (weight,),
         "the plan has the argument batch['ä'], this program does not (2 leaves then, 1 now)"),
        ("f00", (*plan.inputs, LEAF), "this program has the argument a, the plan does not"),
    ]:  # fmt: skip
        with pytest.raises(PlanFileError) as caught:
            planfile.check_program(plan, fingerprint, leaves)
        assert words in str(caught.value) and "Plan again" in str(caught.value)


def test_loading_needs_no_devices(tmp_path):
    """A plan can be read and printed where JAX has no backend at all."""
    make_plan().save(tmp_path / "plan.json")
    code = f"from autoplan.plan import Plan; print(Plan.load({str(tmp_path / 'plan.json')!r}))"
    env = {"JAX_PLATFORMS": "none_such", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("train_step on v5e:2x4: 1 ms per step")


# Units.


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("80GiB", 80 * 2**30), ("16GB", 16 * 10**9), ("1.5 TiB", 3 * 2**39), (" 512mib ", 2**29),
        ("4096", 4096),
        ("4096B", 4096), ("2kB", 2000), (7, 7), (2.0**34, 2**34), (".5KiB", 512),
    ],
)  # fmt: skip
def test_parse_bytes(text, size_bytes):
    assert units.parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "16G", "16 gigs", "-1GiB", "0", "1e9", "4iB", True, None, math.inf, 0.2]
)
def test_parse_bytes_refuses(text):
    with pytest.raises(PlanError, match="memory size must be .*; got .*'80GiB'"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (units.format_bytes, 0, "0 B"), (units.format_bytes, 1023, "1023 B"),
        (units.format_bytes, 1536, "1.50 KiB"),
        (units.format_bytes, 16 * 2**30, "16 GiB"), (units.format_bytes, 9.77 * 2**30, "9.77 GiB"),
        (units.format_bytes, 2**30 - 1, "1.00 GiB"), (units.format_bytes, math.inf, "unknown"),
        (units.format_time, 0, "0 s"), (units.format_time, 8.5e-7, "850 ns"),
        (units.format_time, 12.4e-6, "12.4 us"),
        (units.format_time, 3.07e-3, "3.07 ms"), (units.format_time, 0.99999, "1.00 s"),
        (units.format_time, 1.5, "1.50 s"), (units.format_time, 125, "2 min 5 s"),
        (units.format_bandwidth, 450e9, "450 GB/s"), (units.format_bandwidth, 3.35e12, "3.35 TB/s"),
    ],
)  # fmt: skip
def test_units_for_people(show, value, text):
    assert show(value) == text
