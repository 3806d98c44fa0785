"""Contest instances of intra-operator parallelism: how good an answer, and how soon.

    python tests/benchmarks/iopddl.py [INSTANCE.json.gz ...] [--budget SECONDS] [--json FILE]

Without an instance, those of the contest in the folder --folder. One row each: cost, bound, status, seconds (reading
included), seconds_to_first, peak_rss_bytes, and by how much the cost is above the best known. The budget is the
contest's, for instances that it names (github.com/google/iopddl), else 60 s.
"""

import argparse
import json
from pathlib import Path
import resource
import subprocess
import sys
import time

# name: (time limit in seconds, the lowest cost that an entry of the contest reached).
KNOWN = {
    "A": (60, 6_548_641_531),
    "G": (120, 217_039),
    "M": (180, 49_928_460_991),
    "S": (240, 1_534_613_444),
}
FOLDER = Path(__file__).parents[3] / "shared" / "iopddl"
# Kept of a budget for reading what comes after the search: lifting, the last evaluation, the end of a HiGHS run.
MARGIN_SHARE, MARGIN_S = 0.03, 2.0


def run_one(path: Path, budget_s: float) -> dict:
    """Reads and solves one instance in this process."""
    started = time.perf_counter()
    from autoplan.search import iopddl, solve

    problem = iopddl.read(path)
    first: list[float] = []

    def better(progress) -> None:
        if not first:
            first.append(time.perf_counter() - started)

    left = budget_s - (time.perf_counter() - started) - max(MARGIN_S, MARGIN_SHARE * budget_s)
    solution = solve(problem, budget_s=max(left, 0.1), on_better=better)
    if solution.choice is not None:
        assert problem.evaluate(solution.choice).feasible
    scale = 1 if sys.platform == "darwin" else 1024
    return {
        "instance": path.name.split(".")[0],
        "nodes": problem.num_nodes,
        "edges": problem.num_edges,
        "cost": solution.cost if solution.choice is not None else None,
        "bound": solution.bound,
        "status": solution.status.value,
        "seconds": time.perf_counter() - started,
        "seconds_to_first": first[0] if first else None,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
        "message": solution.message,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instances", nargs="*", type=Path)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the contest's instances are")
    parser.add_argument("--budget", type=float, help="seconds for each, instead of the contest's limit")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    paths = options.instances or [options.folder / f"{name}.json.gz" for name in KNOWN]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        parser.error(f"no such instance: {', '.join(missing)}; name files, or the folder of the four with --folder")
    if options.one:
        print(json.dumps(run_one(paths[0], options.budget)))
        return
    rows = []
    heads = f"{'instance':10} {'cost':>15} {'bound':>15} {'above best':>10} {'gap':>7}"
    print(f"{heads} {'first':>6} {'all':>6} {'GB':>5}  status")
    for path in paths:
        limit_s, best = KNOWN.get(path.name.split(".")[0], (60, None))
        command = [sys.executable, __file__, str(path), "--one", "--budget", str(options.budget or limit_s)]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # peak memory is a process's own
        row = json.loads(ran.stdout.splitlines()[-1])
        row["above_best"] = None if best is None or row["cost"] is None else row["cost"] / best - 1
        rows.append(row)
        print(_line(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _line(row: dict) -> str:
    cost, above, first = row["cost"], row["above_best"], row["seconds_to_first"]
    gap = None if cost is None else (cost - row["bound"]) / max(abs(cost), 1e-15)
    return (
        f"{row['instance']:10} {'-' if cost is None else f'{cost:.0f}':>15} {row['bound']:>15.0f}"
        f" {'-' if above is None else f'{above:+.2%}':>10}"
        f" {'-' if cost is None else f'{gap:.2%}':>7}"
        f" {'-' if first is None else f'{first:.1f}':>6} {row['seconds']:>6.1f} {row['peak_rss_bytes'] / 1e9:>5.2f}"
        f"  {row['status']}"
    )


if __name__ == "__main__":
    main()
