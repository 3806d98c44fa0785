"""How well plans predict: each against its compiled program, and small ones against the clock.

    python tests/benchmarks/fidelity.py --json rows.json
    python tests/benchmarks/fidelity.py --programs gpt moe --clusters v5e:4x4 --layouts auto --json rows.json
    python tests/benchmarks/fidelity.py --json rows.json --table --readme README.md

A row per program, cluster and layout. For accelerators the `large` programs of `zoo` are planned and compiled ahead of
time (`Plan.verify`); for simulated CPU devices the `small` ones are also run: all plans of a program in turn, round
after round, in one process. Each pair of program and cluster has a child process with a time limit, so that a crash of
the compiler costs the rows that it hit, which then say `error`. Rows that the file already has are kept, but for those
with errors; `--again` makes all anew.

At the end: a table in Markdown, and each criterion of the project's accuracy with the figure that it asks for. With
`--readme`, the table by clusters replaces what stands between the marks in that file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
from dataclasses import dataclass
import importlib.util
import json
import math
import os
from pathlib import Path
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import zoo

CLUSTERS = ("v5e:4x4", "v5p:2x2x4", "2x8xH100", "cpu:8")
LAYOUTS = ("data", "fsdp", "tensor", "auto")
# Plans beside the layouts that are measured on simulated devices, so that ranks mean something: the search on a mesh.
MEASURED = (*LAYOUTS, "auto@8", "auto@2x4")
MEASURED_S, ROUNDS = 20.0, (5, 25)
LIMIT_S = 900
MARKS = ("<!-- accuracy -->", "<!-- /accuracy -->")
# A kind of collective with less than this share of a step's traffic is not judged by its relative error.
SMALL_SHARE = 0.01
# Plans whose predicted step times are this close are ties, which no rank can tell apart.
TIE = 0.02

# Programs that take more memory than predicted are compiled again, for devices with so much more than predicted.
TIGHT = 1.15

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A program on a cluster, in several layouts; "auto@2x4" is the search on that mesh alone."""

    program: str
    cluster: str
    layouts: tuple[str, ...]
    budget_s: float | None = 60.0

    @property
    def on_cpu(self) -> bool:
        return self.cluster.startswith("cpu")

    @property
    def size(self) -> str:
        return "small" if self.on_cpu else "large"


def key(row: Row) -> tuple[str, str, str]:
    return row["program"], row["cluster"], row["layout"]


# ---------------------------------------------------------------------------------------------------------
# The child: plans, verifies and measures


def run_case(case: Case) -> Iterator[Row]:
    """The rows of a case, each as soon as it is known; measured ones all at the end."""
    from zoo.flops import step_flops

    import autoplan

    program = zoo.load(case.program, case.size)
    arguments = program.arguments()
    flops = step_flops(program.step, arguments)
    step = autoplan.parallelize(program.step, cluster=case.cluster, donate_argnums=0, budget_s=case.budget_s)
    rows, plans = [], []
    for layout in case.layouts:
        row = {"program": case.program, "cluster": case.cluster, "layout": layout, "size": case.size}
        try:
            name, _, mesh = layout.partition("@")
            options = {"mesh_shape": tuple(map(int, mesh.split("x")))} if mesh else {}
            start = time.perf_counter()
            plan = step.with_options(layout=name, **options).plan(*arguments)
            row |= {"planning_s": time.perf_counter() - start, "step_flops": flops} | _predicted(plan)
            row |= _verified(plan)
            row |= _tightened(plan, row["memory_bytes"])
            if case.on_cpu:
                plans.append((row, plan))
        except Exception as error:  # a row says what went wrong; the others go on
            row["error"] = f"{type(error).__name__}: {error}"[:1000]
        rows.append(row)
        if not plans or "error" in row:
            yield row
    if plans:
        times = _measured(program, step, [plan for _, plan in plans])
        for (row, _), seconds in zip(plans, times, strict=True):
            yield row | {"measured_step_time_s": statistics.median(seconds), "measured_rounds": len(seconds)}


def _predicted(plan: Any) -> Row:
    return {
        "mesh": str(plan.mesh),
        "status": plan.status,
        "gap": plan.gap,
        "predicted_step_time_s": plan.step_time_s,
        "predicted_communication_time_s": plan.communication_time_s,
        "predicted_memory_bytes": plan.peak_memory_bytes,
        "num_devices": plan.mesh.num_devices,
    }


