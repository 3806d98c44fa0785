"""What a collective along one mesh axis costs: bytes on the wire, and seconds.

A payload is always the *full per-device buffer* of the collective, in bytes: the buffer of an all-reduce, the
output of an all-gather, the input of a reduce-scatter, the local buffer of an all-to-all or of a
collective-permute. Payloads may be arrays; results have their shape. With B the payload and n the size of the
axis, the ring formulas are those of

  P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. JPDC 69 (2009);
  R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH.
  IJHPCA 19 (2005); and, for tori, jax-ml.github.io/scaling-book (Sharded matrices and how to multiply them).

A collective over several axes uses the links of all at once where it can (`MeshLinks.together`); elsewhere it goes axis
by axis (`over_axes_s`).
"""

import numpy as np
from numpy.typing import ArrayLike

from .efficiency import linear
from .links import COLLECTIVE_KINDS, CollectivePoints, Link, MeshLinks


def wire_bytes(kind: str, axis_size: int, payload_bytes: ArrayLike) -> np.ndarray:
    """Bytes that each device sends in one collective over `axis_size` devices.

    all-reduce 2 (n-1)/n B; all-gather, reduce-scatter, all-to-all (n-1)/n B; collective-permute B; nothing if
    n = 1. These are the ring (and pairwise exchange) volumes, the least possible for each kind but the
    permute.

    Args:
      kind: one of COLLECTIVE_KINDS.
      axis_size: devices along the axis, n >= 1.
      payload_bytes: scalar or array of payloads, >= 0.
    Returns:
      A float64 array (0-d for a scalar) of `payload_bytes`'s shape.
    Raises:
      ValueError: an unknown kind, or n < 1.

    >>> float(wire_bytes("all-reduce", 4, 1e6))
    1500000.0
    """
    _check(kind, axis_size)
    payload = np.asarray(payload_bytes, np.float64)
    fraction = (axis_size - 1) / axis_size
    if kind == "all-reduce":
        return 2 * fraction * payload
    if kind == "collective-permute":
        return payload * (axis_size > 1)
    return fraction * payload


def collective_time_s(kind: str, link: Link, axis_size: int, payload_bytes: ArrayLike) -> np.ndarray:
    """Seconds that one collective along `link` takes, with every group of the axis at work.

    With w = `wire_bytes(...)`, l0 = `link.base_latency_s`, L = `link.gather_latency_s`:

      all-gather, reduce-scatter   l0 + L + w / bytes_per_s
      all-reduce                   l0 + 2 L + w / bytes_per_s           (a reduce-scatter, then an all-gather)
      all-to-all                   l0 + L + w / exchange_bytes_per_s    (bisection-bound on a torus)
      collective-permute           l0 + latency_s + w / shift_bytes_per_s

    Where the link carries measured points for the kind, those are interpolated instead (`interpolate`). An
    empty payload and an axis of one device cost nothing.

    Args:
      kind: one of COLLECTIVE_KINDS.
      link: the axis's link, from `Cluster.mesh`.
      axis_size: must be `link.size`; a guard against pricing one axis by another's link.
      payload_bytes: scalar or array of payloads, >= 0.
    Returns:
      A float64 array (0-d for a scalar) of `payload_bytes`'s shape.
    Raises:
      ValueError: an unknown kind, n < 1, or `axis_size != link.size`.
    """
    _check(kind, axis_size)
    if axis_size != link.size:
        raise ValueError(f"axis of {axis_size} devices priced with a link of {link.size}: {link.description}")
    payload = np.asarray(payload_bytes, np.float64)
    if axis_size == 1:
        return np.zeros_like(payload)
    points = link.measured(kind)
    if points is not None:
        time_s = interpolate(points, payload)
    else:
        latency_s, rate = _latency_and_rate(kind, link)
        time_s = latency_s + wire_bytes(kind, axis_size, payload) / rate
    return np.asarray(np.where(payload > 0, time_s, 0.0))


def over_axes_s(kind: str, mesh: MeshLinks, axes: tuple[int, ...], payload_bytes: ArrayLike) -> np.ndarray:
    """Seconds of one collective over one or several axes of a mesh (ascending).

    Axis by axis, the fastest first: with B on it, and of reductions and gathers B / size left for the next, so that a
    reduction goes down the fast axes and up again.

    >>> from .cluster import parse_cluster
    >>> torus = parse_cluster("v5e:4x4").mesh((4, 4))
    >>> one, both = (float(over_axes_s("all-gather", torus, axes, 1e9)) for axes in ((0,), (0, 1)))
    >>> both < one  # the links of both dims
    True
    """
    if (link := mesh.together(axes)) is not None:
        return collective_time_s(kind, link, link.size, payload_bytes)
    time_s = np.zeros_like(share := np.asarray(payload_bytes, np.float64))
    for link in sorted((mesh.links[axis] for axis in axes), key=lambda link: -link.bytes_per_s):
        time_s = time_s + collective_time_s(kind, link, link.size, share)
        share = share if kind in ("all-to-all", "collective-permute") else share / link.size
    return time_s


def interpolate(points: CollectivePoints, payload_bytes: np.ndarray) -> np.ndarray:
    """Measured time: linear between points, flat before the first, with the last slope after the last."""
    return linear(payload_bytes, points.payload_bytes, points.time_s)


def _latency_and_rate(kind: str, link: Link) -> tuple[float, float]:
    if kind == "collective-permute":
        return link.base_latency_s + link.latency_s, link.shift_bytes_per_s
    if kind == "all-to-all":
        return link.base_latency_s + link.gather_latency_s, link.exchange_bytes_per_s
    passes = 2 if kind == "all-reduce" else 1
    return link.base_latency_s + passes * link.gather_latency_s, link.bytes_per_s


def _check(kind: str, axis_size: int) -> None:
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(f"unknown collective {kind!r}; known: {', '.join(COLLECTIVE_KINDS)}")
    if axis_size < 1:
        raise ValueError(f"a mesh axis has at least one device, got axis_size={axis_size}")
