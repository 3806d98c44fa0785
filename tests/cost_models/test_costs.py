"""Collectives and operations against values computed by hand."""

import dataclasses

import numpy as np
import pytest

from autoplan.cost_models import (
    COLLECTIVE_KINDS,
    DEVICES,
    CollectivePoints,
    Link,
    collective_time_s,
    compute_time_s,
    cpu_device,
    parse_cluster,
    wire_bytes,
)

LINK = Link(4, 1e9, 5e8, 2.5e8, 1e-5, 1e-6, 3e-6, True, "by hand")


def test_wire_bytes() -> None:
    assert {kind: float(wire_bytes(kind, 4, 8e6)) for kind in COLLECTIVE_KINDS} == {
        "all-reduce": 12e6,
        "all-gather": 6e6,
        "reduce-scatter": 6e6,
        "all-to-all": 6e6,
        "collective-permute": 8e6,
    }
    assert all(wire_bytes(kind, 1, 8e6) == 0 for kind in COLLECTIVE_KINDS)


def test_collective_times_by_hand() -> None:
    times = {kind: float(collective_time_s(kind, LINK, 4, 4e6)) for kind in COLLECTIVE_KINDS}
    assert times == pytest.approx(
        {
            "all-reduce": 1e-5 + 6e-6 + 6e6 / 1e9,
            "all-gather": 1e-5 + 3e-6 + 3e6 / 1e9,
            "reduce-scatter": 1e-5 + 3e-6 + 3e6 / 1e9,
            "all-to-all": 1e-5 + 3e-6 + 3e6 / 5e8,
            "collective-permute": 1e-5 + 1e-6 + 4e6 / 2.5e8,
        }
    )


def test_all_reduce_on_eight_h100() -> None:
    """1 GB: 2 * 7/8 GB over 369 GB/s of NVLink, about 4.7 ms."""
    link = parse_cluster("8xH100").mesh((8,)).links[0]
    assert collective_time_s("all-reduce", link, 8, 1e9) == pytest.approx(1.75e9 / 369e9, rel=0.01)


