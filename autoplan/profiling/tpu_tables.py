"""Makes `cost_models/tables/tpu_matmul.json`: what matmuls take on TPUs, as the TPU compiler itself estimates it.

    python -m autoplan.profiling.tpu_tables [--output PATH]

Needs libtpu (`pip install autoplan[tpu-aot]`), no TPU. Every matmul is compiled ahead of time for one chip of each
generation; the compiled text gives, with every fusion, the `estimated_cycles` by which the compiler chose its tiling.
Seconds are the cycles of all fusions over the clock. They contain what the fusion waits for its operands in HBM.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import datetime
import importlib.metadata
import itertools
import json
import os
from pathlib import Path
import re
import sys
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

_CLOCKS_HZ = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
_TOPOLOGIES: dict[str, dict[str, Any]] = {
    "v4": {"topology_name": "v4:2x2x1", "chip_config_name": "megacore"},  # JAX sees both cores as one device
    "v5e": {"topology_name": "v5e:2x2"},
    "v5p": {"topology_name": "v5p:2x2x1"},
    "v6e": {"topology_name": "v6e:2x2"},
}
_ROWS, _COLUMNS = (8, 128, 1024, 8192), (128, 1024, 8192)
_DTYPES = ("bfloat16", "float32")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_time_s(device: Any, clock_hz: float, dims: Sequence[int], dtype: str) -> float:
    """Seconds that the compiler estimates for one matmul [m, k] x [k, n] on a described `device`.

    Raises:
      RuntimeError: the compiled text has no estimate.
    """
    m, k, n = dims
    place = SingleDeviceSharding(device)
    matmul = jax.jit(lambda a, b: a @ b, in_shardings=(place, place), out_shardings=place)
    shapes = (jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype))
    cycles = [int(number) for number in _CYCLES.findall(matmul.lower(*shapes).compile().as_text())]
    if not sum(cycles):
        raise RuntimeError(f"no estimated_cycles in the compiled {dtype} matmul {m} x {k} x {n}")
    return sum(cycles) / clock_hz


def make_tables() -> dict[str, Any]:
    """The file's content: for each chip and dtype, rows of (m, k, n, seconds)."""
    from jax.experimental import topologies  # loads libtpu's plugin

    devices: dict[str, dict[str, list]] = {}
    for name, topology in _TOPOLOGIES.items():
        device = topologies.get_topology_desc(platform="tpu", **topology).devices[0]
        tables = devices[name] = {dtype: [] for dtype in _DTYPES}
        for dtype, *dims in itertools.product(_DTYPES, _ROWS, _COLUMNS, _COLUMNS):
            time_s = estimated_time_s(device, _CLOCKS_HZ[name], dims, dtype)
            tables[dtype].append([*dims, float(f"{time_s:.4g}")])
            print(f"{name} {dtype} {dims}: {time_s * 1e6:.1f} us", file=sys.stderr, flush=True)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("libtpu", "jax"))
    source = (
        f"XLA:TPU's estimated_cycles of single matmuls compiled ahead of time, over the chip's clock ({versions};"
        f" {datetime.date.today()}; python -m autoplan.profiling.tpu_tables)"
    )
    return {"version": 1, "source": source, "clocks_hz": _CLOCKS_HZ, "devices": devices}


def main() -> None:
    default = Path(__file__).parents[2] / "cost_models" / "tables" / "tpu_matmul.json"
    parser = argparse.ArgumentParser(description="Makes the table of matmul times of TPUs.")
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
    jax.config.update("jax_platforms", "cpu")
    text = json.dumps(make_tables(), indent=1)
    rows = re.compile(r"\[\s+([\d.e+-]+),\s+([\d.e+-]+),\s+([\d.e+-]+),\s+([\d.e+-]+)\s+\]")
    options.output.write_text(rows.sub(r"[\1, \2, \3, \4]", text) + "\n")


if __name__ == "__main__":
    main()
