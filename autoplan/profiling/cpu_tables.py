"""Makes `cost_models/tables/cpu_matmul.json`: what matmuls take on simulated CPU devices, from a profile of them.

    autoplan profile --cluster cpu:8
    python -m autoplan.profiling.cpu_tables [--output PATH]

The tables stand in where a user has no profile of their own machine: how much slower thin matmuls are than square ones
differs less between machines than how fast they are.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
import re
import sys
from typing import Any

from ..cost_models import Profile, calibrate, parse_cluster
from . import store

DEVICES = 8


def make_tables(profile: Profile) -> dict[str, Any]:
    """The file's content: by operation and dtype, rows of (m, k, n, seconds) on one of all devices at work.

    Seconds are beyond what any operation costs (`DeviceSpec.op_overhead_s`).
    """
    device = calibrate(parse_cluster(profile.cluster), profile).device
    tables = {}
    for table in device.tables:
        if "profile" not in table.source:
            continue
        key = table.dtype if table.operation == "matmul" else f"{table.operation} {table.dtype}"
        tables[key] = []
        for dims, reached in zip(table.dims, table.efficiency, strict=True):
            time_s = 2.0 * math.prod(dims) / (device.peak(table.dtype) * reached)
            tables[key].append([*map(int, dims), float(f"{time_s:.4g}")])
    source = (
        f"autoplan profile --cluster {profile.cluster} on {profile.machine}, {profile.date[:10]}, jax {profile.jax}:"
        " medians (python -m autoplan.profiling.cpu_tables)"
    )
    return {"version": 1, "source": source, "devices": {"cpu": tables}}


def main() -> int:
    default = Path(__file__).parents[2] / "cost_models" / "tables" / "cpu_matmul.json"
    parser = argparse.ArgumentParser(description="Makes the table of matmul times of simulated CPU devices.")
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    profile = store.find_profile(parse_cluster(f"cpu:{DEVICES}"))
    if profile is None:
        print(f"there is no profile: run autoplan profile --cluster cpu:{DEVICES}", file=sys.stderr)
        return 1
    text = json.dumps(make_tables(profile), indent=1)
    rows = re.compile(r"\[\s+([\d.e+-]+),\s+([\d.e+-]+),\s+([\d.e+-]+),\s+([\d.e+-]+)\s+\]")
    options.output.write_text(rows.sub(r"[\1, \2, \3, \4]", text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