@pytest.mark.parametrize("text", ["v5e:4x4", "v5p:4x4x4", "2 x v5e:4x4", "2x8xH100", "8xV100", "cpu:8"])
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_times_grow_with_the_payload_and_keep_its_shape(text: str, kind: str) -> None:
    payloads = np.array([[0.0, 1.0, 1e2], [1e4, 1e6, 1e9]])
    for link in parse_cluster(text).mesh((2, parse_cluster(text).num_devices // 2)).links:
        times = collective_time_s(kind, link, link.size, payloads)
        assert times.shape == payloads.shape and times.dtype == np.float64
        assert times[0, 0] == 0 and times[0, 1] > 0
        assert np.all(np.diff(times.ravel()) > 0)
        assert collective_time_s(kind, link, link.size, 1e6) == times[1, 1]


def test_all_reduce_costs_a_reduce_scatter_and_an_all_gather() -> None:
    for text in ("v5e:4x4", "2x8xH100"):
        link = parse_cluster(text).mesh((16,)).links[0]
        both = sum(collective_time_s(kind, link, 16, 1e8) for kind in ("all-gather", "reduce-scatter"))
        assert collective_time_s("all-reduce", link, 16, 1e8) == pytest.approx(both - link.base_latency_s)


def test_measured_points_replace_formulas() -> None:
    points = CollectivePoints("all-gather", (1e3, 1e6, 2e6), (1e-4, 2e-4, 4e-4), "by hand")
    link = dataclasses.replace(LINK, points=(points,))
    times = collective_time_s("all-gather", link, 4, [0.0, 1.0, 1e3, 1.5e6, 2e6, 3e6])
    assert times == pytest.approx([0.0, 1e-4, 1e-4, 3e-4, 4e-4, 6e-4])
    assert collective_time_s("all-reduce", link, 4, 1e6) == collective_time_s("all-reduce", LINK, 4, 1e6)


@pytest.mark.parametrize(
    ("kind", "sizes", "times", "says"),
    [
        ("broadcast", (1.0, 2.0), (1.0, 2.0), "unknown collective"),
        ("all-gather", (1.0,), (1.0,), "two or more"),
        ("all-gather", (2.0, 1.0), (1.0, 2.0), "ascend"),
        ("all-gather", (1.0, 2.0), (2.0, 1.0), "must not fall"),
    ],
)
def test_points_are_checked(kind: str, sizes: tuple, times: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CollectivePoints(kind, sizes, times, "by hand")


def test_collectives_check_their_arguments() -> None:
    with pytest.raises(ValueError, match="unknown collective 'broadcast'"):
        wire_bytes("broadcast", 4, 1.0)
    with pytest.raises(ValueError, match="at least one device"):
        wire_bytes("all-reduce", 0, 1.0)
    with pytest.raises(ValueError, match="axis of 8 devices priced with a link of 4"):
        collective_time_s("all-reduce", LINK, 8, 1.0)


def test_roofline() -> None:
    halves = {"matmul_efficiency": 0.5, "memory_efficiency": 0.5, "op_overhead_s": 1e-6}
    device = dataclasses.replace(DEVICES["H100"], **halves)
    assert compute_time_s(device, 989.4e12, "bfloat16", 0) == pytest.approx(2.0, rel=1e-5)
    assert compute_time_s(device, 0, "bfloat16", 3.35e12) == pytest.approx(2.0, rel=1e-5)
    assert compute_time_s(device, 0, "float32", 0) == 0
    times = compute_time_s(device, np.array([0.0, 1.0, 1e15]), "float32", np.array([[1.0], [1e12]]))
    assert times.shape == (2, 3)
    assert np.all(times >= 1e-6) and np.all(np.diff(times) >= 0)


def test_peaks_follow_the_dtype() -> None:
    v5e, h100 = DEVICES["v5e"], DEVICES["H100"]
    assert v5e.peak("float32") == v5e.peak("bfloat16") == v5e.peak(np.dtype("float16")) == 197e12
    assert v5e.peak("int8") == v5e.peak("int4") == 393e12
    assert h100.peak("bfloat16") == 2 * h100.peak("float32") < h100.peak("float8_e4m3fn")
    assert v5e.peak("float8_e5m2") == v5e.peak("bfloat16")
    assert h100.peak("bool") == h100.peak("int32") == h100.peak("key<fry>") == h100.peak("float32")


def test_simulated_devices_share_one_machine() -> None:
    two, eight = cpu_device(2), cpu_device(8)
    assert two.peak("float32") == 4 * eight.peak("float32")
    assert two.memory_bytes_per_s == 4 * eight.memory_bytes_per_s
    assert two.memory_bytes == 4 * eight.memory_bytes
    with pytest.raises(ValueError, match="at least one device"):
        cpu_device(0)


def test_simulated_collectives_share_one_machine() -> None:
    """The same groups cost more when more devices share the cores, and larger groups more than smaller
    ones."""
    pair_of_4 = parse_cluster("cpu:4").mesh((2, 2)).links[0]
    pair_of_8, quad_of_8 = parse_cluster("cpu:8").mesh((2, 4)).links
    for kind in COLLECTIVE_KINDS:
        for payload in (256.0, 1e5, 1e7):
            four, eight = (collective_time_s(kind, link, 2, payload) for link in (pair_of_4, pair_of_8))
            assert four < eight <= collective_time_s(kind, quad_of_8, 4, payload)


def test_device_specs_are_checked() -> None:
    device = DEVICES["v5e"]
    with pytest.raises(ValueError, match="float32"):
        dataclasses.replace(device, peak_flops_per_s=(("bfloat16", 1e12),))
    with pytest.raises(ValueError, match="usable_memory_bytes"):
        dataclasses.replace(device, usable_memory_bytes=1e15)
    with pytest.raises(ValueError, match="efficiencies"):
        dataclasses.replace(device, matmul_efficiency=1.5)
