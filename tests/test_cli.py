"""The command line: what it prints and writes, its exit codes, and one clear message for every error."""

import json
import subprocess
import sys
import textwrap

import pytest

from autoplan import api, cli
from autoplan.errors import MemoryLimitError
from autoplan.plan import LeafLayout, MeshShape, Plan

PROGRAM = """
    import autoplan
    import jax
    import jax.numpy as jnp

    def train_step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    @autoplan.parallelize(cluster="cpu:2", memory="1GiB", layout="data", donate_argnums=0)
    def fast_step(w, x):
        return train_step(w, x)

    def bad_step(w, x):
        return w @ x

    def other_args():
        return small(), small()

    def small():
        return jax.ShapeDtypeStruct((8, 8), "float32")

    def example_args():
        print("making arguments")
        return jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")

    def broken_args():
        raise RuntimeError("no data here")

    not_a_function = 7
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a program, as the current one; what it imports is forgotten afterwards."""
    (tmp_path / "prog.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    loaded = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - loaded:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def planned(monkeypatch):
    """Replaces the planner by one that returns a hand-made plan; the dict holds what it was asked."""
    asked = {}

    def make_plan(trace, cluster, **options):
        asked.update(options, trace=trace, cluster=cluster)
        mesh = MeshShape(("x",), (cluster.num_devices,))
        leaves = [
            LeafLayout(x.path, x.shape, str(x.dtype), ((),) * len(x.shape), 8, "input") for x in trace.inputs
        ]
        return Plan(
            program=trace.name, fingerprint=trace.fingerprint, cluster=cluster.name, mesh=mesh,
            layout=options["layout"], status="OPTIMAL", gap=0, planning_time_s=1, phases_s={},
            step_time_s=0.0123,
            compute_time_s=0.01, communication_time_s=0.0023, peak_memory_bytes=2**30,
            memory_limit_bytes=2**34,
            inputs=leaves, outputs=[], state_pairs=[],
        )  # fmt: skip

    monkeypatch.setattr(api, "make_plan", make_plan)
    return asked


def run(capsys, *argv):
    code = cli.main(["plan", *argv])
    return code, *capsys.readouterr()


# What it does.


def test_prints_the_report_alone(folder, planned, capsys):
    code, out, err = run(capsys, "prog.py:train_step", "--cluster", "v5e:4x4")
    assert code == 0 and err == "making arguments\n"
    assert out.startswith("train_step on v5e:4x4: 12.3 ms per step predicted, 1 GiB of 16 GiB per device\n")
    assert planned["mesh_shape"] is None and planned["memory_bytes"] is None and planned["layout"] == "auto"


def test_options_reach_the_planner(folder, planned, capsys):
    options = ["--memory", "1.5GiB", "--mesh", "4x4", "--layout", "fsdp", "--args", "prog.py:other_args"]
    code, out, _ = run(capsys, "prog:train_step", "--cluster", "v5e:4x4", *options)
    assert code == 0 and "fsdp (as asked)" in out
    assert (planned["memory_bytes"], planned["mesh_shape"], planned["layout"]) == (3 * 2**29, (4, 4), "fsdp")
    assert [leaf.shape for leaf in planned["trace"].inputs] == [(8, 8), (8, 8)]


def test_a_decorated_step_keeps_its_own_options(folder, planned, capsys):
    code, _, err = run(capsys, "prog.py:fast_step", "--cluster", "8xH100")
    assert code == 0, err
    assert (planned["memory_bytes"], planned["layout"], planned["cluster"].num_devices) == (2**30, "data", 8)
    assert [leaf.donated for leaf in planned["trace"].inputs] == [True, False]
    assert run(capsys, "prog.py:fast_step", "--cluster", "8xH100", "--layout", "auto")[0] == 0
    assert (planned["memory_bytes"], planned["layout"]) == (2**30, "auto")


def test_json_and_save_are_the_plan_file(folder, planned, capsys):
    code, out, _ = run(capsys, "prog.py:train_step", "--cluster", "cpu:8", "--json", "--save", "plan.json")
    assert code == 0 and json.loads(out)["format"] == "autoplan-plan"
    assert (folder / "plan.json").read_text() == out
    assert Plan.load("plan.json").program == "train_step"


def test_a_file_called_like_a_module_in_use(folder, planned, capsys):
    (folder / "json.py").write_text((folder / "prog.py").read_text())
    assert run(capsys, str(folder / "json.py") + ":train_step", "--cluster", "cpu:8")[0] == 0
    assert json.loads("1") == 1 and str(folder) not in sys.modules["json"].__file__


def test_plans_from_a_shell_without_devices(folder):
    """The real thing, in a process of its own: the package's entry point, planner and report."""
    command = [sys.executable, "-m", "autoplan", "plan", "prog.py:train_step", "--cluster", "v5e:4x4"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("train_step on v5e:4x4: ") and "Candidates" in done.stdout


# Errors.


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["prog.py:train_step"], 2, "required: --cluster"),
        (["prog.py:train_step", "--cluster", "v9:4x4"], 2, "argument --cluster: cluster 'v9:4x4'"),
        (["prog.py:train_step", "--cluster", "cpu:8", "--memory", "lots"], 2,
         "got 'lots'. Write a whole number of"),
        (["prog.py:train_step", "--cluster", "cpu:8", "--mesh", "2by4"], 2, "'2by4' is no mesh shape"),
        (["prog.py:train_step", "--cluster", "cpu:8", "--layout", "zero"], 2, "invalid choice: 'zero'"),
        (["prog.py", "--cluster", "cpu:8"], 2, "'prog.py' names no function: write FILE:FUNCTION"),
        (["none.py:f", "--cluster", "cpu:8"], 2, "there is no file "),
        (["no.such.module:f", "--cluster", "cpu:8"], 2, "there is no file or module no.such.module"),
        (["prog.py:step", "--cluster", "cpu:8"], 2,
         "prog.py has no function 'step'; it has train_step, fast_step, bad"),
        (["prog.py:not_a_function", "--cluster", "cpu:8"], 2, "is no function but a int"),
        (["noargs.py:step", "--cluster", "cpu:8"], 2,
         "noargs.py has no function example_args. Write one that returns"),
        (["prog.py:train_step", "--cluster", "cpu:8", "--save", "no/plan.json"], 2,
         "there is no such folder"),
        (["prog.py:train_step", "--cluster", "cpu:8", "--save", "."], 2, "--save .: "),
        (["prog.py:train_step", "--cluster", "cpu:8", "--args", "prog.py:broken_args"], 1,
         "prog.py:broken_args failed: RuntimeError: no data here [prog.py:28 (broken_args)]"),
        (["prog.py:train_step", "--cluster", "cpu:8", "--args", "prog.py:small"], 1,
         "must return the tuple of the step's arguments; got a ShapeDtypeStruct. For a single argument"),
        (["prog.py:bad_step", "--cluster", "cpu:8"], 1, "prog.py:bad_step cannot be planned: TypeError: "),
        (["broken.py:step", "--cluster", "cpu:8"], 1,
         "importing broken.py failed: SyntaxError: invalid syntax [broken.py:1]"),
        (["crash.py:step", "--cluster", "cpu:8"], 1,
         "importing crash.py failed: ZeroDivisionError: division by zero"),
        (["quit.py:step", "--cluster", "cpu:8"], 1,
         "importing quit.py failed: SystemExit: 3 [quit.py:2 (<module>)]"),
    ],
)  # fmt: skip
def test_errors_are_one_message(folder, planned, capsys, argv, code, words):
    (folder / "noargs.py").write_text("def step(x): return x\n")
    (folder / "broken.py").write_text("def step(:\n")
    (folder / "crash.py").write_text("\n1 / 0\n")
    (folder / "quit.py").write_text("import sys\nsys.exit(3)\n")
    got, out, err = run(capsys, *argv)
    assert got == code and out == ""
    assert words in err and "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last == "(--debug shows the traceback)" if code == 1 else last.startswith("autoplan plan: error: ")


