"""Compiling a planned step ahead of time, for devices that need not be there.

The step is emitted on an abstract mesh, exported (`jax.export`) for the platform and compiled by a child process
(`child`) against a description of the devices: the TPU compiler of libtpu, the GPU compiler of JAX's CUDA plugin, or
simulated CPU devices. If there are CPU devices enough here, a plan for them is compiled in this process.

Generating code is nearly all of a TPU compilation's time, and no part of the answer: the optimised and scheduled
program and its memory are dumped before. The child is stopped as soon as they are there.
"""

from __future__ import annotations

from dataclasses import dataclass
import importlib.util
import json
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.export
from jax.sharding import AbstractMesh, AxisType, Mesh
import numpy as np

from ..cost_models import Cluster, parse_cluster
from ..errors import CompilerError, PlanError
from ..executable import build, compiler_options, jit_step
from ..plan import Plan
from ..trace import Trace

TPU_EXTRA = "pip install 'autoplan[tpu-aot]'"
GPU_EXTRA = "pip install 'autoplan[gpu-aot]'"
EXPORT_EXTRA = "pip install flatbuffers"

_POLL_S = 0.1
_DUMPED_PROGRAM = "*autoplan_step*after_optimizations_after_buffer_assignment.txt"
_DUMPED_MEMORY = "*autoplan_step*optimizations-buffer-assignment.txt"
_DUMPED_LAST = "*autoplan_step*memory-usage-report.txt"
_GPU_TARGETS = {"H100": "h100.txtpb"}


@dataclass(frozen=True)
class Compilation:
    """What the compiler made of a step: its HLO text, its memory per device, and how long it took.

    `log` is what it wrote to its standard error; None where that is this process's own.
    """

    text: str
    peak_memory_bytes: float
    compile_time_s: float
    log: str | None = None


def compile_plan(trace: Trace, plan: Plan, *, full: bool = False, timeout_s: float = 600) -> Compilation:
    """Compiles the emitted program for the plan's cluster.

    Args:
      full: let the compiler finish, code generation included; else it is stopped when its answer is known.
      timeout_s: after which compiling is given up.

    Raises:
      CompilerError: the compiler refuses the program.
      PlanError: what the platform needs is not installed.
    """
    cluster = parse_cluster(plan.cluster)
    platform = cluster.device.platform
    if platform == "cpu" and (mesh := _cpu_mesh(plan)) is not None:
        return _compile_here(trace, plan, mesh)
    _check_installed(platform)
    with tempfile.TemporaryDirectory(prefix="autoplan-verify-") as name:
        folder = Path(name)
        _write_request(folder, trace, plan, cluster)
        return _compile_in_child(folder, platform, plan.mesh.num_devices, full, timeout_s, trace.source)


def _cpu_mesh(plan: Plan) -> Mesh | None:
    """A mesh of this process's CPU devices, if there are enough."""
    devices = jax.devices("cpu")
    if len(devices) < plan.mesh.num_devices:
        return None
    chosen = np.empty(plan.mesh.num_devices, dtype=object)
    chosen[:] = devices[: plan.mesh.num_devices]
    axis_types = (AxisType.Auto,) * len(plan.mesh.axis_names)
    return Mesh(chosen.reshape(plan.mesh.axis_sizes), plan.mesh.axis_names, axis_types=axis_types)


