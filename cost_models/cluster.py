"""Clusters: many devices of one kind and their wiring, from a short string or from what JAX says of them.

v5e:4x4        one TPU slice with a torus of 4 x 4 chips
2 x v5e:8x8    two such slices over the data-centre network
8xH100         one host with 8 GPUs
4x8xH100       4 such hosts
cpu:8          8 simulated devices on one CPU
my.toml        a cluster of one's own, from a file (`clusterfile.load_cluster`)
"""

from dataclasses import dataclass, replace
import math
import re

from .clusterfile import ClusterFileError, is_cluster_file, load_cluster
from .cpu import MEASURED, cpu_device
from .devices import ALIASES, DEVICE_KINDS, DEVICES, DeviceSpec
from .efficiency import shipped_tables
from .fabrics import HOST_SIZES, POD_CHIPS, STANDARD_SLICES, TORUS_DIMS, gpu_levels, tpu_levels
from .links import AxisPoints, Link, MeshLinks
from .topology import Level, axis_link, mesh_links, topology_dims

GRAMMAR = (
    "'v5e:4x4' (TPU slice), '2 x v5e:8x8' (slices), '8xH100' (host), '4x8xH100' (hosts), 'cpu:8' (simulated), "
    "'my.toml' (a file)"
)

_FIGURES = {
    "peak_flops_per_s": "peak rates",
    "memory_bytes": "memory",
    "usable_memory_bytes": "memory limit",
    "memory_bytes_per_s": "memory bandwidth",
    "matmul_efficiency": "matmul efficiency",
    "memory_efficiency": "memory efficiency",
    "op_overhead_s": "overhead per operation",
    "on_chip_bytes": "on-chip memory",
}


class ClusterError(ValueError):
    """A cluster that cannot be: the message names the text, the rule, and what to write instead."""


