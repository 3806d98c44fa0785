"""How often a compiled loop runs."""

from __future__ import annotations

import re

from .hlo import Computation, Instruction, Module


def trip_count(loop: Instruction, module: Module) -> int | None:
    """The number of runs of a `while`'s body, or None if it cannot be told.

    XLA writes it down for most loops. For the others (windowed einsums) it is read off: the largest constant that the
    condition compares with, over the step by which the body advances its counter (XLA:TPU unrolls such loops).
    """
    known = loop.attribute(r'"known_trip_count":\{"n":"?(\d+)')
    if known:
        return int(known)
    condition = module.computations.get(loop.attribute(r"\bcondition=%?([\w.\-]+)") or "")
    body = module.computations.get(loop.attribute(r"\bbody=%?([\w.\-]+)") or "")
    if condition is None or body is None:
        return None
    limits = [value for value in map(_constant, condition) if value is not None]
    if not limits or condition.root.opcode != "compare":
        return None
    return max(1, -(-max(limits) // _step(condition, body)))


def _step(condition: Computation, body: Computation) -> int:
    """By how much the body advances the element of its tuple that the condition compares; 1 if it cannot be seen."""
    index = next((i for o in condition.root.operands if (i := _element(o, condition)) is not None), None)
    if index is None or body.root.opcode != "tuple" or index >= len(body.root.operands):
        return 1
    update = body.get(body.root.operands[index])
    while update is not None and update.opcode in ("copy", "bitcast") and update.operands:
        update = body.get(update.operands[0])
    if update is None or update.opcode != "add":
        return 1
    steps = [_constant(i) for operand in update.operands if (i := body.get(operand)) is not None]
    return next((step for step in steps if step), 1)


def _element(operand: str, computation: Computation) -> int | None:
    """Which element of the loop's tuple an operand is."""
    if "#" in operand:
        return int(operand.rpartition("#")[2])
    instruction = computation.get(operand)
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    return int(instruction.attribute(r"\bindex=(\d+)") or 0)


def _constant(instruction: Instruction) -> int | None:
    """The value of an integer scalar constant."""
    if instruction.opcode != "constant" or not re.match(r"[su](?:8|16|32|64)\[\]", instruction.type_text):
        return None
    found = re.match(r"-?\d+$", instruction.operand_text.strip())
    return int(found[0]) if found else None
