"""The examples and the benchmark run, in small, as a user runs them."""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["--width", "32", "--layers", "1", "--length", "16", "--batch", "8", "--steps", "3", "--rounds", "1"]


def run(*command: str, **environment: str) -> str:
    """Standard output of a command that must succeed. The script chooses its devices by itself."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.endtoend
def test_gpt_trains_alike_on_8_devices_and_on_one(tmp_path: Path) -> None:
    shown = run(sys.executable, "examples/gpt.py", *SMALL, "--json", str(tmp_path / "result.json"))
    result = json.loads((tmp_path / "result.json").read_text())
    assert "8 devices" in shown and "1 device" in shown
    assert len(result["parallel_losses"]) == len(result["single_losses"]) == 3
    assert result["parallel_losses"] == pytest.approx(result["single_losses"], abs=1e-4)
    assert [row["layout"] for row in result["layouts"]] == ["chosen", "data", "fsdp", "tensor"]
    assert all(row["step_time_s"] > 0 for row in result["layouts"])
    chosen, *classic = (row["predicted_step_time_s"] for row in result["layouts"])
    assert chosen <= min(classic) * (1 + 1e-6)


@pytest.mark.slow
def test_gpt_is_planned_from_the_command_line() -> None:
    shown = run(
        sys.executable,
        "-m",
        "autoplan",
        "plan",
        "examples/gpt.py:train_step",
        "--cluster",
        "v5e:2x2",
        "--layout",
        "data",
    )
    assert shown.startswith("train_step on v5e:2x2")


@pytest.mark.slow
def test_the_benchmark_writes_its_rows(tmp_path: Path) -> None:
    shown = run(
        sys.executable, "tests/benchmarks/plan_time.py", "--smoke", "--json", str(tmp_path / "rows.json")
    )
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    wanted = {
        "model",
        "layers",
        "mesh",
        "phases_s",
        "total_s",
        "peak_rss_bytes",
        "step_time_s",
        "peak_memory_bytes",
    }
    assert wanted <= row.keys()
    assert sum(row["phases_s"].values()) == pytest.approx(row["total_s"], rel=0.2)
    assert row["model"] in shown
