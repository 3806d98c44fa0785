"""Profiles: what was measured on the devices of one cluster, as versioned JSON, and what it changes in its figures.

`autoplan profile` makes them (measuring needs JAX and is in `autoplan.profiling`). `calibrate` puts a profile's
figures in the place of data sheets and built-in constants:

  op_overhead_s   the median time of the smallest elementwise operation
  tables          efficiency = flops / (peak(dtype) own_s), by shape, operation and dtype
  stream          own_s of copies, elementwise operations and reductions, by bytes read and written
  measured        times of collectives, by kind, axis and payload

with own_s = time_s - op_overhead_s, at least half of time_s. Times that fall with the size, which is noise, are
levelled by isotonic regression of their logarithms. The peak of a simulated device is the best rate that was
measured, and of other dtypes in proportion to float32's; an accelerator keeps its data sheet's, and
`matmul_efficiency` is the best fraction of it.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass, fields, replace
import json
import math
import statistics

import numpy as np
from scipy.optimize import isotonic_regression

from .cluster import Cluster
from .devices import DeviceSpec
from .efficiency import OPERATIONS, MatmulTable, StreamTable
from .links import COLLECTIVE_KINDS, AxisPoints, CollectivePoints

FORMAT, VERSION = "autoplan profile", 1
STREAMING = ("elementwise", "copy", "reduce")
WHATS = ("dispatch", *STREAMING, *OPERATIONS, *COLLECTIVE_KINDS)
# Measured in a chain with one more small operation after each, which hands on the dependence.
_CHAINED = ("reduce", *OPERATIONS, "all-gather", "reduce-scatter")


class ProfileError(ValueError):
    """A text that is no profile, or one that does not fit."""


@dataclass(frozen=True)
class Measurement:
    """One measurement, with all devices at work at once.

    Attributes:
      what: one of WHATS.
      dtype: of the operands, by name.
      dims: (m, k, n) of a matmul, or of the one that a convolution amounts to, on each device; else ().
      axis_size, stride: of a collective: devices in a group, and how far apart they are; else 0.
      bytes: what each device reads and writes, or the payload of a collective as `collective_time_s` has it.
      time_s: median over `repeats` runs after warm-up, per operation.
      spread: interquartile range over the median.
      repeats: runs that were timed.
    """

    what: str
    dtype: str
    dims: tuple[int, ...]
    axis_size: int
    stride: int
    bytes: float
    time_s: float
    spread: float
    repeats: int

    def __post_init__(self) -> None:
        if self.what not in WHATS:
            raise ProfileError(f"unknown measurement {self.what!r}; known: {', '.join(WHATS)}")
        if not (0 < self.time_s < math.inf and self.spread >= 0 and self.bytes >= 0):
            raise ProfileError(f"measurement {self.key}: needs a positive time, a spread and bytes, got {self}")
        if self.what in OPERATIONS and (len(self.dims) != 3 or min(self.dims) < 1):
            raise ProfileError(f"measurement {self.key}: needs dims (m, k, n), got {self.dims}")
        if self.what in COLLECTIVE_KINDS and (self.axis_size < 2 or self.stride < 1):
            raise ProfileError(f"measurement {self.key}: needs an axis_size of 2 or more and a stride")

    @property
    def key(self) -> tuple:
        """What was measured, without what came out."""
        return (self.what, self.dtype, self.dims, self.axis_size, self.stride, float(self.bytes))

    @property
    def flops(self) -> float:
        return 2.0 * math.prod(self.dims) if self.dims else 0.0


@dataclass(frozen=True)
class Profile:
    """Measurements of one cluster.

    Attributes:
      cluster: `Cluster.name` of what was measured.
      device_kind: as JAX calls its devices.
      count: how many devices.
      jax, jaxlib: versions that they were measured with.
      machine: where: processor, cores, system.
      date: when it began, ISO 8601.
      complete: "quick" or "full", the most that has been measured to the end; "" while nothing has.
      rows: what was measured.
    """

    cluster: str
    device_kind: str
    count: int
    jax: str
    jaxlib: str
    machine: str
    date: str
    complete: str = ""
    rows: tuple[Measurement, ...] = ()

    @property
    def source(self) -> str:
        """For reports: what its figures are."""
        return f"profile of {self.date[:10]}, jax {self.jax}, {self.machine}"

    def fits(self, cluster: Cluster) -> bool:
        """Whether it is of this cluster: the same kind and number of devices, wired alike."""
        return (self.cluster, self.count) == (cluster.name, cluster.num_devices)

    def of(self, *whats: str) -> tuple[Measurement, ...]:
        """The measurements of some kinds."""
        return tuple(row for row in self.rows if row.what in whats)

    def to_json(self) -> str:
        """Versioned JSON, one measurement a line."""
        head = {"format": FORMAT, "version": VERSION, **{f.name: getattr(self, f.name) for f in fields(self)[:-1]}}
        lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in self.rows)
        return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """The profile of a text that `to_json` made.

        Raises:
          ProfileError: it is no profile, or of another version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ProfileError(f"it is no JSON ({error})") from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ProfileError("it is no autoplan profile")
        if (version := data.pop("version", None)) != VERSION:
            raise ProfileError(f"it has version {version}, and this autoplan reads version {VERSION}")
        try:
            rows = tuple(Measurement(**{**row, "dims": tuple(row["dims"])}) for row in data.pop("rows"))
            return cls(**data, rows=rows)
        except (TypeError, KeyError, AttributeError) as error:
            raise ProfileError(f"its content is not understood ({error})") from None


