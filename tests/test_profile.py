"""`autoplan profile` end to end on two simulated devices: what it measures, keeps, goes on with, and changes."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from autoplan import cli, devices, parallelize
from autoplan.cost_models import COLLECTIVE_KINDS, WHATS, Profile, compute_time_s, parse_cluster
from autoplan.errors import ClusterError
from autoplan.profiling import command, find_profile, measure, profile_path, store
from autoplan.profiling.programs import Sizes, sizes, tasks

TINY = Sizes(
    rows=(4, 8), columns=(8,), dtypes=("float32",), images=((4, 2),), bytes_moved=(1024, 2**19, 2**21),
    payloads=(256, 4096), repeats=3,
)  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and little to measure."""
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(command, "sizes", lambda platform, quick: TINY)
    monkeypatch.setattr(command, "_simulate", lambda count: None)  # JAX has started already
    return tmp_path


def made_up(name: str, **changes) -> Path:
    """A finished profile at its place: every time is a second."""
    cluster = parse_cluster(name)
    profile = measure.new_profile(cluster, jax.devices()[: cluster.num_devices])
    rows = tuple(
        measure.Measurement(t.what, t.dtype, t.dims, t.axis_size, t.stride, float(t.bytes), 1.0, 0.0, 3)
        for t in tasks(cluster, TINY)
    )
    profile = measure.replace(profile, **{"complete": "full", "rows": rows, **changes})
    store.save(profile, profile_path(cluster))
    return profile_path(cluster)


@pytest.mark.endtoend
def test_end_to_end_on_two_devices(cache: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["profile", "--cluster", "cpu:2"]) == cli.OK
    printed = capsys.readouterr()
    assert "all-to-all over 2 devices" in printed.out and "matmul float32 4 x 8 x 8" in printed.out
    assert printed.err == ""  # no progress bar where there is no terminal
    cluster = parse_cluster("cpu:2")
    profile = Profile.from_json(profile_path(cluster).read_text())
    assert {row.what for row in profile.rows} == set(WHATS)
    assert profile.complete == "full" and all(row.time_s > 0 for row in profile.rows)
    assert {row.axis_size for row in profile.of(*COLLECTIVE_KINDS)} == {2}

    found = devices.resolve("cpu:2").cluster
    assert found != cluster and found.device.tables and found.device.stream and len(found.measured) == 5
    assert any(f"profile of {profile.date[:10]}" in source for _, source in found.describe_sources())
    assert devices.resolve(jax.devices()[:2]).cluster == found
    assert devices.resolve("cpu:4").cluster == parse_cluster("cpu:4")
    assert devices.resolve(cluster).cluster == cluster  # a Cluster is taken as it is

    assert cli.main(["profile", "--cluster", "cpu:2", "--json"]) == cli.OK
    assert Profile.from_json(capsys.readouterr().out) == profile  # all was there already
    assert cli.main(["profile", "--cluster", "cpu:2"]) == cli.OK
    assert "All of it was there already" in capsys.readouterr().out
    assert cli.main(["profile", "--cluster", "cpu:2", "--clear"]) == cli.OK
    assert "removed" in capsys.readouterr().err and find_profile(cluster) is None
    assert cli.main(["profile", "--cluster", "cpu:2", "--clear"]) == cli.OK


