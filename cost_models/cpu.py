"""The simulated CPU mesh, "cpu:N": N XLA host devices that share the cores and the memory of one machine.

Every device has 1/N of the machine, so figures are *per simulated device with all N at work*. A collective is
a rendezvous of n threads that wait for a core, and copying through shared memory, which all groups of the
mesh do at once:

  time(N, n, B) = member_s n + device_s N + N (near B1 + cached B2 + far B3)

with N devices, groups of n, and B bytes of payload: B1 up to 512 KiB, B2 from there to 4 MiB, B3 beyond
(`cpu_link`). The slopes rise as buffers leave the caches and, beyond 4 MiB, come as fresh pages from the
system. Every copy goes through the same memory: unlike on a wire, what counts is the payload, hardly the size
of the group.

The constants are defaults, fitted to measurements on one machine (`MEASURED`); a profile of the user's own machine
(`autoplan profile`, `profile.calibrate`) replaces them.
"""

from dataclasses import dataclass

from .devices import GIB, DeviceSpec
from .efficiency import shipped_tables
from .links import CollectivePoints, Link

MEASURED = (
    "measured 2026-11-30 with jax 0.10.2 on a 2-core x86-64 container (AMD EPYC 2.4 GHz, AVX2, 32 MiB L3) by"
    " what is now `autoplan profile` with 8, 4 and 2 simulated devices, medians of 9"
)

_MACHINE_FLOPS_PER_S = 107e9  # matmuls of 128 to 1024 on all devices: 86 to 117e9; bfloat16 alike
_MACHINE_FLOAT64_FLOPS_PER_S = 53e9  # not measured: half of float32, as vectors hold half as many
_MACHINE_BYTES_PER_S = 60e9  # x * a + b, read + written: 75 to 100e9 on 4 MiB, 40 to 79e9 on 16 MiB
_MACHINE_BYTES = 16 * GIB  # assumed; pass memory= to plan for another machine
_TABLE_DEVICES = 8  # simulated devices at work when the tables of matmuls were measured
_OP_OVERHEAD_S = 1.3e-6  # times N: x * a + b on 4 KiB takes 3.1, 7.6 and 10 us with 2, 4 and 8 devices


@dataclass(frozen=True)
class _Fit:
    """Constants of one kind of collective: seconds per group member, per device, and per byte and device.

    `residual` is the median of |log(fitted / measured)|.
    """

    member_s: float
    device_s: float
    near: float
    cached: float
    far: float
    residual: float


_NEAR_BYTES, _CACHED_BYTES = 2.0**19, 2.0**22
_FITS = {
    "all-reduce": _Fit(17.6e-6, 8.1e-6, 0.077e-9, 0.169e-9, 0.420e-9, 0.13),
    "all-gather": _Fit(21.1e-6, 6.2e-6, 0.093e-9, 0.182e-9, 0.214e-9, 0.12),
    "reduce-scatter": _Fit(29.6e-6, 3.1e-6, 0.097e-9, 0.269e-9, 0.276e-9, 0.16),
    "all-to-all": _Fit(23.5e-6, 6.2e-6, 0.090e-9, 0.303e-9, 0.399e-9, 0.14),
    "collective-permute": _Fit(0.0, 23.5e-6, 0.054e-9, 0.158e-9, 0.329e-9, 0.10),
}


def cpu_device(count: int) -> DeviceSpec:
    """One of `count` simulated devices: a `count`-th part of the measured machine.

    >>> cpu_device(2).peak("float32") == 2 * cpu_device(4).peak("float32")
    True
    """
    if count < 1:
        raise ValueError(f"a simulated CPU mesh has at least one device, got {count}")
    return DeviceSpec(
        name="cpu",
        platform="cpu",
        peak_flops_per_s=_peaks(count),
        memory_bytes=_MACHINE_BYTES / count,
        usable_memory_bytes=_MACHINE_BYTES / count,
        memory_bytes_per_s=_MACHINE_BYTES_PER_S / count,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        op_overhead_s=_OP_OVERHEAD_S * count,
        sources=(
            ("peak_flops_per_s", f"{MEASURED}; bfloat16 runs as float32; float64 assumed as half"),
            ("memory_bytes", "assumed: a machine of 16 GiB, divided among the simulated devices"),
            ("usable_memory_bytes", "as memory_bytes"),
            ("memory_bytes_per_s", f"{MEASURED}"),
            ("matmul_efficiency", "1: the peak is itself a measurement"),
            ("memory_efficiency", "1: the bandwidth is itself a measurement"),
            ("op_overhead_s", f"{MEASURED}; a thunk's dispatch, multiplied by the devices that share a core"),
        ),
        tables=shipped_tables("cpu", _peaks(_TABLE_DEVICES)),
    )


def _peaks(count: int) -> tuple[tuple[str, float], ...]:
    return (
        ("float32", _MACHINE_FLOPS_PER_S / count),
        ("bfloat16", _MACHINE_FLOPS_PER_S / count),
        ("float64", _MACHINE_FLOAT64_FLOPS_PER_S / count),
    )


def cpu_link(count: int, size: int) -> Link:
    """The link of a mesh axis of `size` among `count` simulated devices: the same memory for every axis.

    Its times are measured points. Its rates are those of buffers of 4 MiB, for whoever needs one number.
    """
    points = tuple(_points(kind, fit, count, size) for kind, fit in _FITS.items())
    fraction = (size - 1) / size
    gather, exchange, shift = (_FITS[kind] for kind in ("all-gather", "all-to-all", "collective-permute"))
    return Link(
        size=size,
        bytes_per_s=fraction / (count * _slope(gather)),
        exchange_bytes_per_s=fraction / (count * _slope(exchange)),
        shift_bytes_per_s=1 / (count * _slope(shift)),
        base_latency_s=0.0,
        latency_s=_latency_s(shift, count, size),
        gather_latency_s=_latency_s(gather, count, size),
        wraps=False,
        description=f"shared memory of one machine ({size} of {count} simulated devices)",
        points=points,
    )


def _points(kind: str, fit: _Fit, count: int, size: int) -> CollectivePoints:
    payloads = (0.0, _NEAR_BYTES, _CACHED_BYTES, 2 * _CACHED_BYTES)
    slopes = (fit.near, fit.cached, fit.far)
    times = [_latency_s(fit, count, size)]
    for low, high, slope in zip(payloads[:-1], payloads[1:], slopes, strict=True):
        times.append(times[-1] + count * slope * (high - low))
    return CollectivePoints(kind, payloads, tuple(times), f"{MEASURED}; median residual {fit.residual:.0%}")


def _latency_s(fit: _Fit, count: int, size: int) -> float:
    return fit.member_s * size + fit.device_s * count


def _slope(fit: _Fit) -> float:
    """Seconds per byte and device, averaged over a payload of 4 MiB."""
    return (fit.near * _NEAR_BYTES + fit.cached * (_CACHED_BYTES - _NEAR_BYTES)) / _CACHED_BYTES
