"""Cluster strings, what JAX says of devices, and the errors for what cannot be."""

import dataclasses

import pytest

from autoplan.cost_models import DEVICES, Cluster, ClusterError, Level, cluster_of, parse_cluster


@pytest.mark.parametrize(
    ("text", "name", "dims"),
    [
        ("v5e:4x4", "v5e:4x4", (4, 4)),
        ("V5P : 4x4x4", "v5p:4x4x4", (4, 4, 4)),
        ("v4:2x2x1", "v4:2x2x1", (2, 2, 1)),
        ("v6e:16x16", "v6e:16x16", (16, 16)),
        ("v5p:4x4x12", "v5p:4x4x12", (4, 4, 12)),
        ("v5e:1x6", "v5e:1x6", (1, 6)),
        ("2 x v5e:8x8", "2 x v5e:8x8", (2, 8, 8)),
        ("2xv5e:8x8", "2 x v5e:8x8", (2, 8, 8)),
        ("1 x v5e:8x8", "v5e:8x8", (8, 8)),
        ("8xH100", "8xH100", (8,)),
        ("4 x 8 x h100", "4x8xH100", (4, 8)),
        ("1x8xH100", "8xH100", (8,)),
        ("H200", "1xH200", (1,)),
        ("8xA100", "8xA100-80GB", (8,)),
        ("3x2xB200", "3x2xB200", (3, 2)),
        ("6xV100", "6xV100", (6,)),
        ("cpu:8", "cpu:8", (8,)),
        ("CPU:1", "cpu:1", (1,)),
    ],
)
def test_parse(text: str, name: str, dims: tuple[int, ...]) -> None:
    cluster = parse_cluster(text)
    assert (cluster.name, cluster.dims) == (name, dims)
    assert parse_cluster(cluster.name) == cluster
    assert hash(parse_cluster(cluster.name)) == hash(cluster)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Known devices: v4"),
        ("8", "is not understood"),
        ("v5e:", "is not understood"),
        ("v5e:4x", "at least 1"),
        ("v7:4x4", "unknown device 'v7'"),
        ("8xH1000", "unknown device 'H1000'"),
        ("v5e-16", "unknown device 'v5e-16'"),
        ("v5e:0x4", "at least 1"),
        ("v5e:4x-4", "at least 1"),
        ("0 x v5e:4x4", "at least 1"),
        ("0xH100", "at least 1"),
        ("-2xH100", "at least 1"),
        ("cpu:0", "at least 1"),
        ("v5e:16", "for 16 chips write 'v5e:4x4'"),
        ("v5e:4x4x4", "2 torus dims, got 3"),
        ("v5p:8x8", "for 64 chips write 'v5p:4x4x4'"),
        ("v5e:3x5", "1, 2, 4, 8 or 16"),
        ("v5e:32x32", "256 chips"),
        ("v5p:4x4x6", "multiples of 4"),
        ("v5p:2x2x8", "multiples of 4"),
        ("16xH100", "write '2x8xH100'"),
        ("2x2x8xH100", "hosts x GPUs per host"),
        ("cpu:2x4", "write 'cpu:8'"),
        ("2 x cpu:4", "write 'cpu:8'"),
        ("cpu", "write it as 'cpu:8'"),
        ("8xcpu", "write it as 'cpu:8'"),
        ("8xv5e", "write it as 'v5e:4x4'"),
        ("8xv5p", "write it as 'v5p:2x2x4'"),
        ("H100:8", "write it as '8xH100'"),
    ],
)
def test_bad_strings_name_the_rule_and_the_next_action(text: str, says: str) -> None:
    with pytest.raises(ClusterError) as error:
        parse_cluster(text)
    assert says in str(error.value)
    assert repr(text) in str(error.value)
    assert "'" in str(error.value).replace(repr(text), "", 1) or "Usual shapes" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "platform", "count", "hosts", "name"),
    [
        ("TPU v5 lite", "tpu", 16, 2, "v5e:4x4"),
        ("TPU v5 lite", "tpu", 8, 1, "v5e:2x4"),
        ("TPU v5 lite", "tpu", 3, 1, "v5e:1x3"),
        ("TPU v5p", "tpu", 64, 16, "v5p:4x4x4"),
        ("TPU v5", "tpu", 8, 2, "v5p:2x2x2"),
        ("TPU v4", "tpu", 4, 1, "v4:2x2x1"),
        ("TPU v6 lite", "tpu", 256, 64, "v6e:16x16"),
        ("NVIDIA H100 80GB HBM3", "gpu", 8, 1, "8xH100"),
        ("NVIDIA H100 80GB HBM3", "gpu", 32, 4, "4x8xH100"),
        ("NVIDIA A100-SXM4-80GB", "gpu", 2, 1, "2xA100-80GB"),
        ("cpu", "cpu", 8, 1, "cpu:8"),
        ("cpu", "cpu", 6, 2, "cpu:6"),
    ],
)
def test_cluster_of_devices(kind: str, platform: str, count: int, hosts: int, name: str) -> None:
    cluster = cluster_of(kind, platform, count, hosts)
    assert (cluster.name, cluster.num_devices) == (name, count)
    assert parse_cluster(name) == cluster


def test_cluster_of_slices() -> None:
    assert cluster_of("TPU v5 lite", "tpu", 128, hosts=16, slices=2).name == "2 x v5e:8x8"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("NVIDIA GeForce RTX 4090", "gpu", 2, 1), "cluster='8xH100'"),
        (("TPU v3", "tpu", 8, 1), "no figures for tpu devices of kind 'TPU v3'"),
        (("NVIDIA H200", "gpu", 9, 2), "do not divide over 2 hosts"),
        (("NVIDIA H200", "gpu", 16, 1), "pass cluster='2x8xH200'"),
        (("cpu", "cpu", 0, 1), "at least 1 device"),
    ],
)
def test_cluster_of_refuses(arguments: tuple, says: str) -> None:
    with pytest.raises(ClusterError) as error:
        cluster_of(*arguments)
    assert says in str(error.value)


def test_clusters_can_be_built_by_hand() -> None:
    ethernet = Level("network", "Ethernet", (2,), (False,), 12.5e9, 1e-5, 1e-5, "data sheet")
    host = Level("switch", "PCIe", (4,), (False,), 2e10, 1e-5, 1e-6, "data sheet")
    device = dataclasses.replace(DEVICES["H100"], name="mine")
    cluster = Cluster("mine", device, (ethernet, host))
    assert cluster.num_devices == 8
    assert [link.bytes_per_s for link in cluster.mesh((2, 4)).links] == pytest.approx([12.5e9, 2e10])
    with pytest.raises(ClusterError, match="networks first"):
        Cluster("wrong", device, (host, ethernet))
