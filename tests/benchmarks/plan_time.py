"""How long planning takes, from the step to the plan, and what it finds: a table, or rows in a file.

    python tests/benchmarks/plan_time.py
    python tests/benchmarks/plan_time.py --models gpt-24 llama3-8b-32 --json rows.json

Every case runs in a process of its own, so that its peak memory is its own. Times are wall-clock seconds
beside whatever else the machine does; `trace` is what comes before the planner.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
import json
import os
from pathlib import Path
import resource
import subprocess
import sys
import time

sys.path.insert(0, str(Path(__file__).parent))

from models import Model, gpt, llama3_8b, step_and_arguments

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model to plan on a mesh of a cluster. `memory` lets the step fit where it would not."""

    model: Model
    cluster: str
    mesh: tuple[int, ...]
    memory: str | None = None

    @property
    def name(self) -> str:
        return f"{self.model.name}@{'x'.join(map(str, self.mesh))}"


# Llama keeps attention scores of 8192 x 8192 in every layer for its backward pass: more than a chip holds.
CASES = (
    *(Case(gpt(layers), "v5e:8x8", (8, 8)) for layers in (4, 12, 24, 48)),
    Case(llama3_8b(), "v5p:4x4x4", (8, 8), "1TiB"),
    Case(llama3_8b(), "v5p:4x4x4", (2, 4, 8), "1TiB"),
)
SMOKE = (Case(Model("gpt-smoke", 2, 64, 4, 4, 256, 512, 32, 16), "v5e:2x4", (2, 4)),)


def run_case(case: Case) -> dict:
    """Plans it here; the row of the table."""
    start = time.perf_counter()
    import autoplan  # its import is part of what a user waits for, so inside the clock

    imported = time.perf_counter()
    step, arguments = step_and_arguments(case.model)
    parallel = autoplan.parallelize(
        step, cluster=case.cluster, mesh_shape=case.mesh, memory=case.memory, donate_argnums=0
    )
    before = time.perf_counter()
    traced = parallel.trace(*arguments)
    middle = time.perf_counter()
    plan = traced.plan()
    end = time.perf_counter()
    return {
        "model": case.model.name,
        "layers": case.model.layers,
        "mesh": list(case.mesh),
        "cluster": case.cluster,
        "phases_s": {"trace": middle - before} | dict(plan.phases_s),
        "total_s": end - before,
        "import_s": imported - start,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "status": plan.status,
        "gap": plan.gap,
        "step_time_s": plan.step_time_s,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "best_classic_step_time_s": min(
            (c.step_time_s for c in plan.candidates if c.name != "auto" and c.fits), default=None
        ),
    }


def run_apart(case: Case) -> dict:
    """`run_case` in a fresh process. A case that fails gives a row with `error`."""
    folder = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import plan_time; plan_time.child({case.name!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = done.stderr.strip().splitlines()
    return {
        "model": case.model.name,
        "layers": case.model.layers,
        "mesh": list(case.mesh),
        "cluster": case.cluster,
        "error": lines[-1] if lines else f"exit {done.returncode}",
    }


def child(name: str) -> None:
    """Runs the case of that name and prints its row as JSON."""
    print(json.dumps(run_case(next(case for case in (*CASES, *SMOKE) if case.name == name))))


def table(rows: Sequence[dict]) -> str:
    """The rows for a person, one line per case and one per phase."""
    lines = [f"{'model':16} {'mesh':>7} {'total':>8} {'peak RSS':>9}  {'step':>9} {'memory':>9}  status"]
    for row in rows:
        head = f"{row['model']:16} {'x'.join(map(str, row['mesh'])):>7}"
        if "error" in row:
            lines.append(f"{head}  failed: {row['error']}")
            continue
        step_ms, memory_gib = row["step_time_s"] * 1e3, row["peak_memory_bytes"] / GIB
        lines.append(
            f"{head} {row['total_s']:6.1f} s {row['peak_rss_bytes'] / GIB:5.1f} GiB  {step_ms:6.0f} ms"
            f" {memory_gib:5.1f} GiB  {row['status']}, gap {row['gap']:.2%}"
        )
        lines += [f"  {phase:20} {seconds:8.2f} s" for phase, seconds in row["phases_s"].items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [case.name for case in CASES]
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="MODEL",
        help=f"only these; known: {', '.join(known)}, or without @mesh",
    )
    parser.add_argument("--smoke", action="store_true", help="one tiny model, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    cases = SMOKE if args.smoke else CASES
    if args.models:
        unknown = [m for m in args.models if m not in known and m not in {case.model.name for case in cases}]
        if unknown:
            parser.error(f"unknown models: {', '.join(unknown)}; known: {', '.join(known)}")
        cases = [case for case in cases if case.name in args.models or case.model.name in args.models]
    rows = []
    for case in cases:
        rows.append(run_apart(case))
        print(table(rows[-1:]) if len(rows) == 1 else table(rows[-1:]).split("\n", 1)[1], flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
