"""How much of its peak a device reaches: tables of matmuls by shape and dtype, and of streaming by size.

A data sheet's peak is reached by large matmuls only. A `MatmulTable` holds the fraction of the peak that matmuls
[m, k] x [k, n] of known shapes reach, from a profile or from a compiler's own estimates; between its points

  efficiency(q) = exp(sum_i w_i log e_i / sum_i w_i),   w_i = 1 / |log q - log p_i|^4     (`MatmulTable.at`)

over all points p_i = (m_i, k_i, n_i): inverse distance weights in log space (D. Shepard: A two-dimensional
interpolation function for irregularly-spaced data. ACM 1968), which need no full grid, meet every point, and stay
between the least and the greatest of them. A dim above the table's largest counts as the largest; one below its
smallest is padded to it, so that the time is that of the smallest.

A `StreamTable` holds the seconds that operations bound by memory take, by the bytes they read and write.
"""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
import json

import numpy as np
from numpy.typing import ArrayLike

OPERATIONS = ("matmul", "convolution")
TABLES = ("tpu_matmul.json", "cpu_matmul.json")


@dataclass(frozen=True)
class MatmulTable:
    """The fraction of peak that matmuls of known shapes reach.

    Attributes:
      operation: one of OPERATIONS. A convolution is the matmul that it amounts to: m output positions (with the
        batch), k input features times window, n output features.
      dtype: the operands' dtype, by name.
      dims: the points (m, k, n), distinct, each >= 1.
      efficiency: for each point, the fraction of `DeviceSpec.peak(dtype)`; above 1 where the peak is a guess.
      source: when, where and how it was found.
    """

    operation: str
    dtype: str
    dims: tuple[tuple[float, float, float], ...]
    efficiency: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"table of {self.operation!r}: known are {', '.join(OPERATIONS)}")
        if not self.dims or len(self.dims) != len(self.efficiency) or len(set(self.dims)) != len(self.dims):
            raise ValueError(f"table of {self.operation} {self.dtype}: needs distinct points, each with an efficiency")
        if min(min(point) for point in self.dims) < 1 or not min(self.efficiency) > 0:
            raise ValueError(f"table of {self.operation} {self.dtype}: needs dims >= 1 and efficiencies above 0")

    def at(self, dims: ArrayLike) -> np.ndarray:
        """The efficiency of matmuls `dims[..., 3]`, an array of shape `[...]` (see the module's text).

        >>> table = MatmulTable("matmul", "float32", ((8, 8, 8), (8, 8, 32)), (0.1, 0.4), "by hand")
        >>> table.at([[8, 8, 32], [8, 8, 16], [8, 8, 4]]).round(3).tolist()
        [0.4, 0.2, 0.05]
        """
        points, values = np.log(np.asarray(self.dims, np.float64)), np.log(np.asarray(self.efficiency, np.float64))
        wanted = np.log(np.maximum(np.asarray(dims, np.float64), 1.0))
        least, greatest = points.min(axis=0), points.max(axis=0)
        padding = np.maximum(least - wanted, 0.0).sum(axis=-1)
        wanted = np.clip(wanted, least, greatest)
        square = ((wanted[..., None, :] - points) ** 2).sum(axis=-1)
        weights = 1.0 / np.maximum(square, 1e-12) ** 2
        return np.exp((weights * values).sum(axis=-1) / weights.sum(axis=-1) - padding)


@dataclass(frozen=True)
class StreamTable:
    """Times of operations bound by memory, beyond what any operation costs (`DeviceSpec.op_overhead_s`).

    Attributes:
      bytes_moved: ascending bytes read and written, at least two, each > 0.
      time_s: seconds of each, not falling. Linear between points, in proportion before the first, with the last
        slope after the last.
      source: when, where and how it was measured.
    """

    bytes_moved: tuple[float, ...]
    time_s: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if len(self.bytes_moved) < 2 or len(self.bytes_moved) != len(self.time_s):
            raise ValueError("table of streaming: needs two or more sizes, each with a time")
        if not self.bytes_moved[0] > 0 or any(b <= a for a, b in pairwise(self.bytes_moved)):
            raise ValueError("table of streaming: bytes_moved must be positive and ascend")
        if not self.time_s[0] > 0 or any(b < a for a, b in pairwise(self.time_s)):
            raise ValueError("table of streaming: time_s must be positive and must not fall")

    def at(self, bytes_moved: ArrayLike) -> np.ndarray:
        """Seconds to move `bytes_moved`, an array of its shape.

        >>> StreamTable((1e3, 3e3), (1e-6, 2e-6), "by hand").at([500.0, 2e3, 5e3]).tolist()
        [5e-07, 1.5e-06, 3e-06]
        """
        moved = np.asarray(bytes_moved, np.float64)
        return linear(moved, (0.0, *self.bytes_moved), (0.0, *self.time_s))


def linear(x: np.ndarray, xs: ArrayLike, ys: ArrayLike) -> np.ndarray:
    """Linear between points, flat before the first, with the last slope after the last."""
    xs, ys = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return np.asarray(np.interp(x, xs, ys) + np.maximum(x - xs[-1], 0.0) * slope)


@cache
def shipped_tables(device: str, peaks: tuple[tuple[str, float], ...]) -> tuple[MatmulTable, ...]:
    """The tables that come with autoplan for a device; none if there are none.

    For TPUs they hold the seconds that the TPU compiler estimates (`autoplan/profiling/tpu_tables.py` makes them), for
    simulated devices those of a profile (`cpu_tables.py`).

    Args:
      device: a name in DEVICES, or "cpu".
      peaks: its `peak_flops_per_s`, against which efficiencies are counted.
    """
    found, rates = [], dict(peaks)
    for file in TABLES:
        data = json.loads(resources.files(__package__).joinpath("tables", file).read_text())
        for key, rows in data["devices"].get(device, {}).items():
            operation, _, dtype = key.rpartition(" ")
            dims = tuple((float(m), float(k), float(n)) for m, k, n, _ in rows)
            reached = tuple(2.0 * m * k * n / time_s / rates[dtype] for m, k, n, time_s in rows)
            found.append(MatmulTable(operation or "matmul", dtype, dims, reached, data["source"]))
    return tuple(found)