def _verified(plan: Any) -> Row:
    from autoplan.verification.result import SPMD_WARNING

    with _StandardError() as said:
        v = plan.verify(timeout_s=LIMIT_S / 3)
    return {
        "memory_bytes": v.peak_memory_bytes,
        "wire_bytes": {kind: list(both) for kind, both in v.wire_bytes_by_kind.items()},
        "unplanned_share": v.unplanned_share,
        "unplanned": [
            [u.kind, list(u.axes), u.excess_bytes, u.count, u.op, u.source.rsplit("/", 1)[-1]] for u in v.unplanned[:8]
        ],
        "step_time_s": v.step_time_s,
        "flops": v.flops,
        "unknown_loops": v.unknown_loops,
        "compile_s": v.compile_time_s,
        "rematerialised": said.text.count(SPMD_WARNING) if v.rematerialised is None else v.rematerialised,
    }


def _tightened(plan: Any, memory_bytes: float) -> Row:
    """Whether the program compiles into `TIGHT` times the predicted memory. Only TPUs' compiler can be told a limit."""
    import autoplan
    from autoplan.cost_models import parse_cluster

    if parse_cluster(plan.cluster).device.platform != "tpu":
        return {}
    limit = TIGHT * plan.peak_memory_bytes
    if memory_bytes <= limit:
        return {"compiles_tight": True}
    trace = plan._trace
    try:
        within = dataclasses.replace(plan, memory_limit_bytes=limit).with_trace(trace).verify(timeout_s=LIMIT_S / 3)
    except autoplan.CompilerError as error:
        if not error.out_of_memory:
            raise
        return {"compiles_tight": False}
    return {"compiles_tight": within.peak_memory_bytes <= limit}


class _StandardError:
    """What C++ code of this process writes to its standard error meanwhile: the partitioner's warnings."""

    def __enter__(self) -> _StandardError:
        self._kept, self._file = os.dup(2), tempfile.TemporaryFile()
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *error: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)
        with self._file as file:
            file.seek(0)
            self.text = file.read().decode(errors="replace")


def _measured(program: zoo.Program, step: Any, plans: Sequence[Any]) -> list[list[float]]:
    """Seconds of each step of each plan: all in turn, in a new order each round, after one round to warm up."""
    import jax

    runs = [_runner(program, step, plan) for plan in plans]
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in plans]
    start, order = time.perf_counter(), list(range(len(plans)))
    shuffle = random.Random(0).shuffle
    for done in range(ROUNDS[1]):
        if done >= ROUNDS[0] and time.perf_counter() - start > MEASURED_S:
            break
        shuffle(order)
        for i in order:
            before = time.perf_counter()
            jax.block_until_ready(runs[i]())
            times[i].append(time.perf_counter() - before)
    return times