def test_the_user_s_line_is_named(folder, planned, capsys):
    _, _, err = run(capsys, "prog.py:bad_step", "--cluster", "cpu:8")
    assert "[prog.py:15 (bad_step)]" in err


def test_a_plan_that_cannot_be(folder, monkeypatch, capsys):
    def make_plan(*_, **__):
        raise MemoryLimitError("no layout fits", got="a limit of 1 GiB", smallest_bytes=2**31)

    monkeypatch.setattr(api, "make_plan", make_plan)
    code, out, err = run(capsys, "prog.py:train_step", "--cluster", "cpu:8", "--save", "plan.json")
    assert (code, out) == (1, "") and "autoplan plan: error: no layout fits; got a limit of 1 GiB" in err
    assert not (folder / "plan.json").exists()


def test_debug_shows_the_traceback(folder, planned, capsys):
    (folder / "crash.py").write_text("1 / 0\n")
    code, _, err = run(capsys, "crash.py:step", "--cluster", "cpu:8", "--debug")
    assert code == 1 and "Traceback" in err and "crash.py" in err and "shows the traceback" not in err


def test_help_has_examples_and_exit_codes(capsys):
    assert cli.main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    assert "autoplan plan train.py:train_step --cluster v5e:4x4" in text and "exit codes:" in text
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("autoplan ")
    assert cli.main([]) == 2