@dataclass(frozen=True)
class Cluster:
    """Many devices of one kind and their wiring.

    Attributes:
      name: the canonical cluster string; `parse_cluster(cluster.name)` gives it back, unless built by hand.
      device: what each device is.
      levels: the wiring, outermost level first (`topology.Level`).
      measured: times of collectives that were measured on it (`profile.calibrate`), instead of the wiring's figures.
    """

    name: str
    device: DeviceSpec
    levels: tuple[Level, ...]
    measured: tuple[AxisPoints, ...] = ()

    @property
    def dims(self) -> tuple[int, ...]:
        """Sizes of all levels, outermost first; devices are numbered over them in row-major order."""
        return topology_dims(self.levels)

    @property
    def num_devices(self) -> int:
        return math.prod(self.dims)

    @property
    def num_groups(self) -> int:
        """Hosts of a GPU cluster or slices of a TPU cluster: what a network, not a fast link, connects."""
        return math.prod(level.sizes[0] for level in self.levels if level.kind == "network")

    def __post_init__(self) -> None:
        kinds = [level.kind for level in self.levels]
        if not kinds or kinds[-1] == "network" or any(kind != "network" for kind in kinds[:-1]):
            raise ClusterError(
                f"cluster {self.name!r}: networks first, one torus, switch or shared memory last"
            )
        if kinds[-1] == "shared-memory" and len(kinds) > 1:
            raise ClusterError(
                f"cluster {self.name!r}: simulated devices share one machine, without a network"
            )

    def mesh(self, shape: tuple[int, ...]) -> MeshLinks:
        """The links of a mesh of `shape`, laid over the devices in row-major order (last axis: neighbours).

        Raises:
          ValueError: the product of `shape` is not `num_devices`.

        >>> parse_cluster("v5e:4x4").mesh((4, 4)).links[1].description
        'ICI torus dim 1 (4, line)'
        """
        mesh = mesh_links(self.levels, tuple(shape))
        if not self.measured:
            return mesh
        strides = [math.prod(mesh.shape[axis + 1 :]) for axis in range(len(mesh.shape))]
        links = (self._with_points(link, stride) for link, stride in zip(mesh.links, strides, strict=True))
        groups = (
            (axes, self._with_points(link, strides[axes[-1]]) if len(axes) == axes[-1] - axes[0] + 1 else link)
            for axes, link in mesh.groups
        )
        return MeshLinks(mesh.shape, tuple(links), tuple(groups))

    def axes(self) -> tuple[tuple[int, int], ...]:
        """(size, stride) of every mesh axis of 2 or more devices that there can be; one of those that cost the same.

        >>> parse_cluster("8xH100").axes(), parse_cluster("2x2xH100").axes()
        (((2, 1), (4, 1), (8, 1)), ((2, 1), (2, 2), (4, 1)))
        """
        count, found = self.num_devices, {}
        for size in (size for size in range(2, count + 1) if count % size == 0):
            for stride in (stride for stride in range(1, count // size + 1) if count // size % stride == 0):
                found.setdefault(axis_link(self.levels, size, stride).cost_key, (size, stride))
        return tuple(found.values())

    def _with_points(self, link: Link, stride: int) -> Link:
        """The link with what was measured along it, or along axes that cost the same."""
        rows = [row for row in self.measured if row.size == link.size]
        strides = sorted({row.stride for row in rows}, key=lambda other: (other != stride, other))
        for other in strides:
            if other == stride or axis_link(self.levels, link.size, other).cost_key == link.cost_key:
                points = {p.kind: p for p in link.points} | {r.points.kind: r.points for r in rows if r.stride == other}
                return replace(link, points=tuple(points.values()))
        return link

    def describe_sources(self) -> tuple[tuple[str, str], ...]:
        """Where the figures come from: pairs of (figures, source), for reports; figures of one source together.

        >>> parse_cluster("8xH100").describe_sources()[0]
        ('peak rates', 'NVIDIA H100 data sheet (SXM5 80GB HBM3); dense rates, half of those quoted with sparsity')
        """
        device, found = self.device, dict(self.device.sources)
        if device.stream:
            found.pop("memory_bytes_per_s", None)
            found.pop("memory_efficiency", None)
        rows = [(_FIGURES.get(figure, figure), source) for figure, source in found.items()]
        rows += [(f"{table.operation}s by shape ({table.dtype})", table.source) for table in device.tables]
        rows += [("streaming by size", device.stream.source)] if device.stream else []
        rows += [(f"collectives over {row.size} devices", row.points.source) for row in self.measured]
        if {(row.size, row.stride) for row in self.measured} < set(self.axes()):
            rows += [(level.name, level.source) for level in self.levels]
        merged: dict[str, dict[str, None]] = {}
        for figure, source in rows:
            merged.setdefault(source, {})[figure] = None
        return tuple((", ".join(figures), source) for source, figures in merged.items())

    def mesh_shapes(self, max_axes: int = 3) -> tuple[tuple[int, ...], ...]:
        """All meshes of the devices with up to `max_axes` axes, fewest axes first, then ascending.

        Every axis has at least 2 devices, except the only shape of a single device, (1,). Of shapes that
        differ only in the order of their axes, and whose axes get the same links, the first is kept: on a
        switch 2x4 and 4x2 are one choice, on a torus they may be two.
        """
        if max_axes < 1:
            raise ValueError(f"max_axes must be at least 1, got {max_axes}")
        if self.num_devices == 1:
            return ((1,),)
        seen, shapes = set(), []
        for axes in range(1, max_axes + 1):
            for shape in _factorizations(self.num_devices, axes):
                key = tuple(sorted(link.cost_key for link in self.mesh(shape).links))
                if key not in seen:
                    seen.add(key)
                    shapes.append(shape)
        return tuple(shapes)


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` describes (see the module's text for the grammar; case and spaces are free).

    Raises:
      ClusterError: the text does not follow the grammar, or names a device or a shape that does not exist; or the
        file is wrong.

    >>> parse_cluster("4x8xH100").num_devices
    32
    """
    if is_cluster_file(str(text)):
        try:
            return Cluster(*load_cluster(str(text).strip()))
        except ClusterFileError as error:
            raise ClusterError(str(error)) from None
    compact = re.sub(r"\s+", "", str(text))
    colon = re.fullmatch(r"(?:(-?\d+)x)?([a-z][\w.-]*):([-\dx.]+)", compact, re.IGNORECASE)
    gpus = re.fullmatch(r"((?:-?\d+x)*)([a-z][\w.-]*)", compact, re.IGNORECASE)
    if colon:
        return _parse_colon(text, colon[1], colon[2], colon[3])
    if gpus:
        return _parse_gpus(text, [int(number) for number in gpus[1].split("x")[:-1]], gpus[2])
    raise ClusterError(f"cluster {text!r} is not understood. Write {GRAMMAR}. Known devices: {_known()}.")


def cluster_of(device_kind: str, platform: str, count: int, hosts: int = 1, slices: int = 1) -> Cluster:
    """The cluster behind `count` JAX devices, from what JAX says of them.

    TPU devices carry no slice shape here, so the standard shape for the count is taken, and a line for a
    count without one (part of a slice). GPUs are split evenly over `hosts`; simulated CPU devices share one
    machine.

    Args:
      device_kind: `jax.Device.device_kind`.
      platform: `jax.Device.platform`: "tpu", "gpu" (or "cuda", "rocm") or "cpu".
      count: number of devices, >= 1.
      hosts: number of processes or hosts that they belong to (`len({d.process_index for d in devices})`).
      slices: TPU slices (`len({d.slice_index for d in devices})`).
    Raises:
      ClusterError: an unknown kind, or a count that cannot be split so.

    >>> cluster_of("TPU v5 lite", "tpu", 16, 2).name
    'v5e:4x4'
    """
    if count < 1 or hosts < 1 or slices < 1:
        raise ClusterError(f"a cluster has at least 1 device, host and slice, got {count}, {hosts}, {slices}")
    if platform == "cpu":
        return _cpu_cluster(count)
    name = DEVICE_KINDS.get(device_kind)
    if name is None:
        known = ", ".join([*DEVICE_KINDS, "cpu"])
        raise ClusterError(
            f"no figures for {platform} devices of kind {device_kind!r}; known: {known}. "
            f"Say what to plan for, as in cluster='8xH100', or build a Cluster with your own DeviceSpec."
        )
    groups = slices if name in TORUS_DIMS else hosts
    if count % groups:
        what = "slices" if name in TORUS_DIMS else "hosts"
        raise ClusterError(
            f"{count} devices of kind {device_kind!r} do not divide over {groups} {what}: "
            f"use the same number on each, or pass cluster=... explicitly"
        )
    inside = count // groups
    if name in TORUS_DIMS:
        line = (1,) * (TORUS_DIMS[name] - 1) + (inside,)
        return _tpu_cluster(name, groups, STANDARD_SLICES[name].get(inside, line))
    limit = HOST_SIZES[name]
    if inside > limit:
        raise ClusterError(
            f"{inside} devices of kind {device_kind!r} on one host, but {name} hosts hold up to {limit}: "
            f"pass cluster='{-(-inside // limit)}x{limit}x{name}' or as the machine is wired"
        )
    return _gpu_cluster(name, groups, inside)


def _parse_colon(text: str, slices: str | None, word: str, shape: str) -> Cluster:
    name = _device_name(text, word, ("tpu", "cpu"))
    sizes = [int(part) if part.isdigit() else 0 for part in shape.split("x")]
    count = 1 if slices is None else int(slices)
    if min(sizes) < 1 or count < 1:
        raise ClusterError(f"cluster {text!r}: every number must be a whole one, at least 1, as in {GRAMMAR}")
    if name == "cpu":
        if slices is not None or len(sizes) != 1:
            raise ClusterError(
                f"cluster {text!r}: simulated devices are one flat group on one machine; "
                f"write 'cpu:{math.prod(sizes) * count}'"
            )
        return _cpu_cluster(sizes[0])
    _check_slice(text, name, tuple(sizes))
    return _tpu_cluster(name, count, tuple(sizes))


def _check_slice(text: str, name: str, dims: tuple[int, ...]) -> None:
    """Whether TPU slices of this shape exist, as libtpu and Cloud TPU have them."""
    want, chips = TORUS_DIMS[name], math.prod(dims)
    known = ", ".join(_join(shape) for shape in STANDARD_SLICES[name].values())
    if len(dims) != want:
        hint = STANDARD_SLICES[name].get(chips)
        advice = f"; for {chips} chips write '{name}:{_join(hint)}'" if hint else ""
        raise ClusterError(
            f"cluster {text!r}: {name} slices have {want} torus dims, got {len(dims)}{advice}. "
            f"Usual shapes: {known}."
        )
    if chips > POD_CHIPS[name]:
        raise ClusterError(
            f"cluster {text!r}: {name} pods have {POD_CHIPS[name]} chips, got {chips}; "
            f"for more, use several slices, as in '2 x {name}:{_join(max(STANDARD_SLICES[name].values()))}'"
        )
    if math.prod(dims[:-1]) == 1:
        return  # a line: part of a slice
    if want == 2 and any(dim not in (1, 2, 4, 8, 16) for dim in dims):
        rule = "dims of 1, 2, 4, 8 or 16"
    elif want == 3 and any(dim not in (1, 2, 4) for dim in dims) and any(dim % 4 for dim in dims):
        rule = "dims of 1, 2 or 4, or, beyond one cube, all multiples of 4"
    else:
        return
    raise ClusterError(f"cluster {text!r}: {name} slices have {rule}. Usual shapes: {known}.")


def _parse_gpus(text: str, numbers: list[int], word: str) -> Cluster:
    name = _device_name(text, word, ("gpu",))
    if any(number < 1 for number in numbers):
        raise ClusterError(f"cluster {text!r}: every number must be at least 1, as in {GRAMMAR}")
    if len(numbers) > 2:
        raise ClusterError(f"cluster {text!r}: write hosts x GPUs per host x device, as in '4x8x{name}'")
    hosts, inside = ([1, 1] + numbers)[-2:]
    limit = HOST_SIZES[name]
    if inside > limit:
        total = hosts * inside
        advice = f"'{total // limit}x{limit}x{name}'" if total % limit == 0 else f"'HOSTSx{limit}x{name}'"
        raise ClusterError(
            f"cluster {text!r}: {name} hosts have up to {limit} GPUs, got {inside}; "
            f"for several hosts write {advice}"
        )
    return _gpu_cluster(name, hosts, inside)


def _device_name(text: str, word: str, platforms: tuple[str, ...]) -> str:
    """The canonical device that `word` names, if it is of one of the `platforms` of its notation."""
    names = {"cpu": "cpu"} | {known: known for known in DEVICES} | ALIASES
    name = {spelling.lower(): known for spelling, known in names.items()}.get(word.lower())
    if name is None:
        raise ClusterError(
            f"cluster {text!r}: unknown device {word!r}. Known devices: {_known()}. Write {GRAMMAR}."
        )
    platform = "cpu" if name == "cpu" else DEVICES[name].platform
    if platform not in platforms:
        example = _example(name, platform)
        raise ClusterError(f"cluster {text!r}: {name} is a {platform.upper()}; write it as {example}")
    return name


def _example(name: str, platform: str) -> str:
    if platform == "cpu":
        return "'cpu:8'"
    if platform == "gpu":
        return f"'8x{name}' or '4x8x{name}'"
    return f"'{name}:{_join(STANDARD_SLICES[name][16])}'"


def _tpu_cluster(name: str, slices: int, dims: tuple[int, ...]) -> Cluster:
    prefix = f"{slices} x " if slices > 1 else ""
    device = DEVICES[name]
    device = replace(device, tables=shipped_tables(name, device.peak_flops_per_s))
    return Cluster(f"{prefix}{name}:{_join(dims)}", device, tpu_levels(name, slices, dims))


def _gpu_cluster(name: str, hosts: int, inside: int) -> Cluster:
    prefix = f"{hosts}x" if hosts > 1 else ""
    return Cluster(f"{prefix}{inside}x{name}", DEVICES[name], gpu_levels(name, hosts, inside))


def _cpu_cluster(count: int) -> Cluster:
    memory = Level("shared-memory", "shared memory", (count,), (False,), 1.0, 0.0, 0.0, MEASURED)
    return Cluster(f"cpu:{count}", cpu_device(count), (memory,))


def _factorizations(count: int, axes: int) -> list[tuple[int, ...]]:
    """All ordered factorizations of `count` into `axes` factors above 1, ascending."""
    if axes == 1:
        return [(count,)] if count > 1 else []
    heads = (size for size in range(2, count) if count % size == 0)
    return [(head, *tail) for head in heads for tail in _factorizations(count // head, axes - 1)]


def _join(dims: tuple[int, ...]) -> str:
    return "x".join(str(dim) for dim in dims)


def _known() -> str:
    return ", ".join([*DEVICES, "cpu"])