def _runner(program: zoo.Program, step: Any, plan: Any) -> Callable[[], Any]:
    """A function that does one step of a plan, on a state of its own."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    import numpy as np

    planned = step.use_plan(plan)
    compiled = planned.compile(*program.arguments(), plan=plan)
    state = planned.init(program.make_state, jax.random.key(0))
    mesh = Mesh(np.array(jax.devices()[: plan.mesh.num_devices]).reshape(plan.mesh.axis_sizes), plan.mesh.axis_names)
    leaves, tree = jax.tree.flatten(jax.jit(program.make_batch)(jax.random.key(1)))
    specs = plan.in_shardings[len(jax.tree.leaves(state)) :]
    batch = tree.unflatten(
        jax.device_put(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, specs, strict=True)
    )

    def run() -> Any:
        nonlocal state
        state, loss = compiled(state, batch)
        return state, loss

    return run


def child(text: str) -> None:
    """Runs the case in `text` and prints a line of JSON for every row."""
    case = json.loads(text)
    for row in run_case(Case(case["program"], case["cluster"], tuple(case["layouts"]), case["budget_s"])):
        print("row " + json.dumps(row), flush=True)


# ---------------------------------------------------------------------------------------------------------
# The parent: a child per case


def run_apart(case: Case, limit_s: float = LIMIT_S) -> list[Row]:
    """`run_case` in a fresh process; a row for every layout, with `error` where it did not come to one."""
    devices = case.cluster.removeprefix("cpu:") if case.on_cpu else "1"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    folder = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import fidelity; fidelity.child(sys.argv[1])"
    command = [sys.executable, "-c", code, json.dumps(vars(case))]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=errors, start_new_session=True)
        try:
            why = f"exit {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            why = f"no answer within {limit_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the compiler too, which is a child of the child
            process.wait()
        out.seek(0)
        errors.seek(0)
        written, said = out.read(), errors.read()
    rows = [json.loads(line.removeprefix("row ")) for line in written.splitlines() if line.startswith("row ")]
    last = said.strip().splitlines()[-1:] if why != "exit 0" else []
    there = {row["layout"] for row in rows}
    lost = {layout: "; ".join([why, *last])[:1000] for layout in case.layouts if layout not in there}
    return rows + [
        {"program": case.program, "cluster": case.cluster, "layout": layout, "size": case.size, "error": error}
        for layout, error in lost.items()
    ]


# ---------------------------------------------------------------------------------------------------------
# Criteria


@dataclass(frozen=True)
class Criterion:
    """Something that the project promises, and how far it is true. `value` is None if no row tells."""

    name: str
    limit: float
    value: float | None
    of: int
    at_least: bool = False

    def __str__(self) -> str:
        if self.value is None:
            return f"unknown  {self.name}"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        sign = ">=" if self.at_least else "<="
        return f"{'met' if met else 'MISSED':8} {self.name}: {self.value:.3f} ({sign} {self.limit:g}, of {self.of})"


def criteria(rows: Sequence[Row]) -> list[Criterion]:
    """Every criterion that the rows tell something about."""
    good = [row for row in rows if "memory_bytes" in row]
    memory = [abs(_error(row["predicted_memory_bytes"], row["memory_bytes"])) for row in good]
    tight = [float(row["compiles_tight"]) for row in good if "compiles_tight" in row]
    kinds = [abs(error) for row in good for error in kind_errors(row).values()]
    autos = [row for row in good if row["layout"] == "auto"]
    replayed = [row for row in good if row.get("step_time_s")]
    timed = [row for row in good if row.get("measured_step_time_s")]
    errors = [abs(_error(row["predicted_step_time_s"], row["step_time_s"])) for row in replayed]
    ranks = _ranks(replayed, "step_time_s", lambda row: (row["program"], row["cluster"]))
    measured_ranks = _ranks(timed, "measured_step_time_s", lambda row: row["program"])
    unplanned = [row["unplanned_share"] for row in autos]
    remade = [row["rematerialised"] for row in good if row.get("rematerialised") is not None]
    flops = [abs(error) for row in good if (error := flops_error(row)) is not None]
    return [
        _criterion("memory, median error", 0.05, memory, statistics.median),
        _criterion("memory, worst error", 0.15, memory, max),
        _criterion(f"compile into {TIGHT:g} x the predicted memory, share", 1, tight, statistics.mean, at_least=True),
        _criterion("bytes by kind of collective, median error", 0.05, kinds, statistics.median),
        _criterion("unplanned traffic of auto plans, worst share", 0.01, unplanned, max),
        _criterion("involuntary full rematerialisations", 0, remade, sum),
        _criterion("step time of the compiled program, median error", 0.15, errors, statistics.median),
        _criterion("step time of the compiled program, worst rank correlation", 0.9, ranks, min, at_least=True),
        _criterion("auto over the fastest classic layout, compiled, worst", 1.0, _against_classic(replayed), max),
        _criterion("step time measured, worst rank correlation", 0.9, measured_ranks, min, at_least=True),
        _criterion("auto over the fastest plan, measured, worst", 1.05, _against_fastest(timed), max),
        _criterion("FLOPs of data-parallel programs, worst error", 0.02, flops, max),
        _criterion("cases that failed", 0, [1 for row in rows if "error" in row] or [0], sum),
    ]


def _criterion(
    name: str, limit: float, values: Sequence[float], over: Callable[..., float], at_least: bool = False
) -> Criterion:
    return Criterion(name, limit, over(values) if values else None, len(values), at_least)


def _error(predicted: float, true: float) -> float:
    if true:
        return (predicted - true) / true
    return math.inf if predicted else 0.0


def kind_errors(row: Row) -> dict[str, float]:
    """Relative error of the bytes of each kind of collective, but for kinds with next to no traffic."""
    total = sum(compiled for _, compiled in row["wire_bytes"].values())
    return {
        kind: _error(planned, compiled)
        for kind, (planned, compiled) in row["wire_bytes"].items()
        if max(planned, compiled) > SMALL_SHARE * total
    }


def flops_error(row: Row) -> float | None:
    """Compiled FLOPs of all devices against those of the step as written, where the batch is split over all."""
    if row["layout"] not in ("data", "fsdp"):
        return None
    return _error(row["flops"] * row["num_devices"], row["step_flops"])


def _groups(rows: Sequence[Row], by: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row)
    return groups


def _ranks(rows: Sequence[Row], true: str, by: Callable[[Row], Any]) -> list[float]:
    """Spearman's rank correlation of predicted and true step times within each group of three or more plans.

    Predictions within `TIE` of each other are one rank, and so are true times within it.
    """
    from scipy import stats

    found = []
    for group in _groups(rows, by).values():
        predicted = _tied([row["predicted_step_time_s"] for row in group])
        actual = _tied([row[true] for row in group])
        if len(group) >= 3 and len(set(predicted)) > 1 and len(set(actual)) > 1:
            found.append(float(stats.spearmanr(predicted, actual).statistic))
    return found


def _tied(values: Sequence[float]) -> list[float]:
    """The values, each replaced by the smallest of the run of near-equal ones that it is in."""
    out, first = {}, -math.inf
    for value in sorted(values):
        first = value if value > first * (1 + TIE) else first
        out[value] = first
    return [out[value] for value in values]


def _against_classic(rows: Sequence[Row]) -> list[float]:
    """Of each program and cluster: the auto plan's compiled step time over the fastest classic layout's."""
    found = []
    for group in _groups(rows, lambda row: (row["program"], row["cluster"])).values():
        times = {row["layout"]: row["step_time_s"] for row in group}
        classics = [times[name] for name in LAYOUTS if name != "auto" and name in times]
        if "auto" in times and classics:
            found.append(times["auto"] / min(classics))
    return found


def _against_fastest(rows: Sequence[Row]) -> list[float]:
    """Of each program: the auto plan's measured step time over the fastest plan's."""
    found = []
    for group in _groups(rows, lambda row: (row["program"], row["cluster"])).values():
        times = {row["layout"]: row["measured_step_time_s"] for row in group}
        if "auto" in times:
            found.append(times["auto"] / min(times.values()))
    return found


# ---------------------------------------------------------------------------------------------------------
# Tables


def by_cluster(rows: Sequence[Row]) -> str:
    """A line of Markdown per cluster: how far predictions are off."""
    lines = [
        f"| cluster | plans | memory: median, worst | compile into {TIGHT:g} x predicted | bytes by kind: median "
        "| not planned in `auto`: worst | step time: median, worst | its ranks: median, worst "
        "| `auto` over the best other: worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for cluster, group in _groups([row for row in rows if "memory_bytes" in row], lambda row: row["cluster"]).items():
        measured = any(row.get("measured_step_time_s") for row in group)
        true = "measured_step_time_s" if measured else "step_time_s"
        timed = [row for row in group if row.get(true)]
        memory = [abs(_error(row["predicted_memory_bytes"], row["memory_bytes"])) for row in group]
        kinds = [abs(error) for row in group for error in kind_errors(row).values()]
        tight = [row["compiles_tight"] for row in group if "compiles_tight" in row]
        unplanned = [row["unplanned_share"] for row in group if row["layout"] == "auto"]
        times = [abs(_error(row["predicted_step_time_s"], row[true])) for row in timed]
        ranks = _ranks(timed, true, lambda row: row["program"])
        against = _against_fastest(timed) if measured else _against_classic(timed)
        cells = [
            f"{cluster} ({'run' if measured else 'compiled'})", str(len(group)),
            f"{statistics.median(memory):.0%}, {max(memory):.0%}", f"{statistics.mean(tight):.0%}" if tight else "-",
            f"{statistics.median(kinds):.1%}" if kinds else "-",
            f"{max(unplanned):.1%}" if unplanned else "-",
            f"{statistics.median(times):.0%}, {max(times):.0%}" if times else "-",
            f"{statistics.median(ranks):.2f}, {min(ranks):.2f}" if ranks else "-",
            f"{max(against):.2f}" if against else "-",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_readme(path: Path, rows: Sequence[Row]) -> None:
    """Puts `by_cluster` between the marks of a file."""
    before, found, rest = path.read_text().partition(MARKS[0])
    _, closed, after = rest.partition(MARKS[1])
    if not (found and closed):
        raise SystemExit(f"{path} has no {MARKS[0]} ... {MARKS[1]}")
    path.write_text(f"{before}{MARKS[0]}\n{by_cluster(rows)}\n{MARKS[1]}{after}")


def table(rows: Iterable[Row]) -> str:
    """A line of Markdown per row: predicted, and true."""
    lines = [
        "| program | cluster | layout | mesh | memory, GiB | error | sent, MiB | worst kind | unplanned | step, ms "
        "| true | error |",
        "|---|---|---|---|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    return "\n".join(lines + [_line(row) for row in rows])


def _line(row: Row) -> str:
    cells = [row["program"], row["cluster"], row["layout"]]
    if "memory_bytes" not in row:
        return f"| {' | '.join(cells)} | {row.get('error', '')[:160].replace('|', '/')} |"
    true = row.get("step_time_s") or row.get("measured_step_time_s")
    predicted = row["predicted_step_time_s"]
    worst = max(kind_errors(row).items(), key=lambda item: abs(item[1]), default=None)
    cells += [
        row["mesh"],
        f"{row['memory_bytes'] / 2**30:.2f}",
        f"{_error(row['predicted_memory_bytes'], row['memory_bytes']):+.0%}",
        f"{sum(compiled for _, compiled in row['wire_bytes'].values()) / 2**20:.0f}",
        "" if worst is None else f"{worst[0]} {worst[1]:+.0%}" if math.isfinite(worst[1]) else f"{worst[0]} none",
        f"{row['unplanned_share']:.1%}",
        f"{predicted * 1e3:.1f}",
        f"{true * 1e3:.1f}" if true else "",
        f"{_error(predicted, true):+.0%}" if true else "",
    ]
    return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[Row]) -> str:
    """The table and the criteria."""
    return "\n".join([table(rows), "", *map(str, criteria(rows))])


# ---------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", default=zoo.NAMES, choices=zoo.NAMES, metavar="PROGRAM")
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS, metavar="CLUSTER")
    parser.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="data, fsdp, tensor, auto, or auto@2x4")
    parser.add_argument("--budget", type=float, default=60.0, metavar="S", help="seconds of search per plan")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds per program and cluster")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are kept there, and taken from there")
    parser.add_argument("--again", action="store_true", help="make rows anew that the file has")
    parser.add_argument("--table", action="store_true", help="only print what the file has")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="write the table by clusters there")
    args = parser.parse_args()
    rows = {key(row): row for row in _read(args.json)}
    for cluster in () if args.table else args.clusters:
        if why := _not_here(cluster):
            print(f"skipped {cluster}: {why}", flush=True)
            continue
        for program in args.programs:
            layouts = args.layouts or (MEASURED if cluster.startswith("cpu") else LAYOUTS)
            missing = tuple(
                layout
                for layout in layouts
                if args.again or "error" in rows.get((program, cluster, layout), {"error": ""})
            )
            if missing and cluster.startswith("cpu"):
                missing = tuple(layouts)  # times compare only within one run
            if not missing:
                continue
            for row in run_apart(Case(program, cluster, missing, args.budget), args.limit):
                rows[key(row)] = row
                print(_line(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    print(summary(list(rows.values())))
    if args.readme:
        write_readme(args.readme, list(rows.values()))
    return int(any("error" in row for row in rows.values()))


def _not_here(cluster: str) -> str:
    """Why programs cannot be compiled for a cluster here; "" if they can."""
    platform = "gpu" if "H100" in cluster else "cpu" if cluster.startswith("cpu") else "tpu"
    module = {"gpu": "jax_cuda12_plugin", "tpu": "libtpu"}.get(platform)
    if module is None or importlib.util.find_spec(module) is not None:
        return ""
    return f"{module} is not installed (pip install 'autoplan[{platform}-aot]')"


def _read(path: Path | None) -> list[Row]:
    return json.loads(path.read_text()) if path is not None and path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
