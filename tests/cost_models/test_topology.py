"""What a mesh laid over a topology gives to its axes, and which meshes there are."""

import math

import pytest

from autoplan.cost_models import DEVICES, cluster_of, collective_time_s, parse_cluster

ALL = ["v5e:4x4", "v5e:16x16", "v5p:2x2x4", "v5p:4x4x8", "v4:4x4x12", "2 x v5e:8x8", "8xH100", "4x8xH100",
       "8xV100", "3x2xB200", "6xA100", "cpu:8", "cpu:6", "cpu:7", "cpu:1"]  # fmt: skip


def wraps(text: str) -> tuple[bool, ...]:
    return parse_cluster(text).levels[-1].wraps


def test_torus_wraps_as_hardware_has_it() -> None:
    assert wraps("v5e:4x4") == (False, False)
    assert wraps("v5e:8x16") == (False, True)
    assert wraps("v6e:16x16") == (True, True)
    assert wraps("v5e:1x16") == (False, False)
    assert wraps("v5p:2x2x4") == (False, False, False)
    assert wraps("v5p:4x4x4") == (True, True, True)
    assert wraps("v4:4x4x12") == (True, True, True)


def test_a_ring_has_twice_the_links_of_a_line() -> None:
    link = 0.95 * 4.5e10
    axis_0, axis_1 = parse_cluster("v5e:8x16").mesh((8, 16)).links
    assert axis_0.bytes_per_s == pytest.approx(link)
    assert axis_1.bytes_per_s == pytest.approx(2 * link)
    assert (axis_0.wraps, axis_1.wraps) == (False, True)
    assert (axis_0.gather_latency_s, axis_1.gather_latency_s) == pytest.approx((7e-6, 8e-6))


def test_an_axis_over_several_dims_uses_the_links_of_all() -> None:
    link = 0.95 * 9e10
    cluster = parse_cluster("v5p:4x4x4")
    assert cluster.mesh((64,)).links[0].bytes_per_s == pytest.approx(6 * link)
    assert [axis.bytes_per_s for axis in cluster.mesh((4, 16)).links] == pytest.approx([2 * link, 4 * link])


def test_parts_of_a_dim() -> None:
    """The inner half of a line of 4 is neighbours; the outer half shares each wire among two groups."""
    link = 0.95 * 4.5e10
    outer, inner = parse_cluster("v5e:1x4").mesh((2, 2)).links
    assert inner.bytes_per_s == pytest.approx(link)
    assert outer.bytes_per_s == pytest.approx(link / 2)
    assert inner.gather_latency_s == pytest.approx(1e-6) and outer.gather_latency_s == pytest.approx(2e-6)
    assert "stride 2" in outer.description and "ICI torus dim 1" in outer.description


def test_all_to_all_is_bound_by_the_bisection() -> None:
    link = 0.95 * 4.5e10
    line, ring = parse_cluster("v5e:8x16").mesh((8, 16)).links
    time_s = collective_time_s("all-to-all", line, 8, 1e9) - line.gather_latency_s
    assert time_s == pytest.approx(8 * 1e9 / (4 * link))
    time_s = collective_time_s("all-to-all", ring, 16, 1e9) - ring.gather_latency_s
    assert time_s == pytest.approx(16 * 1e9 / (8 * link))


def test_hosts_carry_a_share_on_every_port() -> None:
    """Over 4 hosts with 8 GPUs each, an all-gather of B needs B 3/4 / (8 ports) on the network."""
    cluster = parse_cluster("4x8xH100")
    across, inside = cluster.mesh((4, 8)).links
    assert inside.bytes_per_s == pytest.approx(0.82 * 450e9)
    assert across.bytes_per_s == pytest.approx(0.9 * 50e9)
    both = cluster.mesh((32,)).links[0]
    network_s = 0.75 / (8 * 0.9 * 50e9)
    nvlink_s = 7 / 8 / (0.82 * 450e9)
    assert both.bytes_per_s == pytest.approx(31 / 32 / max(network_s, nvlink_s))
    assert "NVLink" in both.description and "between hosts" in both.description
    assert both.shift_bytes_per_s == across.bytes_per_s


def test_slices_do_the_slow_part_after_the_fast_one() -> None:
    cluster = parse_cluster("2 x v5e:8x8")
    across, inside = cluster.mesh((2, 64)).links
    assert "data-centre network" in across.description
    both = cluster.mesh((128,)).links[0]
    network_s = 0.5 / (64 * across.bytes_per_s)
    assert both.bytes_per_s == pytest.approx(127 / 128 / (network_s + 63 / 64 / inside.bytes_per_s))