def test_after_an_interrupt_it_goes_on(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    made: list = []

    def timed(task, order, repeats):
        if len(made) == 5:
            made.append(None)
            raise KeyboardInterrupt
        made.append(task.key)
        return measure.Measurement(
            task.what, task.dtype, task.dims, task.axis_size, task.stride, float(task.bytes), 1e-3, 0.0, 3
        )

    monkeypatch.setattr(measure, "time_task", timed)
    assert cli.main(["profile", "--cluster", "cpu:2"]) == command.INTERRUPTED
    assert "Run it again" in capsys.readouterr().err
    cluster = parse_cluster("cpu:2")
    assert len(Profile.from_json(profile_path(cluster).read_text()).rows) == 5
    assert find_profile(cluster) is None  # unfinished ones are not used
    assert cli.main(["profile", "--cluster", "cpu:2"]) == cli.OK
    keys = [key for key in made if key]
    assert len(keys) == len(set(keys)) == len(tasks(cluster, TINY))
    assert find_profile(cluster) is not None


def test_a_profile_of_another_version_is_ignored_and_measured_anew(cache: Path, capsys) -> None:
    path = made_up("cpu:2")
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
    with pytest.warns(UserWarning, match=r"is ignored: it has version 0.*--clear"):
        assert find_profile(parse_cluster("cpu:2")) is None
    assert cli.main(["profile", "--cluster", "cpu:2", "--quick"]) == cli.OK
    assert "measured anew" in capsys.readouterr().err
    assert find_profile(parse_cluster("cpu:2")).complete == "quick"


def test_other_versions_of_jax_have_profiles_of_their_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up("cpu:2")
    assert find_profile(parse_cluster("cpu:2")) is not None
    monkeypatch.setattr(store, "jax_versions", lambda: ("0.99", "0.99"))
    assert find_profile(parse_cluster("cpu:2")) is None


def test_a_profile_changes_predictions(cache: Path) -> None:
    def step(w, x):
        return w - x.T @ (x @ w)

    shapes = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    before = parallelize(step, cluster="cpu:2").plan(*shapes)
    made_up("cpu:2")
    after = parallelize(step, cluster="cpu:2").plan(*shapes)
    assert before.step_time_s < 0.01 and after.step_time_s > 1.0
    slow = devices.resolve("cpu:2").cluster.device
    assert compute_time_s(slow, 2 * 4 * 8 * 8, "float32", 0, [4, 8, 8]) > 1.0


def test_a_cluster_file_can_be_planned_for(cache: Path) -> None:
    path = cache / "lab.toml"
    path.write_text('hosts = 2\ndevices_per_host = 2\n[device]\nlike = "A100"\n[network]\nbytes_per_s = 1e9\n')
    plan = parallelize(lambda w: w * 2, cluster=str(path)).plan(jax.ShapeDtypeStruct((8, 8), "float32"))
    assert plan.cluster == "lab" and plan.mesh.num_devices == 4
    path.write_text('hosts = 2\ndevices_per_host = 2\n[device]\nlike = "A1000"\n')
    with pytest.raises(ClusterError, match=r"lab\.toml: device\.like: expected a known device"):
        parallelize(lambda w: w * 2, cluster=str(path))


def test_where_profiles_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.CACHE_VARIABLE, "/own")
    assert store.cache_folder() == Path("/own")
    monkeypatch.delenv(store.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert store.cache_folder() == Path("/xdg/autoplan")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.cache_folder() == Path.home() / ".cache" / "autoplan"
    names = {profile_path(parse_cluster(text)).name for text in ("8xH100", "2x4xH100", "cpu:8", "v5e:2x4")}
    assert len(names) == 4 and all(f"jax{jax.__version__}" in name for name in names)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--cluster", "cpu:0"], cli.USAGE, "at least 1"),
        (["--cluster", "none.toml"], cli.USAGE, "none.toml: cannot be read"),
        (["--cluster", "8xH100"], cli.FAILED, "profiling 8xH100 needs its 8 gpu devices; got 8 cpu"),
        (["--cluster", "cpu:4096"], cli.FAILED, "profiling cpu:4096 needs its 4096 cpu devices"),
        (["--clear", "--json"], cli.USAGE, "--clear measures nothing"),
        (["--slow"], cli.USAGE, "unrecognized arguments"),
    ],
)
def test_nonsense_is_refused(cache: Path, capsys, arguments: list[str], code: int, says: str) -> None:
    assert cli.main(["profile", *arguments]) == code
    assert says in " ".join(capsys.readouterr().err.split())
    assert not list(cache.rglob("*.json"))


def test_a_folder_that_cannot_be_written_is_an_error(cache: Path, monkeypatch, capsys) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(cache / "file"))
    assert cli.main(["profile", "--cluster", "cpu:2"]) == cli.FAILED
    assert "AUTOPLAN_CACHE" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["8xH100", "2x8xH100", "v5p:4x4x4", "cpu:8", "cpu:1"])
@pytest.mark.parametrize("quick", [True, False])
def test_what_is_measured(name: str, quick: bool) -> None:
    cluster = parse_cluster(name)
    todo = tasks(cluster, sizes(cluster.device.platform, quick))
    assert len({task.key for task in todo}) == len(todo)
    for size, stride in cluster.axes():
        payloads = [t.bytes for t in todo if (t.what, t.axis_size, t.stride) == ("all-gather", size, stride)]
        assert len(payloads) > 1 and all(payload % (4 * size) == 0 for payload in payloads)
    json.dumps([task.key for task in todo])
