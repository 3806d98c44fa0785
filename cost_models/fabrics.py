"""Links of known machines, as data with sources: ICI tori, NVLink hosts, and the networks between them."""

from dataclasses import dataclass
import math

from .topology import Level

_BOOK = "jax-ml.github.io/scaling-book"
_DOCS = "cloud.google.com/tpu/docs"


@dataclass(frozen=True)
class _Ici:
    """Links of one TPU generation: one-way rates per link, and per chip on the data-centre network."""

    torus_dims: int
    pod_chips: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    source: str


@dataclass(frozen=True)
class _Host:
    """Links of one GPU host: one-way rates per GPU."""

    largest: int
    port_bytes_per_s: float
    port_efficiency: float
    network_bytes_per_s: float
    network: str
    source: str
    small_groups: tuple[tuple[int, float], ...] = ()


_ICI = {
    "v4": _Ici(
        3, 4096, 4.5e10, 6.25e9, f"{_BOOK}: 4.5e10 per link and direction, 6.25e9 per chip on the network"
    ),
    "v5e": _Ici(2, 256, 4.5e10, 3.125e9, f"{_BOOK}: 4.5e10; {_DOCS}/v5e: 6.4 Tbit/s per pod of 256"),
    "v5p": _Ici(3, 8960, 9e10, 6.25e9, f"{_BOOK}: 9e10; {_DOCS}/v5p: 50 Gbit/s per chip"),
    "v6e": _Ici(2, 256, 9e10, 12.5e9, f"{_BOOK}: 9e10, 12.5e9 per chip on the network"),
}

_ICI_EFFICIENCY = 0.95  # the scaling book's all-gathers on v5e reach about 95 % of the link rate
_ICI_HOP_S = 1e-6  # the scaling book: about 1 us per hop
_TPU_NETWORK_EFFICIENCY = 0.9  # assumed, as for other networks
_TPU_NETWORK_S = 3e-5  # assumed: host transfer and TCP through the data-centre network

_RATES = "rates per GPU and direction; efficiency: bus bandwidth of NCCL's rings"
_HOSTS = {
    "V100": _Host(
        8, 150e9, 0.87, 6.25e9, "EDR InfiniBand between hosts",
        "DGX-1V: 6 NVLink2 of 25 GB/s in a hybrid cube mesh (2 within a pair, 4 a quad); 4 x 100 Gbit/s",
        ((2, 50e9), (4, 100e9)),
    ),
    "A100-80GB": _Host(
        8, 300e9, 0.78, 25e9, "HDR InfiniBand between hosts",
        f"DGX A100: NVLink3 through NVSwitch, 8 x 200 Gbit/s; {_RATES} (about 235 GB/s)",
    ),
    "H100": _Host(
        8, 450e9, 0.82, 50e9, "NDR InfiniBand between hosts",
        f"DGX H100: NVLink4 through NVSwitch, 8 x 400 Gbit/s; {_RATES} (370 GB/s: nccl-tests issue 212)",
    ),
    "H200": _Host(
        8, 450e9, 0.82, 50e9, "NDR InfiniBand between hosts",
        f"HGX H200: NVLink4 through NVSwitch, 8 x 400 Gbit/s; {_RATES} (as H100)",
    ),
    "B200": _Host(
        8, 900e9, 0.8, 50e9, "NDR InfiniBand between hosts",
        f"DGX B200: NVLink5 through NVSwitch, 8 x 400 Gbit/s; {_RATES} (NCCL counts on 720 GB/s)",
    ),
}  # fmt: skip

# NCCL's own tuning table (src/graph/tuning.cc), ring LL: base 6.6 us, NVLink hop 0.6 us, network hop 2.7 us.
_NCCL_BASE_S, _NVLINK_HOP_S, _NETWORK_HOP_S = 6.6e-6, 0.6e-6, 2.7e-6
_NETWORK_EFFICIENCY = 0.9  # nccl-tests over 400 Gbit/s ports: about 45 GB/s each
_NCCL_SOURCE = "latencies: NCCL src/graph/tuning.cc (ring, LL)"

