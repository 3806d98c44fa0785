"""`autoplan profile`: measures the devices at hand, shows and stores what they reach."""

from __future__ import annotations

import os
from pathlib import Path
import re
import sys

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import devices as places
from ..cost_models import WHATS, Cluster, Measurement, Profile, ProfileError
from ..errors import DeviceError
from ..units import format_bytes, format_time
from . import measure, store
from .programs import Sizes, sizes

INTERRUPTED = 130
_COUNT_FLAG = "--xla_force_host_platform_device_count"
_WIDTH = 110


def run(cluster: str | None, *, quick: bool, as_json: bool, clear: bool) -> int:
    """Runs the command and returns its exit code.

    Args:
      cluster: what the devices are; None is all that JAX has. "cpu:8" simulates them.
      quick: fewer sizes and repetitions.
      as_json: print the profile file instead of a table.
      clear: remove the stored profile instead.
    Raises:
      DeviceError: the devices at hand are not those of the cluster, or the profile cannot be written.
      ClusterError: nothing is known of the devices at hand.
    """
    described, found = _devices_of(cluster, needed=not clear)
    path = store.profile_path(described)
    if clear:
        print(f"removed {path}" if path.exists() else f"there is no profile at {path}", file=sys.stderr)
        path.unlink(missing_ok=True)
        return 0
    wanted, complete = sizes(described.device.platform, quick), "quick" if quick else "full"
    _warn_of_load(described)
    try:
        before = _stored(path, described) or measure.new_profile(described, found)
        profile = _measured(before, described, found, wanted, complete, path)
    except KeyboardInterrupt:
        print(f"\nautoplan profile: stopped. Run it again to go on; {path} keeps what was measured", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        raise DeviceError(
            "a profile must be kept",
            got=f"{error.strerror} at {path}",
            action=f"Set {store.CACHE_VARIABLE} to a folder that can be written",
        ) from error
    if as_json:
        print(profile.to_json(), end="", flush=True)
    else:
        show(profile, Console(width=None if sys.stdout.isatty() else _WIDTH))
        again = " All of it was there already; --clear removes it." if profile.rows == before.rows else ""
        print(f"Kept at {path}: plans for {described.name} use it from now on.{again}")
    return 0


def _devices_of(cluster: str | None, needed: bool) -> tuple[Cluster, tuple[jax.Device, ...]]:
    """The cluster, without any profile, and its devices; these only if `needed`."""
    if cluster is None:
        target = places.resolve(None, profiles=False)
        return target.cluster, target.devices
    wanted = places.resolve(cluster, profiles=False).cluster
    if not needed:
        return wanted, ()
    if wanted.device.platform == "cpu":
        _simulate(wanted.num_devices)
    found = places.ordered_devices()
    kind, count = found[0].platform, len(found)
    kind = "gpu" if kind in ("cuda", "rocm") else kind
    simulated = kind == "cpu" and count >= wanted.num_devices
    if kind != wanted.device.platform or not (simulated or count == wanted.num_devices):
        raise DeviceError(
            f"profiling {wanted.name} needs its {wanted.num_devices} {wanted.device.platform} devices",
            got=f"{count} {kind} device{'s' * (count != 1)} ({found[0].device_kind})",
            action="Run it on that cluster, or leave --cluster out to profile the devices at hand",
        )
    return wanted, found[: wanted.num_devices]


def _simulate(count: int) -> None:
    """Makes JAX have `count` simulated devices, unless it has started already."""
    flags = re.sub(rf"{_COUNT_FLAG}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = f"{flags} {_COUNT_FLAG}={count}".strip()
    jax.config.update("jax_platforms", "cpu")


def _warn_of_load(cluster: Cluster) -> None:
    """Simulated devices share the processor with whatever else runs on it."""
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if cluster.device.platform == "cpu" and sys.stderr.isatty() and busy > max(1, store.cores() / 2):
        print(
            f"autoplan profile: the load is {busy:.1f} on {store.cores()} cores: beside other programs, times are long",
            file=sys.stderr,
        )


def _stored(path: Path, cluster: Cluster) -> Profile | None:
    """The profile to go on with, finished or not; one that cannot be read is begun anew."""
    try:
        profile = Profile.from_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ProfileError, UnicodeDecodeError) as error:
        print(f"autoplan profile: {path} is measured anew: {error}", file=sys.stderr)
        return None
    return profile if profile.fits(cluster) else None


def _measured(
    profile: Profile,
    cluster: Cluster,
    found: tuple[jax.Device, ...],
    wanted: Sizes,
    complete: str,
    path: Path,
) -> Profile:
    """The profile with what is wanted, under a progress bar if stderr is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        bar = progress.add_task("measuring", total=None)

        def shown(done: int, total: int, what: str) -> None:
            progress.update(bar, completed=done, total=total, description=f"{what:44}")

        return measure.measure(profile, cluster, found, wanted, complete=complete, path=path, shown=shown)


def show(profile: Profile, console: Console) -> None:
    """Prints a profile as a table: for each measurement its time, how far it spreads, and the rate."""
    table = Table(title=f"{profile.cluster}: {profile.source}, {profile.complete}", title_justify="left", box=None)
    for heading in ("measured", "bytes", "time", "spread", "rate per device"):
        table.add_column(heading, justify="left" if heading == "measured" else "right")
    for row in sorted(profile.rows, key=lambda row: (_place(row), row.dtype, row.dims, row.axis_size, row.bytes)):
        size = format_bytes(row.bytes) if row.bytes else ""
        table.add_row(measure.described(row), size, format_time(row.time_s), f"{row.spread:.0%}", _rate(row))
    console.print(table)


def _place(row: Measurement) -> int:
    return WHATS.index(row.what)


def _rate(row: Measurement) -> str:
    if row.what == "dispatch":
        return ""
    if row.flops:
        return f"{row.flops / row.time_s / 1e9:.3g} GFLOP/s"
    return f"{row.bytes / row.time_s / 1e9:.3g} GB/s"
