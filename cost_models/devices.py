"""Device specifications: what one accelerator can compute, hold and stream, each figure with its source.

All figures are SI and per device as JAX sees it (one TPU chip, one GPU). Marketing units are resolved here,
once: capacities are what the runtime reports in bytes (an "80 GB" H100 has 84.9e9 bytes, a "16 GB" v5e has 16
GiB), rates are decimal (3.35 TB/s is 3.35e12 bytes/s).

`peak_flops_per_s` holds *dense* matrix-unit rates at JAX's default matmul precision: `float32` is one bf16
pass on TPUs and TF32 on Ampere and later GPUs, because that is what `jax.numpy.matmul` runs when nothing else
is asked for.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .efficiency import MatmulTable, StreamTable

GIB = 2**30

_TPU_DOCS = "cloud.google.com/tpu/docs"
_SCALING_BOOK = "jax-ml.github.io/scaling-book (How to think about TPUs, table of chips)"
_RUNTIME_LIMIT = "XLA:TPU's own limit, as in 'Used ... of 31.25G hbm' of its out-of-memory errors (G = GiB)"
_GPU_FRACTION = (
    "docs.jax.dev, GPU memory allocation: JAX takes 75 % by default (XLA_PYTHON_CLIENT_MEM_FRACTION)"
)


@dataclass(frozen=True)
class DeviceSpec:
    """One device, as data.

    Attributes:
      name: the canonical name, as used in cluster strings.
      platform: "tpu", "gpu" or "cpu".
      peak_flops_per_s: pairs of (dtype name, FLOP/s), dense, at JAX's default matmul precision.
      memory_bytes: capacity of the device's memory as its runtime reports it.
      usable_memory_bytes: what one JAX program may allocate with default settings; the default memory limit.
      memory_bytes_per_s: peak memory bandwidth.
      matmul_efficiency: fraction of `peak_flops_per_s` that large matmuls reach.
      memory_efficiency: fraction of `memory_bytes_per_s` that streaming operations reach.
      op_overhead_s: time that every operation costs, whatever its size.
      sources: pairs of (figure, where it comes from).
      on_chip_bytes: memory on the chip in which a compiler keeps values between operations; 0 if it keeps none there.
      tables: what matmuls reach by shape, at most one per operation and dtype; instead of `matmul_efficiency`.
      stream: times of streaming by size; instead of `memory_bytes_per_s` and `memory_efficiency`.
    """

    name: str
    platform: str
    peak_flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes: float
    usable_memory_bytes: float
    memory_bytes_per_s: float
    matmul_efficiency: float
    memory_efficiency: float
    op_overhead_s: float
    sources: tuple[tuple[str, str], ...]
    on_chip_bytes: float = 0.0
    tables: tuple[MatmulTable, ...] = ()
    stream: StreamTable | None = None

    def __post_init__(self) -> None:
        rates = dict(self.peak_flops_per_s)
        if "float32" not in rates or any(not rate > 0 for rate in rates.values()):
            raise ValueError(f"device {self.name}: peak_flops_per_s needs positive rates and 'float32'")
        if not 0 < self.usable_memory_bytes <= self.memory_bytes:
            raise ValueError(f"device {self.name}: usable_memory_bytes must be in (0, memory_bytes]")
        if not (0 < self.matmul_efficiency <= 1 and 0 < self.memory_efficiency <= 1):
            raise ValueError(f"device {self.name}: efficiencies must be in (0, 1]")
        if not self.memory_bytes_per_s > 0 or not self.op_overhead_s >= 0:
            raise ValueError(f"device {self.name}: memory_bytes_per_s must be positive, op_overhead_s >= 0")
        if len({(table.operation, table.dtype) for table in self.tables}) < len(self.tables):
            raise ValueError(f"device {self.name}: one table per operation and dtype")

    def peak(self, dtype: object) -> float:
        """Peak dense FLOP/s for operands of `dtype` (a dtype or its name).

        A dtype without a figure of its own gets that of its nearest wider relative (`_wider`), in
        the end float32's.

        >>> DEVICES["H100"].peak("bfloat16")
        989400000000000.0
        """
        rates = dict(self.peak_flops_per_s)
        name = str(dtype)
        while name not in rates:
            name = _wider(name)
        return rates[name]

    def reached(self, operation: str, dtype: object, matmul_dims: ArrayLike) -> np.ndarray:
        """The fraction of its peak that the device reaches at dims `[..., 3]`, an array `[...]`.

        Convolutions are measured at few shapes: they reach what matmuls of their dims do, times what those few reach
        over matmuls of theirs (the geometric mean). Without any, they reach `matmul_efficiency`: their windows fill
        the matrix unit where a matmul of the same dims would not.
        """
        table, matmuls = self.table(operation, dtype), self.table("matmul", dtype)
        if table is None or table.operation != operation:
            return np.full(np.shape(matmul_dims)[:-1], self.matmul_efficiency)
        if operation == "matmul" or matmuls is None:
            return table.at(matmul_dims)
        ratio = np.exp(np.mean(np.log(table.efficiency) - np.log(matmuls.at(table.dims))))
        return matmuls.at(matmul_dims) * ratio

    def table(self, operation: str, dtype: object) -> MatmulTable | None:
        """The table for an operation on operands of `dtype`; a convolution without one takes that of matmuls.

        A dtype without a table takes its nearest wider relative's, unless it has a peak of its own.
        """
        tables, rates = {(table.operation, table.dtype): table for table in self.tables}, dict(self.peak_flops_per_s)
        name = str(dtype)
        while True:
            found = tables.get((operation, name)) or tables.get(("matmul", name))
            if found or name in rates or name == "float32":
                return found
            name = _wider(name)


def _wider(dtype: str) -> str:
    """The dtype whose rate stands in for `dtype` where a device has no figure for it."""
    if dtype.startswith("float8"):
        return "float8" if dtype != "float8" else "bfloat16"
    if dtype in ("int4", "uint4", "float4_e2m1fn", "uint8"):
        return "int8"
    return {"int8": "bfloat16", "float16": "bfloat16"}.get(dtype, "float32")


def _tpu(
    name: str,
    page: str,
    *,
    bf16: float,
    int8: float,
    memory_gib: float,
    usable_gib: float,
    bytes_per_s: float,
    vmem_mib: int,
) -> DeviceSpec:
    """A TPU chip. float32 matmuls run one bf16 pass at JAX's default precision, hence bf16's rate."""
    return DeviceSpec(
        name=name,
        platform="tpu",
        peak_flops_per_s=(("bfloat16", bf16), ("float32", bf16), ("int8", int8)),
        memory_bytes=memory_gib * GIB,
        usable_memory_bytes=usable_gib * GIB,
        memory_bytes_per_s=bytes_per_s,
        matmul_efficiency=0.9,
        memory_efficiency=0.9,
        op_overhead_s=0.0,
        sources=(
            ("peak_flops_per_s", f"{_TPU_DOCS}/{page}"),
            ("memory_bytes", f"{_TPU_DOCS}/{page}; physical GiB"),
            ("usable_memory_bytes", _RUNTIME_LIMIT),
            ("memory_bytes_per_s", f"{_SCALING_BOOK}; {_TPU_DOCS}/{page}"),
            ("matmul_efficiency", f"{_SCALING_BOOK}: up to 95 % of peak; less for smaller matmuls"),
            ("memory_efficiency", "assumed, as for other HBM devices"),
            ("op_overhead_s", "none: a TPU program is one instruction stream without launches"),
            ("on_chip_bytes", "jax.experimental.pallas.tpu, get_tpu_info: VMEM of a core"),
        ),
        on_chip_bytes=vmem_mib * 2.0**20,
    )


def _gpu(
    name: str,
    sheet: str,
    *,
    tflops: tuple[tuple[str, float], ...],
    memory_bytes: float,
    bytes_per_s: float,
    matmul: float,
    memory: float,
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        platform="gpu",
        peak_flops_per_s=tuple((dtype, rate * 1e12) for dtype, rate in tflops),
        memory_bytes=memory_bytes,
        usable_memory_bytes=0.75 * memory_bytes,
        memory_bytes_per_s=bytes_per_s,
        matmul_efficiency=matmul,
        memory_efficiency=memory,
        op_overhead_s=2e-6,
        sources=(
            ("peak_flops_per_s", f"{sheet}; dense rates, half of those quoted with sparsity"),
            ("memory_bytes", "total memory that the CUDA driver reports (nvidia-smi, MiB)"),
            ("usable_memory_bytes", _GPU_FRACTION),
            ("memory_bytes_per_s", sheet),
            ("matmul_efficiency", "typical of large cuBLAS matmuls under the power limit"),
            ("memory_efficiency", "typical of BabelStream triad against the data sheet"),
            ("op_overhead_s", "gap between dependent CUDA kernels: 1.5 to 2.5 us; about 1 us in CUDA graphs"),
        ),
    )


_MIB = 2**20

_ALL = (
    _tpu("v4", "v4", bf16=275e12, int8=275e12, memory_gib=32, usable_gib=30.75, bytes_per_s=1.228e12, vmem_mib=16),
    _tpu("v5e", "v5e", bf16=197e12, int8=393e12, memory_gib=16, usable_gib=15.75, bytes_per_s=8.19e11, vmem_mib=128),
    _tpu("v5p", "v5p", bf16=459e12, int8=918e12, memory_gib=96, usable_gib=95.0, bytes_per_s=2.765e12, vmem_mib=64),
    _tpu("v6e", "v6e", bf16=918e12, int8=1836e12, memory_gib=32, usable_gib=31.25, bytes_per_s=1.638e12, vmem_mib=128),
    _gpu(
        "V100",
        "NVIDIA V100 data sheet (SXM2 32 GB)",
        tflops=(("float16", 125.0), ("bfloat16", 15.7), ("float32", 15.7), ("float64", 7.8)),
        memory_bytes=32510 * _MIB,
        bytes_per_s=0.9e12,
        matmul=0.75,
        memory=0.88,
    ),
    _gpu(
        "A100-80GB",
        "NVIDIA A100 80GB data sheet (SXM4)",
        tflops=(
            ("bfloat16", 312.0), ("float16", 312.0), ("float32", 156.0), ("float64", 19.5), ("int8", 624.0),
        ),
        memory_bytes=81920 * _MIB,
        bytes_per_s=2.039e12,
        matmul=0.8,
        memory=0.87,
    ),
    _gpu(
        "H100",
        "NVIDIA H100 data sheet (SXM5 80GB HBM3)",
        tflops=(
            ("bfloat16", 989.4), ("float16", 989.4), ("float32", 494.7), ("float64", 66.9),
            ("float8", 1978.9), ("int8", 1978.9),
        ),
        memory_bytes=84942979072,
        bytes_per_s=3.35e12,
        matmul=0.7,
        memory=0.9,
    ),
    _gpu(
        "H200",
        "NVIDIA H200 data sheet (SXM5 141GB HBM3e)",
        tflops=(
            ("bfloat16", 989.4), ("float16", 989.4), ("float32", 494.7), ("float64", 66.9),
            ("float8", 1978.9), ("int8", 1978.9),
        ),
        memory_bytes=143771 * _MIB,
        bytes_per_s=4.8e12,
        matmul=0.7,
        memory=0.9,
    ),
    _gpu(
        "B200",
        "NVIDIA HGX / DGX B200 data sheet (SXM 180GB HBM3e)",
        tflops=(
            ("bfloat16", 2250.0), ("float16", 2250.0), ("float32", 1125.0), ("float64", 37.0),
            ("float8", 4500.0), ("int8", 4500.0),
        ),
        memory_bytes=183359 * _MIB,
        bytes_per_s=8.0e12,
        matmul=0.7,
        memory=0.9,
    ),
)  # fmt: skip

DEVICES: dict[str, DeviceSpec] = {device.name: device for device in _ALL}
"""The accelerators by name; for the simulated CPU device, see `cpu.cpu_device`."""

ALIASES: dict[str, str] = {"A100": "A100-80GB", "A100-80": "A100-80GB", "A100-80G": "A100-80GB"}
"""Other spellings accepted in cluster strings."""

DEVICE_KINDS: dict[str, str] = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "Tesla V100-SXM2-32GB": "V100",
    "Tesla V100-SXM3-32GB": "V100",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}
"""`jax.Device.device_kind` -> name in DEVICES."""
