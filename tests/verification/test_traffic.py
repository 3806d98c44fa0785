"""Collectives of small programs, written by hand: each notation and trap, bytes counted by hand."""

from __future__ import annotations

from autoplan.verification.hlo import parse
from autoplan.verification.traffic import collectives_of

MESH = {"x": 2, "y": 4}


def collectives(body: str, computations: str = ""):
    """(kind, axes, wire bytes of one, count) of each collective of an entry with this body."""
    text = f"HloModule m, num_partitions=8\n\n{computations}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
    found, unknown = collectives_of(parse(text), MESH)
    return [(c.kind, c.axes, c.wire_bytes, c.count) for c in found], unknown


def test_ring_bytes_of_each_kind():
    found, _ = collectives("""\
  %a = f32[100]{0} parameter(0)
  %r = f32[100]{0} all-reduce(%a), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  %g = f32[400]{0} all-gather(%a), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  %s = f32[25]{0} reduce-scatter(%a), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %t = f32[100]{0} all-to-all(%a), channel_id=4, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  ROOT %p = f32[100]{0} collective-permute(%a), channel_id=5, source_target_pairs={{0,4},{4,0}}""")
    assert found == [
        ("all-reduce", ("y",), 600, 1),  # 2 * 3/4 * 400
        ("all-gather", ("y",), 1200, 1),  # 3/4 * 1600
        ("reduce-scatter", ("y",), 300, 1),  # 3/4 * 400
        ("all-to-all", ("x",), 200, 1),  # 1/2 * 400
        ("collective-permute", ("x",), 400, 1),
    ]


def test_start_and_done_are_one_collective():
    found, _ = collectives("""\
  %a = f32[100]{0} parameter(0)
  %s = (f32[100]{0}, f32[400]{0}) all-gather-start(%a), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %d = f32[400]{0} all-gather-done(%s)""")
    assert found == [("all-gather", ("y",), 1200, 1)]


def test_an_asynchronous_computation_is_looked_into():
    inner = """\
%wrapped (p: f32[400]) -> f32[100] {
  %p = f32[400]{0} parameter(0)
  ROOT %rs = f32[100]{0} reduce-scatter(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}
"""
    found, _ = collectives("""\
  %a = f32[400]{0} parameter(0)
  %s = ((f32[400]{0}), f32[100]{0}, u32[]) async-start(%a), calls=%wrapped
  ROOT %d = f32[100]{0} async-done(%s)""", inner)  # fmt: skip
    assert found == [("reduce-scatter", ("y",), 1200, 1)]


def test_tpu_reduce_scatters_are_fused_all_reduces():
    inner = """\
%all-reduce-scatter.1 (input: f32[400]) -> f32[100] {
  %input = f32[400]{0} parameter(0)
  %all-reduce.2 = f32[400]{0} all-reduce(%input), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %dynamic-slice.3 = f32[100]{0} dynamic-slice(%all-reduce.2, %i), dynamic_slice_sizes={100}
}
"""
    found, _ = collectives("""\
  %a = f32[400]{0} parameter(0)
  ROOT %f = f32[100]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1""", inner)  # fmt: skip
    assert found == [("reduce-scatter", ("y",), 1200, 1)]


def test_a_channel_in_several_fusions_counts_once():
    inner = "".join(
        f"%fused.{n} (p: bf16[8]) -> bf16[32] {{\n  %p = bf16[8]{{0}} parameter(0)\n  ROOT %g = bf16[32]{{0}} "
        "all-gather(%p), channel_id=6, replica_groups=[2,4]<=[8], dimensions={0}\n}\n"
        for n in range(3)
    )
    found, _ = collectives("""\
  %a = bf16[8]{0} parameter(0)
  %async-collective-start = (bf16[8]{0}, bf16[32]{0}) fusion(%a), calls=%fused.0
  %busy = bf16[32]{0} fusion(%a), calls=%fused.1
  ROOT %async-collective-done = bf16[32]{0} fusion(%a), calls=%fused.2""", inner)  # fmt: skip
    assert found == [("all-gather", ("y",), 48, 1)]


LOOP = """\
%body (t: (s32[], f32[100])) -> (s32[], f32[100]) {
  %t = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[100]{0} get-tuple-element(%t), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %p = f32[100]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %o = (s32[], f32[100]{0}) tuple(%next, %p)
}
%condition (t: (s32[], f32[100])) -> pred[] {
  %t = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %limit = s32[] constant(7)
  ROOT %c = pred[] compare(%i, %limit), direction=LT
}
"""


def test_a_loop_counts_as_often_as_it_runs():
    found, unknown = collectives("""\
  %a = (s32[], f32[100]{0}) parameter(0)
  ROOT %w = (s32[], f32[100]{0}) while(%a), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}""", LOOP)  # fmt: skip
    assert found == [("collective-permute", ("y",), 400, 12)] and unknown == 0


def test_an_unrolled_loop_without_a_trip_count_is_read_off():
    found, unknown = collectives("""\
  %a = (s32[], f32[100]{0}) parameter(0)
  ROOT %w = (s32[], f32[100]{0}) while(%a), condition=%condition, body=%body""", LOOP)  # fmt: skip
    assert found == [("collective-permute", ("y",), 400, 4)] and unknown == 0  # 0, 2, 4, 6


def test_a_loop_that_cannot_be_told_is_counted_as_unknown():
    unclear = LOOP.replace("ROOT %c = pred[] compare(%i, %limit), direction=LT", "ROOT %c = pred[] custom-call(%i)")
    found, unknown = collectives("""\
  %a = (s32[], f32[100]{0}) parameter(0)
  ROOT %w = (s32[], f32[100]{0}) while(%a), condition=%condition, body=%body""", unclear)  # fmt: skip
    assert found == [("collective-permute", ("y",), 400, 1)] and unknown == 1


def test_groups_of_one_device_send_nothing():
    found, _ = collectives("""\
  %a = f32[100]{0} parameter(0)
  ROOT %r = f32[100]{0} all-reduce(%a), channel_id=1, replica_groups=[8,1]<=[8], to_apply=%add""")
    assert found == []