def calibrate(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with a profile's figures in place of data sheets and constants (see the module's text).

    Raises:
      ProfileError: the profile is of another cluster.
    """
    if not profile.fits(cluster):
        raise ProfileError(
            f"a profile of {profile.count} devices, {profile.cluster!r}, says nothing of {cluster.name!r}"
        )
    device = _calibrate_device(cluster.device, profile)
    return replace(cluster, device=device, measured=_axis_points(profile) or cluster.measured)


def _calibrate_device(device: DeviceSpec, profile: Profile) -> DeviceSpec:
    small = min(profile.of("elementwise"), key=lambda row: row.bytes, default=None)
    overhead_s = device.op_overhead_s if small is None else small.time_s
    changed = {} if small is None else {"op_overhead_s": overhead_s}
    best = {
        dtype: max(row.flops / _own_s(row, overhead_s) for row in profile.of("matmul") if row.dtype == dtype)
        for dtype in sorted({row.dtype for row in profile.of("matmul")})
    }
    if best and device.platform == "cpu":
        rates = dict(device.peak_flops_per_s)
        scale = best.get("float32", rates["float32"]) / rates["float32"]
        changed["peak_flops_per_s"] = tuple({dtype: best.get(dtype, scale * rates[dtype]) for dtype in rates}.items())
    elif best:
        reached = max(rate / device.peak(dtype) for dtype, rate in best.items())
        changed["matmul_efficiency"] = min(1.0, reached)
    sources = dict(device.sources) | dict.fromkeys(changed, profile.source)
    device = replace(device, **changed, sources=tuple(sources.items()))
    tables = {(table.operation, table.dtype): table for table in device.tables} | _tables(device, profile)
    return replace(device, tables=tuple(tables.values()), stream=_stream(device, profile) or device.stream)


def _tables(device: DeviceSpec, profile: Profile) -> dict[tuple[str, str], MatmulTable]:
    rows = defaultdict(dict)
    for row in profile.of(*OPERATIONS):
        own_s = _own_s(row, device.op_overhead_s)
        rows[row.what, row.dtype][row.dims] = row.flops / (device.peak(row.dtype) * own_s)
    return {
        (operation, dtype): MatmulTable(operation, dtype, tuple(found), tuple(found.values()), profile.source)
        for (operation, dtype), found in rows.items()
    }


def _stream(device: DeviceSpec, profile: Profile) -> StreamTable | None:
    """The median over kinds of streaming, at every size that is large enough to tell from the overhead."""
    times = defaultdict(list)
    for row in profile.of(*STREAMING):
        times[row.bytes].append(row.time_s - device.op_overhead_s * (1 + (row.what in _CHAINED)))
    found = {moved: statistics.median(own) for moved, own in sorted(times.items())}
    found = {moved: own_s for moved, own_s in found.items() if own_s > 0.5 * device.op_overhead_s}
    if len(found) < 2:
        return None
    return StreamTable(tuple(found), _level(list(found.values())), profile.source)


def _axis_points(profile: Profile) -> tuple[AxisPoints, ...]:
    overhead_s = min((row.time_s for row in profile.of("elementwise")), default=0.0)
    rows = defaultdict(dict)
    for row in profile.of(*COLLECTIVE_KINDS):
        own_s = _own_s(row, overhead_s) if row.what in _CHAINED else row.time_s
        rows[row.axis_size, row.stride, row.what][row.bytes] = own_s
    return tuple(
        AxisPoints(size, stride, CollectivePoints(kind, tuple(sizes), _level(list(sizes.values())), profile.source))
        for (size, stride, kind), found in sorted(rows.items())
        if len(sizes := dict(sorted(found.items()))) > 1
    )


def _own_s(row: Measurement, overhead_s: float) -> float:
    """What the operation takes beyond any operation's overhead; in a chain, beyond that of its follower too.

    A collective's own overhead is part of its time.
    """
    paid = (row.what not in COLLECTIVE_KINDS) + (row.what in _CHAINED)
    return max(row.time_s - paid * overhead_s, row.time_s / 2)


def _level(times_s: list[float]) -> tuple[float, ...]:
    """The nearest times, by their logarithms, that do not fall."""
    return tuple(np.exp(isotonic_regression(np.log(times_s)).x).tolist())
