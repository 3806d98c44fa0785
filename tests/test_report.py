"""The report says what was chosen, what it costs and why, with the plan's numbers, on about one screen."""

import dataclasses
import math
import os
import subprocess
import sys

import pytest

from autoplan import explain, planfile, report
from autoplan.plan import Candidate, Collective, Constraint, LeafLayout, MeshShape, Plan

GIB = 2**30
LAYERS = 24
MESH, FLAT, SQUARE = MeshShape(("x", "y"), (8, 2)), MeshShape(("x",), (16,)), MeshShape(("x", "y"), (4, 4))


def leaf(path, shape, spec, role="state", mesh=MESH, dtype="float32"):
    whole = LeafLayout(path, shape, dtype, spec, 0, role)
    return dataclasses.replace(whole, bytes_per_device=4 * math.prod(shape) / whole.shards(mesh))


def tensors(root):
    yield leaf(f"{root}['embed']", (50304, 2048), (("y",), ("x",)))
    for i in range(LAYERS):
        yield leaf(f"{root}['block_{i}']['w1']", (2048, 8192), (("x",), ("y",)))
        yield leaf(f"{root}['block_{i}']['w2']", (8192, 2048), (("y",), ("x",)))
        yield leaf(f"{root}['block_{i}']['scale']", (2048,), ((),))


def collectives():
    for i in range(LAYERS):
        name = f"state.params['block_{i}']['w1']"
        yield Collective("all-gather", ("x",), 9 * 2**20, 2, 230e-6, "/home/ann/gpt.py:58 (mlp)", name)
        yield Collective(
            "all-reduce", ("y",), 2**27, 1, 1.2e-3, "/home/ann/gpt.py:60 (mlp)", "dot_general -> add"
        )
    yield Collective("all-reduce", ("x", "y"), 4, 1, 5e-6, "/home/ann/train.py:8 (train_step)", "reduce_sum")


CANDIDATES = (
    Candidate("auto", MESH, 0.412, 0.31, 0.102, 9.77 * GIB, True, "OPTIMAL"),
    Candidate("auto", SQUARE, 0.6, math.inf, math.inf, math.inf, True, "CUTOFF"),
    Candidate("data", FLAT, 0.36, 0.31, 0.05, 21 * GIB, False, "FEASIBLE"),
    Candidate("fsdp", FLAT, 0.5356, 0.31, 0.2256, 9.9 * GIB, True, "FEASIBLE"),
    Candidate("tensor", FLAT, 2 * 0.412, 0.43, 0.394, 6.4 * GIB, True, "FEASIBLE"),
    Candidate("fsdp x tensor", MESH, 0.4121, 0.31, 0.1021, 10.77 * GIB, True, "FEASIBLE"),
    Candidate(
        "tensor",
        SQUARE,
        math.inf,
        math.inf,
        math.inf,
        math.inf,
        False,
        "INFEASIBLE",
        "6 heads over 4 devices",
    ),
)


def make_plan(**changes) -> Plan:
    state = [
        *tensors("state.params"), *tensors("state.opt_state[0].mu"), *tensors("state.opt_state[0].nu"),
        leaf("state.step", (), ()),
    ]  # fmt: skip
    outputs = [dataclasses.replace(item, path=f"result[0]{item.path[5:]}", role="output") for item in state]
    fields = {
        "program": "train_step", "fingerprint": "f00", "cluster": "v5e:4x4", "mesh": MESH, "layout": "auto",
        "status": "OPTIMAL", "gap": 0, "planning_time_s": 8.31, "phases_s": {"trace": 1.2, "search": 6.5},
        "step_time_s": 0.412, "compute_time_s": 0.31, "communication_time_s": 0.102,
        "peak_memory_bytes": 9.77 * GIB, "memory_limit_bytes": 16 * GIB,
        "inputs": [*state, leaf("batch['tokens']", (256, 1024), (("x",), ()), role="batch")],
        "outputs": [*outputs, leaf("result[1]", (), (), role="output")],
        "state_pairs": [(i, i) for i in range(len(state))],
        "collectives": collectives(), "candidates": CANDIDATES,
        "notes": [f"state.params['block_{i}']['scale'] is replicated: too small" for i in range(LAYERS)],
    }  # fmt: skip
    return Plan(**fields | changes)


def row(plan, *words, width=100):
    """The one line of the report that has all the words."""
    lines = [line for line in report.text(plan, width).splitlines() if all(word in line for word in words)]
    assert len(lines) == 1, (words, lines)
    return " ".join(lines[0].split())


def test_summary_has_the_numbers():
    text = str(make_plan())
    assert text.startswith(
        "train_step on v5e:4x4: 412 ms per step predicted, 9.77 GiB of 16 GiB per device\n"
    )
    words = " ".join(text.split())
    for part in [
        "Layout like fsdp x tensor: batch split over x; state.params and state.opt_state split over x and y",
        "Mesh x=8, y=2 (16 devices)",
        "Step 412 ms = 310 ms compute + 102 ms communication (25%)",
        "Memory 9.77 GiB of 16 GiB per device (61%): 9.13 GiB activations, gradients and temporaries, "
        "434 MiB state.opt_state, 217 MiB state.params",
        "Why the best classic layout, fsdp x tensor on x=8, y=2, is as fast, +1 GiB memory",
        "Search OPTIMAL (proved the best under the cost model) in 8.31 s: trace 1.20 s, search 6.50 s",
    ]:
        assert part in words


