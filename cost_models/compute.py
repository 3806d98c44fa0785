"""What an operation on one device costs: a roofline.

S. Williams, A. Waterman, D. Patterson: Roofline: an insightful visual performance model. CACM 52 (2009).
"""

import numpy as np
from numpy.typing import ArrayLike

from .devices import DeviceSpec


def compute_time_s(device: DeviceSpec, flops: ArrayLike, dtype: object, bytes_moved: ArrayLike) -> np.ndarray:
    """Seconds of one operation: the slower of computing and streaming, plus what any operation costs.

      compute_s = flops / (peak(dtype) * matmul_efficiency)
      memory_s = bytes_moved / (memory_bytes_per_s * memory_efficiency)
      time_s = op_overhead_s + max(compute_s, memory_s)

    An operation without flops and without bytes costs nothing (it is not there after compilation).

    Args:
      device: the device.
      flops: floating-point operations on it, scalar or array, >= 0 (a multiply-add is two).
      dtype: the operands' dtype, or its name.
      bytes_moved: bytes read and written in the device's memory; broadcasts with `flops`.
    Returns:
      A float64 array (0-d for scalars) of the broadcast shape.
    """
    flops = np.asarray(flops, np.float64)
    bytes_moved = np.asarray(bytes_moved, np.float64)
    compute_s = flops / (device.peak(dtype) * device.matmul_efficiency)
    memory_s = bytes_moved / (device.memory_bytes_per_s * device.memory_efficiency)
    busy_s = np.maximum(compute_s, memory_s)
    return np.asarray(np.where(busy_s > 0, device.op_overhead_s + busy_s, 0.0))
