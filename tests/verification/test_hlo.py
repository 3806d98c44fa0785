"""The HLO notation: shapes, instructions, computations, source lines."""

from __future__ import annotations

import pytest

from autoplan.verification.hlo import Array, arrays_of, parse, tuple_elements

MODULE = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

FileNames
1 "/home/me/train.py"
2 "/venv/lib/python3.12/site-packages/flax/nnx.py"

FunctionNames
1 "step"
2 "Linear.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (a: f32[8,4], b: bf16[16]) -> (f32[8,4], bf16[16]) {
  %a = f32[8,4]{1,0:T(8,128)S(1)} parameter(0)
  %b = bf16[16]{0} parameter(1)
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(f32[8,4]{1,0} %a), channel_id=1, replica_groups={{0,1,2,3}}, \
to_apply=%add, metadata={op_name="jit(step)/dot_general" stack_frame_id=2}
  ROOT %tuple.2 = (f32[8,4]{1,0}, /*index=1*/bf16[16]{0}) tuple(%all-reduce.1, %b)
}
"""


def test_a_module_is_read_with_its_entry_and_schedule():
    module = parse(MODULE)
    entry = module.computations[module.entry]
    assert (module.name, module.entry, module.num_partitions) == ("jit_step", "main", 4)
    assert [i.opcode for i in entry] == ["parameter", "parameter", "all-reduce", "tuple"]
    assert entry.root.name == "tuple.2" and entry.root.operands == ("all-reduce.1", "b")


def test_an_instruction_has_its_operands_whether_typed_or_not():
    entry = parse(MODULE).computations["main"]
    reduce = entry.get("all-reduce.1")
    assert reduce.operands == ("a",) and reduce.called == ("add",)
    assert entry.operand_arrays("a") == (Array("f32", (8, 4), memory_space=1),)
    assert entry.operand_arrays("tuple.2#1") == (Array("bf16", (16,)),)


def test_the_stack_of_an_instruction_is_innermost_first():
    module = parse(MODULE)
    stack = module.stack(module.computations["main"].get("all-reduce.1"))
    assert [(frame.function, frame.line) for frame in stack] == [("Linear.__call__", 99), ("step", 7)]


def test_older_metadata_names_the_line_itself():
    text = MODULE.replace("stack_frame_id=2", 'source_file="/home/me/train.py" source_line=12')
    module = parse(text)
    (frame,) = module.stack(module.computations["main"].get("all-reduce.1"))
    assert (frame.file, frame.line) == ("/home/me/train.py", 12)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("f32[8,4]{1,0}", [128]),
        ("pred[]", [1]),
        ("s4[6]{0}", [3]),
        ("(f8e4m3fn[10]{0}, (u32[], c64[2]{0}), token[])", [10, 4, 16]),
    ],
)
def test_sizes_of_types(text, size_bytes):
    assert [array.size_bytes for array in arrays_of(text)] == size_bytes


def test_elements_of_a_nested_tuple():
    text = "((f32[4,2]{1,0}, s32[]), f32[2]{0:T(8,128)S(1)})"
    assert tuple_elements(text) == ("(f32[4,2]{1,0}, s32[])", "f32[2]{0:T(8,128)S(1)}")


@pytest.mark.parametrize("text", ["", "not HLO", "HloModule empty\n"])
def test_what_is_no_module_is_refused(text):
    with pytest.raises(ValueError, match="HLO module"):
        parse(text)
