"""Profiles as files, and what they change in a cluster's figures, by hand."""

import dataclasses
import json

import pytest

from autoplan.cost_models import (
    COLLECTIVE_KINDS,
    Measurement,
    Profile,
    ProfileError,
    calibrate,
    collective_time_s,
    compute_time_s,
    parse_cluster,
)


def row(what: str, time_s: float, *, dims=(), size=0, stride=1, moved=0.0, dtype="float32") -> Measurement:
    return Measurement(what, dtype, dims, size, stride if size else 0, moved, time_s, 0.1, 5)


ROWS = (
    row("dispatch", 1e-4, moved=64),
    row("elementwise", 1e-6, moved=8192),
    row("elementwise", 11e-6, moved=1e6),
    row("copy", 13e-6, moved=1e6),
    row("reduce", 8e-6, moved=1e6),
    row("elementwise", 101e-6, moved=1e7),
    row("matmul", 12e-6, dims=(10, 10, 10)),
    row("matmul", 2e-6 + 2e9 / 50e9, dims=(1000, 1000, 1000)),
    row("convolution", 22e-6, dims=(10, 10, 10)),
    *(row(kind, 1e-4, size=size, moved=1e3) for kind in COLLECTIVE_KINDS for size in (2, 4)),
    *(row(kind, 2e-3, size=size, moved=1e6) for kind in COLLECTIVE_KINDS for size in (2, 4)),
)
PROFILE = Profile(
    "cpu:4", "cpu", 4, "0.10.2", "0.10.2", "a machine", "2026-12-01T05:00:00+00:00", "full", ROWS
)


def test_json_round_trip() -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    empty = dataclasses.replace(PROFILE, rows=(), complete="")
    assert Profile.from_json(empty.to_json()) == empty


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-20], "no JSON"),
        (lambda text: "[]", "no autoplan profile"),
        (lambda text: text.replace("autoplan profile", "recipe"), "no autoplan profile"),
        (lambda text: text.replace('"version": 1', '"version": 0'), "version 0, and this autoplan reads version 1"),
        (lambda text: text.replace('"count"', '"number"'), "not understood"),
        (lambda text: text.replace('"spread"', '"width"'), "not understood"),
        (lambda text: text.replace('"copy"', '"sort"'), "unknown measurement 'sort'"),
        (lambda text: text.replace('"time_s": 0.0001', '"time_s": -1'), "positive time"),
        (lambda text: text.replace('"time_s": 0.0001,', '"time_s": "1",'), "not understood"),
        (lambda text: text.replace("[10, 10, 10]", "[10, 10]"), "needs dims"),
        (lambda text: text.replace('"axis_size": 2', '"axis_size": 1'), "needs an axis_size"),
    ],
)
def test_bad_files_say_what_is_wrong(change, says: str) -> None:
    text = change(PROFILE.to_json())
    with pytest.raises(ProfileError, match=says):
        Profile.from_json(text)


def test_it_fits_only_its_own_cluster() -> None:
    with pytest.raises(ProfileError, match="'cpu:4', says nothing of 'cpu:8'"):
        calibrate(parse_cluster("cpu:8"), PROFILE)


def test_what_it_changes_by_hand() -> None:
    cluster = calibrate(parse_cluster("cpu:4"), PROFILE)
    device = cluster.device
    assert device.op_overhead_s == 1e-6
    assert device.peak("float32") == pytest.approx(50e9)  # two overheads off: the matmul's and its follower's
    times = compute_time_s(device, [2e3, 2e9], "float32", 0, [[10, 10, 10], [1000, 1000, 1000]])
    assert times == pytest.approx([11e-6, 1e-6 + 40e-3])
    assert compute_time_s(device, 2e3, "float32", 0, [10, 10, 10], "convolution") == pytest.approx(21e-6)
    # streaming: the median of 10, 12 and 6 us at 1 MB, then 10 us more a MB
    assert compute_time_s(device, 0, "float32", [5e5, 1e6, 1e7, 2e7]) == pytest.approx([6e-6, 11e-6, 101e-6, 201e-6])
    link = cluster.mesh((2, 2)).links[0]
    assert collective_time_s("all-reduce", link, 2, [1e3, 1e6]) == pytest.approx([1e-4, 2e-3])
    assert collective_time_s("all-gather", link, 2, 1e3) == pytest.approx(1e-4 - 1e-6)  # its follower off


def test_accelerators_keep_their_data_sheets() -> None:
    profile = dataclasses.replace(PROFILE, cluster="4xH100")
    cluster = calibrate(parse_cluster("4xH100"), profile)
    assert cluster.device.peak("float32") == parse_cluster("4xH100").device.peak("float32")
    assert cluster.device.matmul_efficiency == pytest.approx(50e9 / 494.7e12)
    assert float(compute_time_s(cluster.device, 2e9, "float32", 0, [1000, 1000, 1000])) == pytest.approx(1e-6 + 40e-3)


def test_times_that_fall_with_the_size_are_levelled() -> None:
    noisy = [row("all-reduce", t, size=2, moved=b) for b, t in ((1e3, 4e-4), (1e4, 1e-4), (1e5, 1e-3))]
    points = calibrate(parse_cluster("cpu:2"), dataclasses.replace(PROFILE, cluster="cpu:2", count=2, rows=noisy))
    assert points.measured[0].points.time_s == pytest.approx((2e-4, 2e-4, 1e-3))


def test_axes_take_what_was_measured_along_them_or_along_their_like() -> None:
    rows = [
        row("all-reduce", t * stride, size=2, stride=stride, moved=b) for b, t in ((1e3, 1e-4), (1e6, 1e-3))
        for stride in (1, 4)
    ]  # fmt: skip
    profile = dataclasses.replace(PROFILE, cluster="2x4xH100", count=8, rows=tuple(rows))
    cluster = calibrate(parse_cluster("2x4xH100"), profile)
    assert cluster.axes() == ((2, 1), (2, 4), (4, 1), (4, 2), (8, 1))
    times = [float(collective_time_s("all-reduce", link, 2, 1e3)) for link in cluster.mesh((2, 2, 2)).links]
    assert times == pytest.approx([4e-4, 1e-4, 1e-4])  # hosts; then a switch, whatever the stride
    assert cluster.mesh((8,)).links == parse_cluster("2x4xH100").mesh((8,)).links


def test_sources_say_which_figure_came_from_where() -> None:
    before = dict(parse_cluster("cpu:4").describe_sources())
    assert any("memory bandwidth" in figures and "measured 2026-11-30" in before[figures] for figures in before)
    sources = {source: figures for figures, source in calibrate(parse_cluster("cpu:4"), PROFILE).describe_sources()}
    measured = sources["profile of 2026-12-01, jax 0.10.2, a machine"]
    for figure in ("peak rates", "overhead per operation", "matmuls by shape (float32)", "streaming by size",
                   "collectives over 2 devices", "collectives over 4 devices"):  # fmt: skip
        assert figure in measured
    assert not any("memory bandwidth" in figures or figures == "shared memory" for figures in sources.values())
    assert "memory" in sources["assumed: a machine of 16 GiB, divided among the simulated devices"]


def test_every_line_of_the_file_is_one_measurement() -> None:
    lines = PROFILE.to_json().splitlines()
    assert sum(line.startswith('  {"what"') for line in lines) == len(ROWS)
    assert json.loads(PROFILE.to_json())["version"] == 1