def test_candidates_say_why_they_lost():
    plan = make_plan()
    assert row(plan, "this plan") == "* auto x=8 y=2 412 ms 9.77 GiB yes this plan"
    assert row(plan, "data ") == "data x=16 360 ms 21 GiB no needs 21 GiB of 16 GiB"
    assert row(plan, "fsdp  ").endswith("1.30x slower: +124 ms communication")
    assert "2.00x slower: +292 ms communication" in row(plan, "tensor  ", "x=16")
    assert explain.verdict(plan, CANDIDATES[4]) == "2.00x slower: +292 ms communication, +120 ms compute"
    assert row(plan, "x=4 y=4", "auto").startswith("auto x=4 y=4 >= 600 ms - - cannot win, search cut short")
    assert "and 1 more that rank lower" in str(plan)
    assert explain.verdict(plan, CANDIDATES[-1]) == "6 heads over 4 devices"


def test_collectives_are_grouped_and_add_up():
    plan = make_plan()
    heading = row(plan, "Communication per step")
    assert heading.endswith("39.8 ms; each device sends 3 GiB over y, 432 MiB over x, 4 B over x and y")
    assert row(plan, "all-gather") == (
        "all-gather x 48 432 MiB 11.0 ms state.params['block_*']['w1'] gpt.py:58 (mlp)"
    )
    assert row(plan, "all-reduce").startswith("all-reduce y 24 3 GiB 28.8 ms dot_general -> add gpt.py:60")
    assert "and 1 more: 4 B, 5 us" in str(plan)


def test_tensors_show_what_is_big_and_what_is_replicated():
    plan = make_plan()
    assert row(plan, "['w1'] +mu +nu") == (
        "288 MiB 16 72 P('x', 'y') f32[2048,8192] state.params['block_*']['w1'] +mu +nu"
    )
    assert "and 75 more: 704 KiB" in str(plan)
    words = " ".join(str(plan).split())
    assert "replicated: 74 of 222 tensors, 576 KiB on every device; the largest is" in words


def test_optimizer_leaves_that_lie_differently_have_their_own_row():
    """ZeRO-1: the moments are split, the parameter is whole."""
    whole = leaf("params['w']", (64, 64), ((), ()))
    moment = leaf("opt['mu']['w']", (64, 64), (("x",), ()), mesh=FLAT)
    second = dataclasses.replace(moment, path="opt['nu']['w']")
    plan = make_plan(
        inputs=[whole, moment, second],
        state_pairs=[],
        outputs=[],
        collectives=[],
        candidates=[],
        mesh=FLAT,
        notes=[],
    )
    assert row(plan, "params['w']", "P(").startswith("16 KiB 1 1 P(None, None)")
    assert row(plan, "opt['mu']['w']", "P(").endswith("2 P('x', None) f32[64,64] opt['mu']['w'] +nu")
    assert explain.layout_in_words(plan) == "like tensor: params replicated; opt split over x"


def test_notes_are_all_there_and_folded():
    plan = make_plan(notes=[*make_plan().notes, "top_k has no rule"])
    assert row(plan, "too small") == (
        f"- state.params['block_*']['scale'] is replicated: too small ({LAYERS} times)"
    )
    assert row(plan, "top_k") == "- top_k has no rule"


def test_hundreds_of_everything_stay_on_one_screen():
    mesh = MeshShape(("x",), (2,))
    names = ["".join(chr(97 + d) for d in divmod(i, 26)) for i in range(300)]
    plan = make_plan(
        mesh=mesh, state_pairs=[], outputs=[],
        inputs=[leaf(f"state['{name}']", (64, 64), (("x",), ()), mesh=mesh) for name in names],
        collectives=[Collective("all-to-all", ("x",), 1, 1, 1, "", name) for name in names],
        candidates=[Candidate("auto", mesh, 1 + i, 1, i, GIB, True, "OPTIMAL") for i in range(300)],
        notes=[],
    )  # fmt: skip
    text = str(plan)
    assert len(text.splitlines()) < 60
    for left in ("and 296 more that rank lower", "and 288 more: 288 B, 4 min 48 s", "and 290 more: 2.27 MiB"):
        assert left in text


