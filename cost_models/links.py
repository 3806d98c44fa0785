"""What one mesh axis offers to collectives: plain numbers, already derived from the topology."""

from dataclasses import dataclass
from itertools import pairwise

COLLECTIVE_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class CollectivePoints:
    """Measured times of one kind of collective along one axis; between points time is linear in the payload.

    Attributes:
      kind: one of COLLECTIVE_KINDS.
      payload_bytes: ascending payloads (as `collectives.collective_time_s` defines them), at least two.
      time_s: the time of each.
      source: when, where and how it was measured.
    """

    kind: str
    payload_bytes: tuple[float, ...]
    time_s: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVE_KINDS:
            raise ValueError(f"unknown collective {self.kind!r}; known: {', '.join(COLLECTIVE_KINDS)}")
        if len(self.payload_bytes) < 2 or len(self.payload_bytes) != len(self.time_s):
            raise ValueError(f"measured {self.kind}: needs two or more payloads, each with a time")
        if any(b <= a for a, b in pairwise(self.payload_bytes)):
            raise ValueError(f"measured {self.kind}: payload_bytes must ascend")
        if min(self.time_s) < 0 or any(b < a for a, b in pairwise(self.time_s)):
            raise ValueError(f"measured {self.kind}: time_s must be >= 0 and must not fall with the payload")


@dataclass(frozen=True)
class AxisPoints:
    """Measured times of one kind of collective along axes of `size` devices, `stride` apart in the cluster's order."""

    size: int
    stride: int
    points: CollectivePoints


@dataclass(frozen=True)
class Link:
    """What the devices along one mesh axis have between them; rates are bytes per second that each sends.

    Every group of the axis works at once (that is how SPMD programs run), and rates account for it. Axes that
    share physical links (two axes inside one NVLink host, two parts of one torus dim, every pair of axes of
    the simulated CPU mesh) each get the links in full: collectives over them that run at the same time would
    slow one another down, which is for the caller to know. On a torus, axes over different dims share
    nothing.

    Attributes:
      size: devices along the axis.
      bytes_per_s: for ring collectives (all-gather, reduce-scatter, all-reduce), both ways if it can.
      exchange_bytes_per_s: for all-to-all (bounded by the bisection).
      shift_bytes_per_s: for a collective-permute to a neighbour.
      base_latency_s: paid once per collective.
      latency_s: of one step along the slowest link of the axis.
      gather_latency_s: of all the steps of one all-gather; twice that for an all-reduce.
      wraps: whether the axis closes to a ring over its own links.
      description: for reports, e.g. "ICI torus dim 1 (4, line)".
      points: measured times, which replace the formulas where present.
      torus: the sizes above 1 of the torus's dims if the axis runs over all of one, else ().
      extents: how many devices it covers along each dim of the topology, outermost first.
    """

    size: int
    bytes_per_s: float
    exchange_bytes_per_s: float
    shift_bytes_per_s: float
    base_latency_s: float
    latency_s: float
    gather_latency_s: float
    wraps: bool
    description: str
    points: tuple[CollectivePoints, ...] = ()
    torus: tuple[int, ...] = ()
    extents: tuple[int, ...] = ()

    def measured(self, kind: str) -> CollectivePoints | None:
        """The measured times for `kind`, or None where only formulas are known."""
        return next((points for points in self.points if points.kind == kind), None)

    @property
    def cost_key(self) -> tuple[float | bool | str, ...]:
        """What makes two links cost the same, whatever they are called."""
        measured = tuple((p.kind, p.payload_bytes, p.time_s) for p in self.points)
        rates = (self.bytes_per_s, self.exchange_bytes_per_s, self.shift_bytes_per_s)
        latencies = (self.base_latency_s, self.latency_s, self.gather_latency_s)
        return (self.size, *rates, *latencies, str(measured))


@dataclass(frozen=True)
class MeshLinks:
    """The links of a mesh: one per axis, in the axes' order. `links[i].size == shape[i]`.

    `groups` are pairs (axes, the link that they are together) of the sets of two or more axes over which one
    collective uses the links of all at once: on a torus, and where axes side by side are one longer axis.
    """

    shape: tuple[int, ...]
    links: tuple[Link, ...]
    groups: tuple[tuple[tuple[int, ...], Link], ...] = ()

    def __post_init__(self) -> None:
        assert self.shape == tuple(link.size for link in self.links), (self.shape, self.links)

    def together(self, axes: tuple[int, ...]) -> Link | None:
        """The link over several axes (ascending); None if a collective over them goes axis by axis."""
        return self.links[axes[0]] if len(axes) == 1 else dict(self.groups).get(axes)