def test_small_groups_of_a_hybrid_cube_mesh_have_fewer_links() -> None:
    cluster = parse_cluster("8xV100")
    pair, quad = cluster.mesh((2, 4)).links
    octet = cluster.mesh((8,)).links[0]
    assert pair.bytes_per_s < quad.bytes_per_s < octet.bytes_per_s


def test_meshes_that_cut_across_the_wiring_are_priced_cautiously() -> None:
    cluster = parse_cluster("2x3xH100")
    aligned, crossing = cluster.mesh((2, 3)), cluster.mesh((3, 2))
    assert all("not aligned" in link.description for link in crossing.links)
    for link in crossing.links:
        assert link.bytes_per_s == pytest.approx(aligned.links[0].bytes_per_s)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (8, 1, 2), (-2, -4), (), (0, 8), (2.0, 4)])
def test_meshes_must_fit(shape: tuple) -> None:
    with pytest.raises(ValueError, match="does not fit 8 devices"):
        parse_cluster("8xH100").mesh(shape)


def test_axes_of_one_device_are_free() -> None:
    mesh = parse_cluster("8xH100").mesh((1, 8, 1))
    assert mesh.shape == (1, 8, 1)
    assert collective_time_s("all-reduce", mesh.links[0], 1, 1e9) == 0
    assert mesh.links[1] == parse_cluster("8xH100").mesh((8,)).links[0]


def test_mesh_shapes() -> None:
    assert parse_cluster("cpu:8").mesh_shapes() == ((8,), (2, 4), (2, 2, 2))
    assert parse_cluster("8xH100").mesh_shapes(max_axes=2) == ((8,), (2, 4))
    assert parse_cluster("cpu:1").mesh_shapes() == ((1,),)
    assert parse_cluster("cpu:3").mesh_shapes() == ((3,),)
    assert parse_cluster("cpu:7").mesh_shapes() == ((7,),)
    assert parse_cluster("6xH100").mesh_shapes() == ((6,), (2, 3))
    assert parse_cluster("cpu:12").mesh_shapes() == ((12,), (2, 6), (3, 4), (2, 2, 3))
    assert parse_cluster("v5e:8x8").mesh_shapes(2) == ((64,), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2))
    assert parse_cluster("4x8xH100").mesh_shapes(1) == ((32,),)
    assert {(2, 16), (4, 8), (8, 4), (16, 2)} < set(parse_cluster("4x8xH100").mesh_shapes(2))
    with pytest.raises(ValueError, match="max_axes"):
        parse_cluster("cpu:8").mesh_shapes(0)


@pytest.mark.parametrize("text", ALL)
def test_every_mesh_of_every_cluster_has_sane_links(text: str) -> None:
    cluster = parse_cluster(text)
    shapes = cluster.mesh_shapes()
    assert (cluster.num_devices,) in shapes and len(set(shapes)) == len(shapes)
    assert shapes == parse_cluster(text).mesh_shapes()
    fastest = max(level.bytes_per_s * 2 * len(level.sizes) for level in cluster.levels)
    for shape in shapes:
        assert math.prod(shape) == cluster.num_devices
        for link in cluster.mesh(shape).links:
            if link.size > 1 and cluster.device.platform != "cpu":
                assert 0 < link.exchange_bytes_per_s <= link.bytes_per_s * (1 + 1e-9)
                assert link.shift_bytes_per_s > 0
                assert link.bytes_per_s <= fastest * 2
                assert 0 < link.latency_s <= link.gather_latency_s * (1 + 1e-9)


def test_figures_are_si_and_have_sources() -> None:
    gib = 2**30
    assert DEVICES["H100"].memory_bytes_per_s == 3.35e12
    assert 79 * gib < DEVICES["H100"].memory_bytes < 80 * gib
    assert DEVICES["v5e"].memory_bytes == 16 * gib and DEVICES["v5e"].usable_memory_bytes == 15.75 * gib
    for device in [*DEVICES.values(), cluster_of("cpu", "cpu", 4, 1).device]:
        assert {name for name, _ in device.sources} - {"on_chip_bytes"} == {
            "peak_flops_per_s", "memory_bytes", "usable_memory_bytes", "memory_bytes_per_s",
            "matmul_efficiency", "memory_efficiency", "op_overhead_s",
        }  # fmt: skip
        assert ("on_chip_bytes" in dict(device.sources)) == (device.on_chip_bytes > 0)
        assert device.peak("float32") > 1e9
    for text in ALL:
        assert all(level.source for level in parse_cluster(text).levels)