def _compile_here(trace: Trace, plan: Plan, mesh: Mesh) -> Compilation:
    start_s = time.perf_counter()
    compiled = build(trace, plan, mesh).compiled
    memory = compiled.memory_analysis()
    sizes = {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
    return Compilation(compiled.as_text(), _peak(sizes), time.perf_counter() - start_s)


def _peak(sizes: dict[str, float]) -> float:
    return float(sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"])


def _check_installed(platform: str) -> None:
    def missing(module: str) -> bool:
        return importlib.util.find_spec(module) is None

    if platform == "tpu" and missing("libtpu"):
        raise PlanError("verifying a plan for TPUs needs the TPU compiler", got="no libtpu", action=f"Run {TPU_EXTRA}")
    if platform == "gpu" and missing("jax_cuda12_plugin"):
        raise PlanError(
            "verifying a plan for GPUs needs JAX's CUDA plugin", got="no plugin", action=f"Run {GPU_EXTRA}"
        )
    if missing("flatbuffers"):
        raise PlanError(
            "verifying a plan for other devices exports its program", got="no flatbuffers",
            action=f"Run {TPU_EXTRA if platform == 'tpu' else EXPORT_EXTRA}",
        )  # fmt: skip


def _write_request(folder: Path, trace: Trace, plan: Plan, cluster: Cluster) -> None:
    platform = {"gpu": "cuda"}.get(cluster.device.platform, cluster.device.platform)
    topology, options = _topology(cluster)
    request = {
        "platform": platform,
        "topology": topology,
        "topology_options": options,
        "axis_names": plan.mesh.axis_names,
        "axis_sizes": plan.mesh.axis_sizes,
        "in_specs": [leaf.spec for leaf in plan.inputs],
        "out_specs": [leaf.spec for leaf in plan.outputs],
        "donated": [i for i, leaf in enumerate(trace.inputs) if leaf.donated],
        "compiler_options": compiler_options(plan, cluster.device),
    }
    (folder / "request.json").write_text(json.dumps(request))
    (folder / "step.bin").write_bytes(_exported(trace, plan, platform))


def _exported(trace: Trace, plan: Plan, platform: str) -> bytes:
    """The emitted program on an abstract mesh, serialised for a platform."""
    names = plan.mesh.axis_names
    mesh = AbstractMesh(plan.mesh.axis_sizes, names, axis_types=(AxisType.Auto,) * len(names))
    jitted, avals = jit_step(trace, plan, mesh, donate=False)  # the child donates, where it compiles
    try:
        return bytes(jax.export.export(jitted, platforms=(platform,))(*avals).serialize())
    except (ValueError, NotImplementedError, TypeError) as error:
        raise PlanError(
            "a step is exported to be compiled for other devices", got=f"{type(error).__name__}: {error}",
            action="Callbacks and custom kernels cannot be exported; verify on the cluster itself", source=trace.source,
        ) from error  # fmt: skip


def _topology(cluster: Cluster) -> tuple[str, dict[str, Any]]:
    """(name, options) by which the compiler knows the cluster's devices."""
    device, dims = cluster.device, cluster.dims
    if device.platform == "gpu":
        if device.name not in _GPU_TARGETS:
            raise PlanError(
                "verifying without the GPU needs a description of it", got=f"none of {device.name}",
                action=f"Verify for {', '.join(_GPU_TARGETS)}",
            )  # fmt: skip
        target = (Path(__file__).parent / "targets" / _GPU_TARGETS[device.name]).read_text()
        return device.name.lower(), {"target_config": target, "topology": f"1x{cluster.num_groups}x{dims[-1]}"}
    if device.platform == "cpu":
        return "", {}
    options: dict[str, Any] = {"chip_config_name": "megacore"} if device.name == "v4" else {}
    if cluster.num_groups > 1:
        options["num_slices"] = cluster.num_groups
    return re.sub(r"^\d+ x ", "", cluster.name), options


def _compile_in_child(folder: Path, platform: str, num_devices: int, full: bool, timeout_s: float, source: str
                      ) -> Compilation:
    start_s = time.perf_counter()
    with (folder / "log.txt").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "autoplan.verification.child", str(folder)],
            env=_environment(folder, platform, num_devices),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
        try:
            while (done := _answer(folder, platform, full)) is None:
                if child.poll() is not None and (done := _answer(folder, platform, full)) is None:
                    raise _failure((folder / "log.txt").read_text(errors="replace"), source)
                if time.perf_counter() - start_s > timeout_s:
                    raise PlanError(
                        f"compiling must end within {timeout_s:g} s", got="no answer", action="Raise timeout_s"
                    )
                if done is not None:
                    break
                time.sleep(_POLL_S)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
    return Compilation(*done, time.perf_counter() - start_s, (folder / "log.txt").read_text(errors="replace"))


def _environment(folder: Path, platform: str, num_devices: int) -> dict[str, str]:
    """The child's: no devices but the CPU's, this process's packages, and dumps of the program."""
    dumps = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_module_re=.*autoplan_step.*"
    count = f"--xla_force_host_platform_device_count={num_devices}"
    if platform == "gpu":  # with no GPU to tune Triton's tiles on, some sizes find none: matmuls are cuBLAS's
        dumps += " --xla_gpu_enable_triton_gemm=false"
    own = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
        "XLA_FLAGS": dumps if platform != "cpu" else count,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "TPU_LIBRARY_PATH")}
    return kept | own


def _answer(folder: Path, platform: str, full: bool) -> tuple[str, float] | None:
    """(HLO text, peak memory) once they are written."""
    if (folder / "compiled.txt").exists():
        return (folder / "compiled.txt").read_text(), _peak(json.loads((folder / "memory.json").read_text()))
    if full or platform != "tpu":
        return None
    dumped = [next(folder.glob(f"dump/{name}"), None) for name in (_DUMPED_PROGRAM, _DUMPED_MEMORY, _DUMPED_LAST)]
    if None in dumped:
        return None
    text, memory, _ = (path.read_text() for path in dumped)
    return (text, allocated_bytes(memory)) if "\nENTRY " in text and text.rstrip().endswith("\n}") else None


def allocated_bytes(assignment: str) -> float:
    """Bytes of a device's main memory in XLA's dump of a buffer assignment.

    Its report of memory usage counts more: also what computations that are called have for themselves ("thread-local"),
    which are the caller's buffers once more (on chips with SparseCores, whole operands of offloaded gathers).
    """
    allocations = re.findall(r"^allocation \d+: size (\d+),(?: color (\d+),)?(.*)$", assignment, re.MULTILINE)
    return float(sum(int(size) for size, color, kind in allocations
                     if color in ("", "0") and "thread-local" not in kind))


def _failure(log: str, source: str) -> CompilerError:
    """What the compiler said: from the last error of the log on (or what killed it), else the last line."""
    errors = list(re.finditer(r"^(?:[\w.]*(?:Error|Exception|error): |F\d{4} )", log, re.MULTILINE))
    return CompilerError(log[errors[-1].start() :] if errors else log.rstrip().rpartition("\n")[2], source=source)
