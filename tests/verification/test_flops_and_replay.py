"""Operations counted by hand, and schedules replayed by hand."""

from __future__ import annotations

import pytest

from autoplan.cost_models import collective_time_s, parse_cluster
from autoplan.verification.flops import step_flops
from autoplan.verification.hlo import parse
from autoplan.verification.replay import step_time_s

CLUSTER = parse_cluster("v5e:4x4")
AXES = {"x": 4, "y": 4}
GROUPS = "replica_groups=[4,4]<=[16]"


def module(body: str, computations: str = ""):
    return parse(f"HloModule m, num_partitions=16\n\n{computations}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        ("f32[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 8 * 16 * 32),
        ("f32[8,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf", 2 * 8 * 16 * 32),
        ('(f32[8,16]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config='
         '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}',
         2 * 8 * 16 * 32),
        ('f32[8,16]{1,0} custom-call(%a, %b), custom_call_target="Sharding"', 0),
    ],
)
def test_flops_of_a_matmul(line, flops):
    found = step_flops(module(f"""\
  %a = f32[8,32]{{1,0}} parameter(0)
  %b = f32[32,16]{{1,0}} parameter(1)
  ROOT %d = {line}"""))
    assert found == flops


def test_flops_of_a_convolution_leave_padding_out():
    found = step_flops(module("""\
  %a = f32[1,4,3]{2,1,0} parameter(0)
  %b = f32[3,3,5]{2,1,0} parameter(1)
  ROOT %c = f32[1,4,5]{2,1,0} convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"""))
    assert found == 2 * 5 * 3 * (2 + 3 + 3 + 2)


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("Forward", ("f32[1,4,3]", "f32[5,3,3]"), "f32[1,4,5]"),
        ("BackwardInput", ("f32[1,4,5]", "f32[5,3,3]"), "f32[1,4,3]"),
        ("BackwardFilter", ("f32[1,4,3]", "f32[1,4,5]"), "f32[5,3,3]"),
    ],
)
def test_flops_of_a_library_convolution_and_its_gradients(target, operands, result):
    found = step_flops(module(f"""\
  %a = {operands[0]}{{2,1,0}} parameter(0)
  %b = {operands[1]}{{2,1,0}} parameter(1)
  ROOT %c = ({result}{{2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3 pad=1_1}}, dim_labels=b0f_o0i->b0f, \
custom_call_target="__cudnn$conv{target}\""""))
    assert found == 2 * 5 * 3 * (2 + 3 + 3 + 2)


def test_streaming_takes_its_bytes():
    time_s = step_time_s(module("""\
  %a = f32[1000000]{0} parameter(0)
  ROOT %n = f32[1000000]{0} negate(%a)"""), CLUSTER, AXES)  # fmt: skip
    assert time_s == pytest.approx(NEGATE_S)


def test_what_stays_in_vmem_takes_no_bandwidth():
    time_s = step_time_s(module("""\
  %a = f32[1000000]{0:S(1)} parameter(0)
  ROOT %n = f32[1000000]{0:S(1)} negate(%a)"""), CLUSTER, AXES)  # fmt: skip
    assert time_s == 0


REDUCE_S = float(collective_time_s("all-reduce", CLUSTER.mesh((4, 4)).links[1], 4, 4e6))
NEGATE_S = 8e6 / (CLUSTER.device.memory_bytes_per_s * CLUSTER.device.memory_efficiency)


def test_a_synchronous_collective_is_waited_for():
    time_s = step_time_s(module(f"""\
  %a = f32[1000000]{{0}} parameter(0)
  %r = f32[1000000]{{0}} all-reduce(%a), channel_id=1, {GROUPS}, to_apply=%add
  ROOT %n = f32[1000000]{{0}} negate(%a)"""), CLUSTER, AXES)  # fmt: skip
    assert time_s == pytest.approx(REDUCE_S + NEGATE_S)


def test_what_runs_between_start_and_done_is_hidden():
    time_s = step_time_s(module(f"""\
  %a = f32[1000000]{{0}} parameter(0)
  %s = f32[1000000]{{0}} all-reduce-start(%a), channel_id=1, {GROUPS}, to_apply=%add
  %n = f32[1000000]{{0}} negate(%a)
  ROOT %d = f32[1000000]{{0}} all-reduce-done(%s)"""), CLUSTER, AXES)  # fmt: skip
    assert time_s == pytest.approx(max(REDUCE_S, NEGATE_S))


def test_a_loop_takes_its_body_as_often_as_it_runs():
    body = """\
%body (x: f32[1000000]) -> f32[1000000] {
  %x = f32[1000000]{0} parameter(0)
  ROOT %n = f32[1000000]{0} negate(%x)
}
"""
    time_s = step_time_s(module("""\
  %a = f32[1000000]{0} parameter(0)
  ROOT %w = f32[1000000]{0} while(%a), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}""", body
    ), CLUSTER, AXES)  # fmt: skip
    assert time_s == pytest.approx(5 * NEGATE_S)


def test_an_update_in_place_takes_what_is_updated_wherever_that_lies():
    time_s = step_time_s(module("""\
  %a = f32[100,1000000]{1,0} parameter(0)
  %b = f32[1,1000000]{1,0:S(1)} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[100,1000000]{1,0} dynamic-update-slice(%a, %b, %i, %i)"""), CLUSTER, AXES)  # fmt: skip
    assert time_s <= 1.6 * NEGATE_S