def test_the_text_is_the_same_everywhere(monkeypatch, tmp_path):
    plan = make_plan()
    text = str(plan)
    assert text.isascii() and max(map(len, text.splitlines())) <= 100
    assert all(line == line.rstrip() for line in text.splitlines())
    assert str(planfile.loads(plan.to_json(), Plan)) == text
    plan.save(tmp_path / "plan.json")
    code = f"from autoplan.plan import Plan; print(Plan.load({str(tmp_path / 'plan.json')!r}))"
    env = os.environ | {"COLUMNS": "40", "FORCE_COLOR": "1", "TERM": "dumb", "LINES": "5", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == text + "\n", done.stderr


@pytest.mark.parametrize("width", [40, 80, 140])
def test_other_widths(width):
    text = report.text(make_plan(), width)
    assert "".join(text.split()).count("train_steponv5e:4x4") == 1
    assert width < 80 or max(map(len, text.splitlines())) <= width


def test_names_are_no_markup():
    odd = leaf("state['[red]:smile:']", (2048, 2048), (("x",), ()))
    text = str(make_plan(inputs=[odd], state_pairs=[], outputs=[], notes=["[bold]x[/bold] at a.py:1"]))
    assert "state['[red]:smile:']" in text and "[bold]x[/bold] at a.py:1" in text


# In words.


def split_plan(batch_spec, state_spec, mesh=MESH, **changes):
    leaves = [
        leaf("w", (64, 64), state_spec, mesh=mesh),
        leaf("b", (64, 64), batch_spec, role="batch", mesh=mesh),
    ]
    fields = {"collectives": [], "candidates": [], "state_pairs": [], "outputs": [], "notes": []}
    return make_plan(inputs=leaves, mesh=mesh, **fields | changes)


@pytest.mark.parametrize(
    ("batch_spec", "state_spec", "words"),
    [
        ((("x", "y"), ()), ((), ()), "like data: state replicated; batch split over x and y"),
        ((("x", "y"), ()), (("x", "y"), ()), "like fsdp: batch and state split over x and y"),
        (((), ()), (("x",), ("y",)), "like tensor: batch replicated; state split over x and y"),
        ((("x",), ()), (("y",), ()), "like data x tensor: batch split over x; state split over y"),
        ((("x",), ()), ((), ()),
         "none of the classic ones: batch split over x; state replicated; nothing split over y"),
    ],
)  # fmt: skip
def test_layout_in_words(batch_spec, state_spec, words):
    got = explain.layout_in_words(split_plan(batch_spec, state_spec))
    assert sorted(got.replace(": ", "; ").split("; ")) == sorted(words.replace(": ", "; ").split("; "))


def test_layout_in_words_of_inner_axes_and_parts():
    plan = split_plan((("x",), ()), ((), ()), constraints=[Constraint((0,), "result", 0, ((), ("y",)))])
    assert explain.layout_in_words(plan).endswith("only values inside the step split over y")
    mixed = dataclasses.replace(plan, inputs=[*plan.inputs, leaf("c", (64, 192), (("x",), ()), mesh=MESH)])
    assert "batch and c split over x" in explain.layout_in_words(mixed)
    one = split_plan(((), ()), ((), ()), MeshShape(("x",), (1,)))
    assert explain.layout_in_words(one) == "one device, so nothing is split"
    assert "Communication: none" in str(one)


def test_layout_that_was_asked_for():
    plan = make_plan(
        layout="fsdp", mesh=FLAT, step_time_s=0.5356, communication_time_s=0.2256,
        inputs=[], outputs=[], state_pairs=[], collectives=[],
    )  # fmt: skip
    assert explain.layout_in_words(plan).startswith("fsdp (as asked): ")
    assert explain.why(plan) == "fsdp was asked for; auto on x=8, y=2, is 1.30x faster: -124 ms communication"


def test_why_when_nothing_classic_fits():
    unfit = [dataclasses.replace(c, fits=c.name == "auto", peak_memory_bytes=21 * GIB) for c in CANDIDATES]
    assert explain.why(make_plan(candidates=unfit)).startswith(
        "no classic layout fits; the nearest, data on x=16, needs 21"
    )
    assert explain.why(make_plan(candidates=CANDIDATES[:1])) == "nothing else was considered"
    assert explain.why(make_plan(candidates=CANDIDATES[:2])) == "the best of 2 candidates"


def test_overlap_gap_and_no_limit():
    plan = make_plan(
        step_time_s=0.4,
        gap=0.031,
        status="TIME_LIMIT",
        memory_limit_bytes=math.inf,
        peak_memory_bytes=2 * GIB,
    )
    assert (
        explain.step_in_words(plan)
        == "400 ms = 310 ms compute + 102 ms communication - 12.0 ms of it in parallel"
    )
    assert explain.search_in_words(plan).startswith(
        "TIME_LIMIT (stopped at the time limit, at most 3.1% from the best)"
    )
    assert explain.memory_in_words(plan).startswith("2 GiB per device: ")


def test_an_optimizer_that_comes_before_the_parameters():
    leaves = [
        leaf(f"state{part}['{name}']", (2**10, 2**9), (("x",), ()))
        for part in ("['opt'].mu", "['opt'].nu", "['params']")
        for name in ("v", "w")
    ]
    plan = make_plan(
        inputs=leaves, outputs=leaves, state_pairs=[(i, i) for i in range(len(leaves))], collectives=[], constraints=[]
    )
    assert "state['params']['v'] +mu +nu" in str(plan)
    assert "plan.cost_sources" in str(make_plan(cost_sources=[("memory", "a data sheet")]))
    measured = str(make_plan(cost_sources=[("memory", "profile of 2026-12-01, jax 0.10.2, a laptop")]))
    assert "profile of 2026-12-01" in measured
