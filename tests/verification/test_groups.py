"""Groups of devices in every notation, and the mesh axes that they are."""

from __future__ import annotations

import pytest

from autoplan.verification.groups import replica_groups, source_target_pairs, varying_axes


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("channel_id=1", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=[1,4]<=[4], use_global_device_ids=true", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['x'=2,'y'=2] {'y'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['x'=2,'y'=2] {'x'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['x'=2,'y'=2] {'x','y'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['x'=4] {'x':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['x'=4] {'x':(2)2}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=(3,2,1,0) {'y'}", ((3, 2), (1, 0))),
    ],
)
def test_replica_groups(text, groups):
    assert replica_groups(text, 4) == groups


def test_source_target_pairs():
    assert source_target_pairs("source_target_pairs={{0,1},{1,0}}, channel_id=3") == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    ("devices", "axes"),
    [((0, 1), ("y",)), ((0, 4), ("x",)), ((0, 1, 2, 3), ("y",)), (tuple(range(8)), ("x", "y")), ((5,), ())],
)
def test_axes_of_a_group(devices, axes):
    assert varying_axes(devices, {"x": 2, "y": 4}) == axes


def test_an_unknown_notation_is_no_group_of_all():
    with pytest.raises(ValueError, match="unknown notation"):
        replica_groups("replica_groups=magic[4]", 4)
