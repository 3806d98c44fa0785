"""Floating point operations of a compiled program: its matmuls and convolutions, two per multiply-add."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
import math
import re

from .hlo import Computation, Instruction, Module
from .traffic import executions

_INTO = ("fusion", "call", "async-start")


def step_flops(module: Module) -> float:
    """Of one device in one step, loops' trip counts included."""
    counter = FlopCounter(module)
    return sum(
        count * counter.of(instruction, computation)
        for computation, count, _ in executions(module)
        for instruction in computation
        if instruction.opcode != "call"
    )


class FlopCounter:
    """Counts of a module's instructions, each computation counted once."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._inside = cache(self._computation)

    def of(self, instruction: Instruction, computation: Computation) -> float:
        """Of one run of an instruction, with what it calls; loops and branches count nothing here."""
        if instruction.opcode == "dot":
            return _dot(instruction, computation)
        if instruction.opcode == "convolution":
            return _convolution(instruction, computation)
        if instruction.opcode == "custom-call":
            return _library_call(instruction, computation)
        if instruction.opcode not in _INTO:
            return 0.0
        return sum(self._inside(name) for name in instruction.called if name in self._module.computations)

    def matmul_dims(self, instruction: Instruction, computation: Computation) -> tuple[float, float, float]:
        """(m, k, n) of the matmul that the largest contraction of a TPU program's instruction amounts to."""
        largest, where = max(self._contractions(instruction, computation), key=lambda found: self.of(*found))
        labels = re.search(r"->(\w+)", largest.attributes)
        shape = largest.arrays[0].shape
        columns = shape[labels[1].index("f")] if labels else shape[-1] if shape else 1
        rows = math.prod(shape) / columns
        return rows, self.of(largest, where) / (2 * rows * columns), columns

    def _contractions(
        self, instruction: Instruction, computation: Computation
    ) -> Iterator[tuple[Instruction, Computation]]:
        if instruction.opcode in ("dot", "convolution"):
            yield instruction, computation
        elif instruction.opcode in _INTO:
            for name in instruction.called:
                for inner in self._module.computations.get(name, ()):
                    yield from self._contractions(inner, self._module.computations[name])

    def _computation(self, name: str) -> float:
        computation = self._module.computations[name]
        return sum(self.of(instruction, computation) for instruction in computation)


def _dot(dot: Instruction, computation: Computation) -> float:
    left = computation.operand_arrays(dot.operands[0]) if dot.operands else ()
    if not left:
        return 0.0
    contracted = _integers(dot.attribute(r"lhs_contracting_dims=\{([0-9,]*)\}"))
    return 2.0 * math.prod(dot.arrays[0].shape) * math.prod(left[0].shape[dim] for dim in contracted)


def _library_call(call: Instruction, computation: Computation) -> float:
    """What cuBLAS and cuDNN do: matmuls, convolutions and their gradients, which are labelled as the convolution."""
    target = call.attribute(r'custom_call_target="__(cublas|cudnn)\$\w')
    operands = [computation.operand_arrays(operand) for operand in call.operands[:2]]
    if target is None or not call.arrays or len(operands) < 2 or not all(operands):
        return 0.0
    result, left, right = call.arrays[0].shape, operands[0][0].shape, operands[1][0].shape
    if target == "cublas":
        contracted = _integers((call.attribute(r'"lhs_contracting_dimensions":\[([0-9",]*)\]') or "").replace('"', ""))
        return 2.0 * math.prod(result) * math.prod(left[dim] for dim in contracted)
    if "convBackwardInput" in call.attributes:
        return _convolved(call, result, right, left)
    if "convBackwardFilter" in call.attributes:
        return _convolved(call, left, result, right)
    return _convolved(call, left, right, result)


def _convolution(conv: Instruction, computation: Computation) -> float:
    """2 x outputs x input features x window positions that fall on data: XLA:TPU writes matmuls as convolutions whose
    batch dims are dilated windows, most of whose positions are padding."""
    operands = [computation.operand_arrays(operand) for operand in conv.operands[:2]]
    if len(operands) < 2 or not all(operands):
        return 0.0
    return _convolved(conv, operands[0][0].shape, operands[1][0].shape, conv.arrays[0].shape)


def _convolved(conv: Instruction, left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", conv.attributes)
    if not labels:
        return 0.0
    window = conv.attribute(r"window=\{([^}]*)\}") or ""
    spatial = [char for char in labels[2] if char.isdigit()]
    positions = math.prod(
        _positions(
            window, int(dim), len(spatial), left[labels[1].index(dim)], out[labels[3].index(dim)]
        )
        for dim in spatial
    )
    outputs = out[labels[3].index("b")] * out[labels[3].index("f")]
    groups = int(conv.attribute(r"batch_group_count=(\d+)") or 1)
    return 2.0 * positions * outputs * right[labels[2].index("i")] / groups


def _positions(window: str, dim: int, dims: int, input_size: int, output_size: int) -> int:
    """Pairs of (output, window element) of one spatial dim that read an input rather than padding or a gap."""

    def entry(name: str, default: str) -> str:
        found = re.search(rf"(?<![a-z_]){name}=([0-9x_\-]+)", window)
        return found[1].split("x")[dim] if found else default

    size, stride = int(entry("size", "1")), int(entry("stride", "1"))
    gap, spread = int(entry("lhs_dilate", "1")), int(entry("rhs_dilate", "1"))
    before = int(entry("pad", "0_0").split("_")[0])
    last = (input_size - 1) * gap
    if output_size * size > 1_000_000:
        return min(output_size * size, input_size * min(output_size, size))
    starts = (o * stride - before for o in range(output_size))
    return sum(
        0 <= start + k * spread <= last and (start + k * spread) % gap == 0 for start in starts for k in range(size)
    )


def _integers(text: str | None) -> list[int]:
    return [int(number) for number in (text or "").split(",") if number]
