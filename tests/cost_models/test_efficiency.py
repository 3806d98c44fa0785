"""Tables of what devices reach: interpolation by hand, the roofline with them, and the tables that come with it."""

import dataclasses

import numpy as np
import pytest

from autoplan.cost_models import DEVICES, MatmulTable, StreamTable, compute_time_s, parse_cluster

TABLE = MatmulTable("matmul", "bfloat16", ((8, 8, 8), (8, 8, 128)), (0.1, 0.4), "by hand")
DEVICE = dataclasses.replace(DEVICES["H100"], tables=(TABLE,), op_overhead_s=0.0)


def test_points_are_met_and_the_middle_is_the_geometric_mean() -> None:
    assert TABLE.at([8, 8, 8]) == pytest.approx(0.1)
    assert TABLE.at([8, 8, 128]) == pytest.approx(0.4)
    assert TABLE.at([8, 8, 32]) == pytest.approx(np.sqrt(0.1 * 0.4))


def test_weights_fall_with_the_fourth_power_of_the_distance() -> None:
    """16 is one doubling from 8 and three from 128: weights 1 and 1/81."""
    expected = np.exp((np.log(0.1) + np.log(0.4) / 81) / (1 + 1 / 81))
    assert TABLE.at([8, 8, 16]) == pytest.approx(expected)


def test_beyond_the_table_large_dims_count_as_the_largest_and_small_ones_are_padded() -> None:
    assert TABLE.at([4096, 8, 128]) == pytest.approx(0.4)
    assert TABLE.at([8, 8, 2]) == pytest.approx(0.1 / 4)
    assert TABLE.at([0, 8, 8]) == pytest.approx(0.1 / 8)


def test_the_roofline_takes_the_table_where_it_has_one() -> None:
    peak, flops = DEVICE.peak("bfloat16"), 1e15
    times = compute_time_s(DEVICE, flops, "bfloat16", 0, [[8, 8, 8], [8, 8, 128]])
    assert times == pytest.approx([flops / peak / 0.1, flops / peak / 0.4])
    constant = flops / peak / DEVICE.matmul_efficiency
    assert compute_time_s(DEVICE, flops, "bfloat16", 0) == pytest.approx(constant)
    without = dataclasses.replace(DEVICE, tables=())
    assert compute_time_s(without, flops, "bfloat16", 0, [8, 8, 8]) == pytest.approx(constant)
    assert compute_time_s(DEVICE, flops, "float32", 0, [8, 8, 8]) == pytest.approx(2 * constant)
    assert compute_time_s(DEVICE, flops, "float16", 0, [8, 8, 8]) == pytest.approx(constant)  # has its own peak


def test_dims_broadcast_with_flops() -> None:
    dims = np.full((5, 3), 8)
    assert compute_time_s(DEVICE, np.ones((2, 1)), "bfloat16", 0.0, dims).shape == (2, 5)


def test_convolutions_scale_the_matmul_table_by_the_few_that_were_measured() -> None:
    own = MatmulTable("convolution", "bfloat16", ((8, 8, 8),), (0.05,), "by hand")
    both = dataclasses.replace(DEVICE, tables=(TABLE, own))
    dims = [[8, 8, 8], [8, 8, 32]]
    matmuls, convolutions = (both.reached(operation, "bfloat16", dims) for operation in ("matmul", "convolution"))
    assert convolutions[0] == pytest.approx(0.05)
    assert convolutions / matmuls == pytest.approx(convolutions[0] / matmuls[0])
    unmeasured = DEVICE.reached("convolution", "bfloat16", dims)
    assert unmeasured.tolist() == [DEVICE.matmul_efficiency] * 2


def test_streaming_by_size() -> None:
    device = dataclasses.replace(DEVICE, stream=StreamTable((1e3, 3e3), (1e-6, 2e-6), "by hand"))
    assert compute_time_s(device, 0, "float32", [0.0, 500.0, 2e3, 5e3]) == pytest.approx([0.0, 5e-7, 1.5e-6, 3e-6])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MatmulTable("sort", "float32", ((1, 1, 1),), (0.5,), ""), "known are matmul"),
        (lambda: MatmulTable("matmul", "float32", (), (), ""), "distinct points"),
        (lambda: MatmulTable("matmul", "float32", ((1, 1, 1), (1, 1, 1)), (0.5, 0.5), ""), "distinct points"),
        (lambda: MatmulTable("matmul", "float32", ((1, 1, 1),), (0.0,), ""), "above 0"),
        (lambda: MatmulTable("matmul", "float32", ((1, 0, 1),), (0.5,), ""), "dims >= 1"),
        (lambda: StreamTable((1.0,), (1.0,), ""), "two or more"),
        (lambda: StreamTable((2.0, 1.0), (1.0, 1.0), ""), "ascend"),
        (lambda: StreamTable((1.0, 2.0), (2.0, 1.0), ""), "must not fall"),
        (lambda: dataclasses.replace(DEVICE, tables=(TABLE, TABLE)), "one table per operation"),
    ],
)
def test_tables_are_checked(make, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("text", ["v4:2x2x1", "v5e:4x4", "v5p:4x4x4", "v6e:2x2"])
def test_tables_of_tpus_reach_their_peak_with_large_matmuls_only(text: str) -> None:
    device = parse_cluster(text).device
    assert {(table.operation, table.dtype) for table in device.tables} == {
        ("matmul", "bfloat16"), ("matmul", "float32"),
    }  # fmt: skip
    for table in device.tables:
        assert "libtpu" in table.source and len(table.dims) >= 30
        assert 0.4 < table.at([8192, 8192, 8192]) < 1.05
        assert table.at([8, 1024, 1024]) < 0.1
