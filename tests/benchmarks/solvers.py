"""The planner's own problems: the search against HiGHS alone on the whole problem, same optimum and how much faster.

    python tests/benchmarks/solvers.py [--programs NAME ...] [--size small|large] [--json FILE]

Plans every program of the zoo on a mesh of 2 x 4 TPUs, keeps the largest problem that the planner asked to be solved
without a cutoff, and solves it three times with each, one after the other; seconds are medians.
"""

import argparse
import json
from pathlib import Path
import statistics
import sys
import time

sys.path.insert(0, str(Path(__file__).parent))

import zoo

import autoplan
from autoplan import planner
from autoplan.search import Problem, Solution, solve, solve_highs

GAP, TIMES = 1e-6, 3


def problems_of(name: str, size: str) -> list[Problem]:
    """What the planner asks to be solved for a program, without cutoffs."""
    seen: list[Problem] = []

    def recorded(problem: Problem, **options) -> Solution:
        if options.get("cutoff", float("inf")) == float("inf"):
            seen.append(problem)
        return solve(problem, **options)

    program = zoo.load(name, size)
    state, batch = program.arguments()
    planner.solve, kept = recorded, planner.solve
    try:
        autoplan.parallelize(program.step, cluster="v5e:2x4", mesh_shape=(2, 4)).plan(state, batch)
    finally:
        planner.solve = kept
    return seen


def row_of(name: str, size: str) -> dict:
    """Solves a program's largest problem with both."""
    problem = max(problems_of(name, size), key=lambda p: (p.num_rows > 0, sum(c.size for c in p.edge_costs)))
    ours, highs, found, wanted = [], [], None, None
    for _ in range(TIMES):
        start = time.perf_counter()
        found = solve(problem, gap=GAP)
        middle = time.perf_counter()
        wanted = solve_highs(problem, gap=GAP, budget_s=300)
        ours.append(middle - start)
        highs.append(time.perf_counter() - middle)
    return {
        "program": name,
        "nodes": problem.num_nodes,
        "edges": problem.num_edges,
        "rows": problem.num_rows,
        "seconds": statistics.median(ours),
        "highs_seconds": statistics.median(highs),
        "ratio": statistics.median(highs) / statistics.median(ours),
        "cost": found.cost,
        "highs_cost": wanted.cost,
        "same": abs(found.cost - wanted.cost) <= 3 * GAP * abs(wanted.cost),
        "highs_status": wanted.status.value,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=zoo.NAMES, default=zoo.NAMES)
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    rows = []
    print(f"{'program':22} {'nodes':>6} {'edges':>6} {'rows':>5} {'search s':>9} {'HiGHS s':>9} {'ratio':>6}  optimum")
    for name in options.programs:
        row = row_of(name, options.size)
        rows.append(row)
        same = "same" if row["same"] else f"{row['cost']:.9g}, HiGHS {row['highs_cost']:.9g} ({row['highs_status']})"
        print(
            f"{name:22} {row['nodes']:>6} {row['edges']:>6} {row['rows']:>5} {row['seconds']:>9.3f}"
            f" {row['highs_seconds']:>9.3f} {row['ratio']:>6.1f}  {same}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"median ratio {statistics.median(row['ratio'] for row in rows):.1f}")


if __name__ == "__main__":
    main()
