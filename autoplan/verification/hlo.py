"""Compiled programs: XLA's HLO text as frozen values.

Reads what `jax.stages.Compiled.as_text` and XLA's dumps print, of every backend and of JAX 0.10 to 0.12: shapes with
layouts and memory spaces, operands with and without types, `%tuple#1` for an element of a tuple, and the tables of
source lines. What an attribute means is read where it is needed; this module knows only the notation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
import math
import re

DTYPE_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4,
    "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3": 8, "f8e3m4": 8, "f8e8m0fnu": 8, "f8e4m3fnuz": 8, "f8e5m2fnuz": 8,
    "f8e4m3b11fnuz": 8,
}  # fmt: skip
"""Bits of an element. Tokens and opaque values have none."""

_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<= ]*)\](\{[^{}]*\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Array:
    """An array type. `memory_space` is XLA's: 0 is main memory (HBM); on TPUs 1 is VMEM, 2 and 4 scalar memory."""

    dtype: str
    shape: tuple[int, ...]
    memory_space: int = 0

    @property
    def size_bytes(self) -> float:
        """Without padding."""
        return math.prod(self.shape) * DTYPE_BITS.get(self.dtype, 0) / 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      type_text: its type as written; a tuple is in parentheses.
      operands: names; `name#1` is an element of a tuple.
      operand_text: what stands between the parentheses, such as the value of a constant.
      attributes: what follows the parentheses.
    """

    name: str
    opcode: str
    type_text: str
    operands: tuple[str, ...]
    operand_text: str
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its type, in order, tuples flattened."""
        return arrays_of(self.type_text)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls, branches included."""
        branches = _BRANCHES.search(self.attributes)
        names = _OPERAND.findall(branches[1]) if branches else []
        return (*_CALLED.findall(self.attributes), *names)

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression that is found in the attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def op_name(self) -> str:
        """JAX's name of what it was made for, such as "jit(step)/dot_general"."""
        return self.attribute(r'\bop_name="([^"]*)"') or ""


@dataclass(frozen=True)
class Computation:
    """A list of instructions, in the order of the schedule if the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {i.name: i for i in self.instructions})

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def get(self, operand: str) -> Instruction | None:
        """The instruction that an operand names; that of the tuple for an element of one."""
        return self._by_name.get(operand.partition("#")[0])

    @property
    def root(self) -> Instruction:
        return next((i for i in reversed(self.instructions) if i.is_root), self.instructions[-1])

    def operand_arrays(self, operand: str) -> tuple[Array, ...]:
        """The arrays of an operand; none if it is unknown."""
        name, *indices = operand.split("#")
        instruction = self._by_name.get(name)
        text = instruction.type_text if instruction else ""
        for index in indices:
            elements = tuple_elements(text)
            text = elements[int(index)] if int(index) < len(elements) else ""
        return arrays_of(text)


@dataclass(frozen=True)
class Frame:
    """A line of a stack. `parent` is the number of the caller's frame, 0 for none."""

    file: str
    line: int
    function: str
    parent: int


@dataclass(frozen=True)
class Module:
    """A compiled program. `entry` names its computation; `num_partitions` devices run it together."""

    name: str
    computations: dict[str, Computation]
    entry: str
    num_partitions: int
    frames: dict[int, Frame]

    def stack(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The lines that made an instruction, innermost first."""
        number, found = int(instruction.attribute(r"\bstack_frame_id=(\d+)") or 0), []
        while number in self.frames and len(found) < 200:
            found.append(self.frames[number])
            number = self.frames[number].parent
        if not found and (file := instruction.attribute(r'\bsource_file="([^"]*)"')):
            line = int(instruction.attribute(r"\bsource_line=(\d+)") or 0)
            return (Frame(file, line, "", 0),)
        return tuple(found)


def parse(text: str) -> Module:
    """The module of an HLO text.

    Raises:
      ValueError: it is no HLO text, or has no entry.
    """
    if not (head := re.search(r"^HloModule ([^\s,]+)(.*)$", text, re.MULTILINE)):
        raise ValueError(f"no HLO module but {text[:60]!r}")
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, lines = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}") and name:
            computations[name], name = Computation(name, tuple(lines)), ""
        elif name and (found := _INSTRUCTION.match(line)):
            lines.append(_instruction(found))
    if entry not in computations:
        raise ValueError(f"HLO module {head[1]} has no entry computation")
    partitions = re.search(r"\bnum_partitions=(\d+)", head[2])
    return Module(head[1], computations, entry, int(partitions[1]) if partitions else 1, _frames(text))


def _instruction(found: re.Match) -> Instruction:
    """The instruction of a line `name = type opcode(operands), attributes`."""
    rest = _COMMENT.sub("", found[3])
    end = _closing(rest) if rest.startswith("(") else re.match(r"\S*", rest).end()
    opcode = _OPCODE.match(rest, end)
    if not opcode:
        raise ValueError(f"no HLO instruction: {found[0].strip()[:120]}")
    close = _closing(rest, opcode.end() - 1)
    inside = rest[opcode.end() : close - 1]
    return Instruction(
        name=found[2],
        opcode=opcode[1],
        type_text=rest[:end],
        operands=tuple(_OPERAND.findall(inside)),
        operand_text=inside,
        attributes=rest[close:],
        is_root=bool(found[1]),
    )


def _closing(text: str, start: int = 0) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def arrays_of(type_text: str) -> tuple[Array, ...]:
    """The arrays of a type, in order, tuples flattened; tokens and opaque values are left out."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(type_text):
        if dtype in DTYPE_BITS:
            space = re.search(r"S\((\d+)\)", layout)
            sizes = tuple(int(d.strip("<= ")) for d in dims.split(",") if d)
            found.append(Array(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


def tuple_elements(type_text: str) -> tuple[str, ...]:
    """The types of a tuple's elements; of another type, itself."""
    if not type_text.startswith("("):
        return (type_text,)
    elements, depth, current = [], 0, ""
    for char in type_text[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            elements.append(current.strip())
            current = ""
        else:
            current += char
    return (*elements, current.strip())


def _frames(text: str) -> dict[int, Frame]:
    """The stack frames by number, from the tables at the head of the module."""
    files, functions = _names(text, "FileNames"), _names(text, "FunctionNames")
    locations = {int(n): row for n, row in re.findall(r"^(\d+) (\{file_name_id=.*\})$", text, re.MULTILINE)}
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}$", text, re.MULTILINE)
    # Some versions print parents one too high, so that an outermost frame is its own parent.
    shift = 1 if any(number == parent for number, _, parent in frames) else 0

    def field(location: str, name: str) -> int:
        found = re.search(rf"\b{name}=(\d+)", location)
        return int(found[1]) if found else 0

    return {
        int(number): Frame(
            files.get(field(locations.get(int(place), ""), "file_name_id"), ""),
            field(locations.get(int(place), ""), "line"),
            functions.get(field(locations.get(int(place), ""), "function_name_id"), ""),
            int(parent or 0) - shift,
        )
        for number, place, parent in frames
    }


def _names(text: str, table: str) -> dict[int, str]:
    block = re.search(rf"^{table}\n((?:\d+ \".*\"\n)*)", text, re.MULTILINE)
    return {int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', block[1] if block else "", re.MULTILINE)}
