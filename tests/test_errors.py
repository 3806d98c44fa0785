"""Every error says where, the rule, what was got and what to do, in one form."""

import pytest

from autoplan import errors


def test_message_has_every_part_in_order():
    error = errors.ShardingError(
        "sizes must divide",
        got="10 over 8",
        action="Pad to 16",
        path="batch['x']",
        shape=(10, 4),
        dtype="float32",
        dim=0,
        axis="x",
        source="train.py:12 (step)",
    )
    assert str(error) == (
        "batch['x'] (float32[10, 4]), dim 0, axis 'x': sizes must divide; got 10 over 8. Pad to 16 "
        "[train.py:12 (step)]"
    )
    assert isinstance(error, errors.PlanError) and isinstance(error, ValueError)
    assert (error.path, error.shape, error.dim, error.axis) == ("batch['x']", (10, 4), 0, "x")


def test_a_rule_alone_is_the_message():
    assert str(errors.PlanFileError("no such plan")) == "no such plan"


def test_memory_limit_carries_the_smallest():
    assert errors.MemoryLimitError("too little", smallest_bytes=3.0).smallest_bytes == 3.0


def test_scalar_shape_is_shown():
    assert str(errors.PlanError("no", path="step", shape=(), dtype="int32")) == "step (int32[]): no"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (("x",), ("dim 0", "'x'", "size 10 split 8 ways", "16")),
        ((None, ("x", "y")), ("dim 1", "'x', 'y'", "size 4 split 16 ways")),
        (("z",), ("'z'", "may only name axes of the mesh")),
        ((None, None, "x"), ("at most one entry per dim",)),
    ],
)
def test_check_divisible_names_dim_and_axis(spec, words):
    with pytest.raises(errors.ShardingError) as caught:
        errors.check_divisible("batch['x']", (10, 4), "float32", spec, {"x": 8, "y": 2})
    for word in ("batch['x']", "float32[10, 4]", *words):
        assert word in str(caught.value)


def test_check_divisible_accepts_what_divides():
    errors.check_divisible("w", (16, 4), "float32", ("x", None), {"x": 8})
    errors.check_divisible("w", (16, 4), "float32", (("x", "y"),), {"x": 8, "y": 2})
