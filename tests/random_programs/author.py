"""Value types, programs as lists of lines, and the author that writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
import math
from typing import Any

from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

# Sizes that axes of 2, 3, 4, 6 and 8 devices divide, and some that none does.
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
MOST_ELEMENTS = 4096
MOST_DIMS = 4
MOST_LINES = 8
DEPTH = 2  # regions in regions

Draw = Callable[[st.SearchStrategy], Any]


@dataclass(frozen=True)
class Type:
    """Shape and dtype of a value, and whether its bits do not depend on the order of sums."""

    shape: tuple[int, ...]
    dtype: str
    exact: bool = True

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float32", "bfloat16", "float16")

    @property
    def is_int(self) -> bool:
        return self.dtype in ("int32", "uint32", "int8", "uint8")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{'' if self.exact else '~'}"


@dataclass(frozen=True)
class Line:
    """One operation: `function(*operands)` gives a tuple of arrays."""

    text: str
    function: Callable[..., tuple]
    operands: tuple[int, ...]
    results: tuple[Type, ...]


@dataclass(frozen=True)
class Program:
    """Values are numbered: inputs first, then the results of each line."""

    inputs: tuple[Type, ...]
    lines: tuple[Line, ...]
    outputs: tuple[int, ...]

    @property
    def types(self) -> tuple[Type, ...]:
        return (*self.inputs, *(result for line in self.lines for result in line.results))

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        values = list(arrays)
        for line in self.lines:
            values.extend(line.function(*(values[i] for i in line.operands)))
        return tuple(values[i] for i in self.outputs)

    def __str__(self) -> str:
        rows = [f"inputs {', '.join(f'%{i}:{t}' for i, t in enumerate(self.inputs))}"]
        at = len(self.inputs)
        for line in self.lines:
            made = ", ".join(f"%{at + i}:{t}" for i, t in enumerate(line.results))
            rows.append(f"  {made} = {line.text} {', '.join(f'%{i}' for i in line.operands)}")
            at += len(line.results)
        return "\n".join([*rows, f"  return {', '.join(f'%{i}' for i in self.outputs)}"])

    __repr__ = __str__


Operation = Callable[["Author"], "Line | None"]
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    """Puts a function into the grammar. It gives the line that it writes, or None where it finds no operands."""
    OPERATIONS[function.__name__.strip("_")] = function
    return function


@dataclass
class Author:
    """Writes lines; `values` are the types of what there is so far."""

    draw: Draw
    values: list[Type]
    depth: int = 0
    lines: list[Line] = field(default_factory=list)

    def choose(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def whole(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def flip(self) -> bool:
        return self.draw(st.booleans())

    def pick(self, fits: Callable[[Type], bool]) -> int | None:
        """A value that fits, the latest ones first when shrunk; None if there is none."""
        found = [i for i, value in enumerate(self.values) if fits(value)]
        return self.choose(found[::-1]) if found else None

    def floats(self, least_rank: int = 0) -> int | None:
        return self.pick(lambda t: t.dtype == "float32" and t.rank >= least_rank)

    def line(self, text: str, function: Callable[..., Any], *operands: int, exact: bool = False) -> Line | None:
        """A line, if what it makes is small enough. `exact`: it keeps exactness; else only of integers."""
        found = jax.eval_shape(function, *(as_struct(self.values[i]) for i in operands))
        several = isinstance(found, (tuple, list))
        known = all(self.values[i].exact for i in operands)
        made = []
        for leaf in found if several else [found]:
            dtype = str(leaf.dtype)
            made.append(Type(tuple(leaf.shape), dtype, known and (exact or dtype.startswith(("int", "uint", "bool")))))
        if any(t.size > MOST_ELEMENTS or t.rank > MOST_DIMS for t in made):
            return None
        return Line(text, function if several else lambda *xs: (function(*xs),), operands, tuple(made))

    def write(self, count: int, among: Sequence[str]) -> None:
        for _ in range(count):
            line = OPERATIONS[self.choose(among)](self)
            if line is not None:
                self.lines.append(line)
                self.values.extend(line.results)

    def inner(self, inputs: Sequence[Type], fits: Callable[[Type], bool] = lambda t: True) -> Program | None:
        """A program of its own for a region, with outputs that fit, or None."""
        if self.depth >= DEPTH:
            return None
        author = Author(self.draw, list(inputs), self.depth + 1)
        author.write(self.whole(1, 3), sorted(OPERATIONS))
        found = [i for i in range(len(author.values)) if fits(author.values[i])]
        return Program(tuple(inputs), tuple(author.lines), (found[-1],)) if found else None


def as_struct(t: Type) -> jax.ShapeDtypeStruct:
    if t.dtype == "key":
        return jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(t.shape, jnp.dtype(t.dtype))


@st.composite
def types(draw: Draw) -> Type:
    rank = draw(st.integers(0, 3))
    shape: tuple[int, ...] = ()
    for _ in range(rank):
        left = MOST_ELEMENTS // 4 // max(math.prod(shape), 1)
        shape = (*shape, draw(st.sampled_from([s for s in SIZES if s <= left])))
    return Type(shape, draw(st.sampled_from(("float32", "float32", "float32", "int32", "bool", "bfloat16"))))


@st.composite
def programs(draw: Draw, most_lines: int = MOST_LINES) -> Program:
    """A program whose outputs are what no line reads, and sometimes more."""
    inputs = [draw(types()) for _ in range(draw(st.integers(1, 3)))]
    if draw(st.integers(0, 3)) == 0:
        inputs.append(Type((2,), "uint32"))  # a raw key
    author = Author(draw, list(inputs))
    author.write(draw(st.integers(2, most_lines)), sorted(OPERATIONS))
    read = {i for line in author.lines for i in line.operands}
    made = range(len(inputs), len(author.values))
    ends = [i for i in made if i not in read] or [len(author.values) - 1]
    return Program(tuple(inputs), tuple(author.lines), tuple(ends))


def inputs_of(program: Program, seed: int = 0) -> list[np.ndarray]:
    """Arrays of the order of 1; integers are small, and floats have no two equal entries."""
    rng = np.random.default_rng(seed)
    found = []
    for t in program.inputs:
        if t.dtype == "bool":
            found.append(rng.random(t.shape) < 0.5)
        elif t.is_int:
            found.append(rng.integers(0, 12, t.shape).astype(t.dtype))
        else:
            apart = rng.permutation(t.size).reshape(t.shape) / max(t.size, 1) * 3 - 1.5 + 1e-3
            found.append(np.asarray(jnp.asarray(apart, t.dtype)))
    return found
