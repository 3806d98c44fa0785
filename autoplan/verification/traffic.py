"""The collectives of a compiled program: kind, mesh axes, bytes on the wire, how often, and from which line.

What XLA makes of collectives, and how it is read here:

- A loop's body counts as often as it runs (`loops.trip_count`); of a conditional, the longest branch counts.
- On TPUs a reduce-scatter is a fusion whose computation is called `all-reduce-scatter`: an all-reduce of which only a
  slice is kept.
- A pair of `-start` and `-done` is one collective. On TPUs an all-gather that runs beside matmuls is also written
  into the fusions of those matmuls, also in loops that run meanwhile, under the same channel; a channel counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
import re

from ..cost_models import wire_bytes
from .groups import replica_groups, source_target_pairs, varying_axes
from .hlo import Computation, Instruction, Module
from .loops import trip_count

KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-permute",
}
"""XLA's opcodes and the kinds that they are priced as."""

_REDUCE_SCATTER = "all-reduce-scatter"
_OWN = str(Path(__file__).parents[1])
_INSTALLED = re.compile(r"site-packages|dist-packages|/lib/python\d|^<")


@dataclass(frozen=True)
class CompiledCollective:
    """A collective of the compiled program.

    `wire_bytes` (what one device sends, by `cost_models.wire_bytes`) is of one execution, `count` the executions in a
    step. `source` is the user's line as "file:line (function)", or ""; `op` is JAX's name of what it was made for.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    payload_bytes: float
    wire_bytes: float
    count: float
    source: str
    op: str

    @property
    def total_bytes(self) -> float:
        """What one device sends in a step."""
        return self.wire_bytes * self.count


@dataclass(frozen=True)
class Site:
    """An instruction that is or holds a collective: `kind` is one of the values of `KINDS`."""

    kind: str
    instruction: Instruction
    computation: Computation

    @property
    def channel(self) -> str | None:
        return self.instruction.attribute(r"\bchannel_id=(\d+)")


def executions(module: Module) -> Iterator[tuple[Computation, float, bool]]:
    """(computation, runs per step, whether the runs are known) of every scheduled computation, callers first."""

    def visit(name: str, count: float, known: bool) -> Iterator[tuple[Computation, float, bool]]:
        computation = module.computations[name]
        yield computation, count, known
        for instruction in computation:
            for callee, times in callees(instruction, module):
                yield from visit(callee, count * (times or 1), known and times is not None)

    return visit(module.entry, 1.0, True)


def callees(instruction: Instruction, module: Module) -> list[tuple[str, int | None]]:
    """(name, runs or None if unknown) of the scheduled computations that an instruction runs."""
    if instruction.opcode == "while":
        body = instruction.attribute(r"\bbody=%?([\w.\-]+)")
        return [(body, trip_count(instruction, module))] if body in module.computations else []
    names = [name for name in instruction.called if name in module.computations]
    if instruction.opcode == "conditional" and names:
        return [(max(names, key=lambda name: len(module.computations[name].instructions)), 1)]
    return [(name, 1) for name in names] if instruction.opcode == "call" else []


def sites(instruction: Instruction, computation: Computation, module: Module) -> tuple[Site, ...]:
    """The collectives that an instruction of a schedule is, or hides in its fusion or asynchronous computation."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        scatters = opcode == "all-reduce" and _REDUCE_SCATTER in computation.name
        return (Site("reduce-scatter" if scatters else KINDS[opcode], instruction, computation),)
    if instruction.opcode not in ("fusion", "async-start", "custom-call"):
        return ()
    inner = (module.computations[name] for name in instruction.called if name in module.computations)
    return tuple(site for body in inner for i in body for site in sites(i, body, module))


def collectives_of(module: Module, axis_sizes: dict[str, int]) -> tuple[tuple[CompiledCollective, ...], int]:
    """The collectives of a step, and how many loops run an unknown number of times (their bodies count once).

    Args:
      axis_sizes: of the mesh, major first; partitions are numbered over it row-major.
    """
    found, unknown = [], 0
    home: dict[str, str] = {}  # where each channel was first seen: callers come first, and what they started goes on
    for computation, count, _ in executions(module):
        channels: set[str] = set()
        for instruction in computation:
            unknown += any(times is None for _, times in callees(instruction, module))
            for site in sites(instruction, computation, module):
                if site.channel is not None:
                    started = home.setdefault(site.channel, computation.name) == computation.name
                    if not started or site.channel in channels:
                        continue
                    channels.add(site.channel)
                collective = describe(site, instruction, module, axis_sizes, count)
                found += [collective] if collective.wire_bytes > 0 else []
    return tuple(found), unknown


def describe(
    site: Site, outer: Instruction, module: Module, axis_sizes: dict[str, int], count: float
) -> CompiledCollective:
    """A collective in words and numbers; `outer` is the scheduled instruction that holds it."""
    inner = site.instruction
    group_size, axes = _members(site, module, axis_sizes)
    operand_bytes = sum(a.size_bytes for o in inner.operands for a in site.computation.operand_arrays(o))
    payload_bytes = operand_bytes * (group_size if site.kind == "all-gather" else 1)
    named = inner if inner.op_name else outer
    return CompiledCollective(
        site.kind,
        axes,
        group_size,
        payload_bytes,
        float(wire_bytes(site.kind, group_size, payload_bytes)),
        count,
        source_of(module, inner) or source_of(module, outer),
        named.op_name,
    )


def _members(site: Site, module: Module, axis_sizes: dict[str, int]) -> tuple[int, tuple[str, ...]]:
    """(devices of a group, mesh axes that it runs over)."""
    attributes = site.instruction.attributes
    if site.kind == "collective-permute" and (pairs := source_target_pairs(attributes)):
        varying = {axis for pair in pairs for axis in varying_axes(pair, axis_sizes)}
        return 2 if varying else 1, tuple(axis for axis in axis_sizes if axis in varying)
    group = max(replica_groups(attributes, module.num_partitions), key=len)
    return len(group), varying_axes(group, axis_sizes)


def source_of(module: Module, instruction: Instruction) -> str:
    """The user's line that an instruction was made for, as "file:line (function)"; "" if none is known."""
    for frame in module.stack(instruction):
        if frame.file.startswith(_OWN):
            return ""  # a constraint of the plan; outside of it is who called autoplan, not the step
        if not _INSTALLED.search(frame.file):
            return f"{frame.file}:{frame.line}" + (f" ({frame.function})" if frame.function else "")
    return ""
