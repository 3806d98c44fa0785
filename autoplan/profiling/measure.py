"""Times the programs of a profile, one after the other, saving after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
import datetime
from pathlib import Path
import platform
import statistics
import time

import jax
import numpy as np

from ..cost_models import Cluster, Measurement, Profile
from . import store
from .programs import Sizes, Task, build, tasks

_WARM_UP = 2
_LONG_S = 1.0  # of repetitions that take longer all together, only three are made


def new_profile(cluster: Cluster, devices: Sequence[jax.Device]) -> Profile:
    """An empty profile of a cluster whose devices these are."""
    jax_version, jaxlib_version = store.jax_versions()
    kind = devices[0].device_kind
    where = f"{processor()}, {store.cores()} cores" if cluster.device.platform == "cpu" else kind
    return Profile(
        cluster=cluster.name,
        device_kind=kind,
        count=len(devices),
        jax=jax_version,
        jaxlib=jaxlib_version,
        machine=where,
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def measure(
    profile: Profile,
    cluster: Cluster,
    devices: Sequence[jax.Device],
    wanted: Sizes,
    *,
    complete: str,
    path: Path,
    shown: Callable[[int, int, str], None],
) -> Profile:
    """Measures what `wanted` asks and the profile lacks, saving it at `path` after every measurement.

    Args:
      profile: what is there already; `new_profile` to begin.
      devices: the cluster's, in its order; all work at once.
      complete: what the profile is in the end, "quick" or "full".
      shown: called with (number done, number of all, what is next) before each measurement and at the end.
    Returns:
      The profile with all rows.
    """
    order = np.empty(len(devices), dtype=object)
    order[:] = devices
    there = {row.key for row in profile.rows}
    todo = tasks(cluster, wanted)
    done = sum(task.key in there for task in todo)
    for task in todo:
        if task.key in there:
            continue
        shown(done, len(todo), described(task))
        profile = replace(profile, rows=(*profile.rows, time_task(task, order, wanted.repeats)))
        store.save(profile, path)
        done += 1
    shown(done, len(todo), "done")
    rank = ("", "quick", "full")
    profile = replace(profile, complete=max(profile.complete, complete, key=rank.index))
    store.save(profile, path)
    return profile


def time_task(task: Task, devices: np.ndarray, repeats: int) -> Measurement:
    """Median and spread of the seconds that one operation of a task takes."""
    run, arguments = build(task, devices)
    for _ in range(_WARM_UP):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
    repeats = repeats if (time.perf_counter() - begin) * repeats < _LONG_S else 3
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append((time.perf_counter() - begin) / task.chain)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Measurement(
        what=task.what,
        dtype=task.dtype,
        dims=task.dims,
        axis_size=task.axis_size,
        stride=task.stride,
        bytes=float(task.bytes),
        time_s=float(f"{median:.4g}"),
        spread=float(f"{(high - low) / median:.2g}"),
        repeats=repeats,
    )


def described(task: Task | Measurement) -> str:
    """What a task measures, in a few words."""
    if task.dims:
        return f"{task.what} {task.dtype} {' x '.join(map(str, task.dims))}"
    if task.axis_size:
        apart = f", {task.stride} apart" if task.stride > 1 else ""
        return f"{task.what} over {task.axis_size} devices{apart}"
    return task.what


def processor() -> str:
    """The processor's name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine() or "unknown processor")
