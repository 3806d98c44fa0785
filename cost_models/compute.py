"""What an operation on one device costs: a roofline.

S. Williams, A. Waterman, D. Patterson: Roofline: an insightful visual performance model. CACM 52 (2009).
"""

import numpy as np
from numpy.typing import ArrayLike

from .devices import DeviceSpec


def compute_time_s(
    device: DeviceSpec,
    flops: ArrayLike,
    dtype: object,
    bytes_moved: ArrayLike,
    matmul_dims: ArrayLike | None = None,
    operation: str = "matmul",
) -> np.ndarray:
    """Seconds of one operation: the slower of computing and streaming, plus what any operation costs.

      compute_s = flops / (peak(dtype) * efficiency)
      memory_s = bytes_moved / (memory_bytes_per_s * memory_efficiency), or `device.stream` at bytes_moved
      time_s = op_overhead_s + max(compute_s, memory_s)

    The efficiency is that of the device's tables at `matmul_dims` (`DeviceSpec.reached`), and the constant
    `matmul_efficiency` without a table or dims. An operation without flops and without bytes costs nothing (it is
    not there after compilation).

    Args:
      device: the device.
      flops: floating-point operations on it, scalar or array, >= 0 (a multiply-add is two).
      dtype: the operands' dtype, or its name.
      bytes_moved: bytes read and written in the device's memory; broadcasts with `flops`.
      matmul_dims: `[..., 3]`, the (m, k, n) of each matmul as one device computes it, without batch dims; `[...]`
        broadcasts with `flops`.
      operation: "matmul", or "convolution" with the dims of the matmul that it amounts to.
    Returns:
      A float64 array (0-d for scalars) of the broadcast shape.

    >>> from .cluster import parse_cluster
    >>> v5e = parse_cluster("v5e:4x4").device
    >>> thin, square = compute_time_s(v5e, 2.0**31, "bfloat16", 0, [[8, 1024, 131072], [1024, 1024, 1024]])
    >>> bool(thin > square)
    True
    """
    flops = np.asarray(flops, np.float64)
    bytes_moved = np.asarray(bytes_moved, np.float64)
    reached = device.matmul_efficiency if matmul_dims is None else device.reached(operation, dtype, matmul_dims)
    compute_s = flops / (device.peak(dtype) * reached)
    if device.stream is None:
        memory_s = bytes_moved / (device.memory_bytes_per_s * device.memory_efficiency)
    else:
        memory_s = device.stream.at(bytes_moved)
    busy_s = np.maximum(compute_s, memory_s)
    return np.asarray(np.where(busy_s > 0, device.op_overhead_s + busy_s, 0.0))