TORUS_DIMS: dict[str, int] = {name: ici.torus_dims for name, ici in _ICI.items()}
"""Torus dims of each TPU generation."""
POD_CHIPS: dict[str, int] = {name: ici.pod_chips for name, ici in _ICI.items()}
"""Chips of the largest slice of each TPU generation."""
HOST_SIZES: dict[str, int] = {name: host.largest for name, host in _HOSTS.items()}
"""GPUs of the largest host of each kind."""

_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBIC = (
    (1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8),
    (8, 8, 16), (8, 16, 16), (16, 16, 16),
)  # fmt: skip
STANDARD_SLICES: dict[str, dict[int, tuple[int, ...]]] = {
    name: {math.prod(shape): shape for shape in (_FLAT if dims == 2 else _CUBIC)}
    for name, dims in TORUS_DIMS.items()
}
"""For each TPU generation, the usual shape of a number of chips (cloud.google.com/tpu/docs)."""


def torus_wraps(name: str, dims: tuple[int, ...]) -> tuple[bool, ...]:
    """Which dims of a slice close to rings.

    v5e and v6e wrap a dim only when it is the full 16 of the pod. v4 and v5p slices made of whole 4x4x4 cubes
    wrap in every dim, through the optical switches; smaller ones in none (cloud.google.com/tpu/docs/v5p: "All
    4x4x4 and larger slices have full 3D torus"). A line is part of a slice and does not wrap.
    """
    if len(dims) > 1 and math.prod(dims[:-1]) == 1:
        return (False,) * len(dims)
    if TORUS_DIMS[name] == 2:
        return tuple(dim == 16 for dim in dims)
    return (all(dim % 4 == 0 for dim in dims),) * len(dims)


def tpu_levels(name: str, slices: int, dims: tuple[int, ...]) -> tuple[Level, ...]:
    """Levels of `slices` slices with a torus of `dims` chips each."""
    ici = _ICI[name]
    torus = Level(
        kind="torus",
        name="ICI",
        sizes=dims,
        wraps=torus_wraps(name, dims),
        bytes_per_s=ici.link_bytes_per_s * _ICI_EFFICIENCY,
        base_latency_s=0.0,
        latency_s=_ICI_HOP_S,
        source=f"{ici.source}; efficiency 0.95 and 1 us per hop: {_BOOK}",
    )
    if slices == 1:
        return (torus,)
    network = Level(
        kind="network",
        name="data-centre network between slices",
        sizes=(slices,),
        wraps=(False,),
        bytes_per_s=ici.network_bytes_per_s * _TPU_NETWORK_EFFICIENCY,
        base_latency_s=_TPU_NETWORK_S,
        latency_s=_TPU_NETWORK_S,
        source=f"{ici.source}; efficiency and latency assumed",
        pipelined=False,
    )
    return (network, torus)


def gpu_levels(name: str, hosts: int, inside: int) -> tuple[Level, ...]:
    """Levels of `hosts` hosts with `inside` GPUs each."""
    host = _HOSTS[name]
    switch = Level(
        kind="switch",
        name="NVLink",
        sizes=(inside,),
        wraps=(False,),
        bytes_per_s=host.port_bytes_per_s * host.port_efficiency,
        base_latency_s=_NCCL_BASE_S,
        latency_s=_NVLINK_HOP_S,
        source=f"{host.source}; {_NCCL_SOURCE}",
        small_group_rates=tuple((size, rate * host.port_efficiency) for size, rate in host.small_groups),
    )
    if hosts == 1:
        return (switch,)
    network = Level(
        kind="network",
        name=host.network,
        sizes=(hosts,),
        wraps=(False,),
        bytes_per_s=host.network_bytes_per_s * _NETWORK_EFFICIENCY,
        base_latency_s=_NCCL_BASE_S,
        latency_s=_NETWORK_HOP_S,
        source=f"{host.source}; efficiency 0.9: nccl-tests; {_NCCL_SOURCE}",
    )
    return (network, switch)
