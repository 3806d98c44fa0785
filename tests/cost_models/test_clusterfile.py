"""Clusters from files: what they give, and errors that name file, key and what was expected."""

import json
from pathlib import Path

import pytest

from autoplan.cost_models import DEVICES, ClusterError, parse_cluster

WHOLE = """
name = "lab"
hosts = 2
devices_per_host = 4

[device]
name = "Accelerator-1"
platform = "gpu"
peak_flops_per_s = {bfloat16 = 100e12, float32 = 50e12}
memory = "32GiB"
memory_bytes_per_s = 1e12
matmul_efficiency = 0.7
memory_efficiency = 0.8

[links]
bytes_per_s = 25e9
latency_s = 2e-6

[network]
bytes_per_s = 2.5e9
latency_s = 1e-5
base_latency_s = 2e-5
"""


def written(folder: Path, text: str, name: str = "my.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    cluster = parse_cluster(written(tmp_path, WHOLE))
    assert (cluster.name, cluster.dims, cluster.device.name) == ("lab", (2, 4), "Accelerator-1")
    assert cluster.device.peak("float16") == 100e12
    assert cluster.device.memory_bytes == 32 * 2**30 and cluster.device.usable_memory_bytes == 0.9 * 32 * 2**30
    across, inside = cluster.mesh((2, 4)).links
    assert (across.bytes_per_s, across.base_latency_s, across.latency_s) == (2.5e9, 2e-5, 1e-5)
    assert (inside.bytes_per_s, inside.base_latency_s, inside.gather_latency_s) == (25e9, 0.0, 6e-6)
    assert all("my.toml" in source for _, source in cluster.describe_sources())


def test_a_known_device_with_other_figures(tmp_path: Path) -> None:
    text = 'hosts = 2\ndevices_per_host = 8\n[device]\nlike = "a100"\nmemory = "40GiB"\n[network]\nbytes_per_s = 5e9\n'
    cluster = parse_cluster(written(tmp_path, text))
    known = DEVICES["A100-80GB"]
    assert cluster.name == "my" and cluster.device.peak("bfloat16") == known.peak("bfloat16")
    assert cluster.device.usable_memory_bytes == pytest.approx(0.75 * 40 * 2**30)
    assert cluster.levels[1] == parse_cluster("2x8xA100").levels[1]
    assert cluster.levels[0].bytes_per_s == 5e9
    assert cluster.levels[0].latency_s == parse_cluster("2x8xA100").levels[0].latency_s
    assert "the rest" in cluster.levels[0].source


def test_a_torus_in_json(tmp_path: Path) -> None:
    content = {"device": "v5e", "torus": [4, 6], "wraps": [True, False]}
    cluster = parse_cluster(written(tmp_path, json.dumps(content), "pod.json"))
    assert (cluster.name, cluster.dims, cluster.levels[0].wraps) == ("pod", (4, 6), (True, False))
    assert cluster.device == parse_cluster("v5e:4x4").device
    same = parse_cluster(written(tmp_path, '{"device": "v5e", "torus": [4, 4]}', "same.json"))
    assert same.levels == parse_cluster("v5e:4x4").levels


def test_a_peak_of_ones_own_drops_the_compilers_table(tmp_path: Path) -> None:
    text = 'torus = [2, 2]\n[device]\nlike = "v5e"\nmatmul_efficiency = 0.5\n'
    assert parse_cluster(written(tmp_path, text)).device.tables == ()


def changed(old: str, new: str) -> str:
    assert old in WHOLE
    return WHOLE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts = ", "no valid TOML"),
        (changed("hosts = 2", "hosts = 0"), "hosts: expected a whole number, at least 1, got 0"),
        (changed("hosts = 2", "hosts = true"), "hosts: expected a whole number"),
        (changed("hosts = 2", "host = 2"), "host: expected one of device, name, hosts"),
        (changed("devices_per_host = 4", ""), "devices_per_host: expected either"),
        (changed("devices_per_host = 4", "torus = []"), "torus: expected a list of whole numbers"),
        (changed("devices_per_host = 4", "wraps = [true]\ndevices_per_host = 4"), "wraps: expected one true or false"),
        (changed('memory = "32GiB"', 'memory = "32 apples"'), 'device.memory: expected a size such as "80GiB"'),
        (changed('memory = "32GiB"', 'memory = "1.2.3GB"'), "device.memory: expected a size"),
        (changed('memory = "32GiB"', ""), "device.memory: expected a size such as"),
        (changed("50e12}", '"fast"}'), "device.peak_flops_per_s: expected a table of FLOP/s"),
        (changed(", float32 = 50e12", ""), "positive rates and 'float32'"),
        (changed("efficiency = 0.7", "efficiency = 70"), "device.matmul_efficiency: expected a fraction"),
        (changed('"gpu"', '"npu"'), "device.platform: expected one of"),
        (changed("[device]", '[device]\nlike = "H1000"'), "device.like: expected a known device: v4"),
        (changed("[links]\nbytes_per_s = 25e9", "[links]\nbytes_per_s = -1"), "links.bytes_per_s: expected a number"),
        (changed("latency_s = 2e-6", 'latency_s = "2us"'), "links.latency_s: expected seconds"),
        (changed("[links]", "[link]"), "link: expected one of"),
        (changed("latency_s = 1e-5\nbase_latency_s", "latency"), "network.latency_s: expected seconds, 0 or more, got"),
        ("devices_per_host = 4", "device: expected a table of keys, got nothing"),
        ('device = "H1000"\ndevices_per_host = 4', "device: expected a known device"),
        ('device = "H100"\ntorus = [4, 4]', "links: expected a table with bytes_per_s"),
    ],
)
def test_errors_name_file_key_and_what_was_expected(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ClusterError) as error:
        parse_cluster(path)
    assert says in str(error.value) and path in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.toml: cannot be read: No such file"):
        parse_cluster(str(tmp_path / "none.toml"))
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ClusterError, match="cannot be read"):
        parse_cluster(str(tmp_path / "folder.json"))
