"""How long a compiled TPU program takes: its schedule, replayed.

A scheduled module lists its instructions in the order in which the chip issues them. The replay keeps three streams:
computing (one instruction after another), the links, in two directions, and copies between HBM and VMEM. What starts
asynchronously occupies its stream and is waited for at its done; a synchronous collective is waited for at once.

- A fusion with a matmul takes the compiler's own estimate of its cycles, at least its roofline; a program that was
  stopped before code generation has no such estimates, and takes those of single matmuls of its dims.
- Other fusions take their roofline alone: bytes to and from HBM over the bandwidth that streams reach. The compiler's
  estimates for them are 3 to 4 times too slow against what such streams reach on hardware.
- A collective takes what the planner's cost model says for its axes.
- A collective-permute occupies one direction of the links, other collectives both.

XLA's `optimal_seconds` is not used: it knows neither collectives nor loops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..cost_models import Cluster, compute_time_s, over_axes_s
from .flops import FlopCounter
from .groups import source_target_pairs
from .hlo import Computation, Instruction, Module, arrays_of, tuple_elements
from .traffic import CompiledCollective, Site, callees, describe, sites

CLOCK_HZ = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
"""Cycles per second: the data sheets' bf16 peak over two operations on each element of the matrix units (v4 and v5p
eight of 128 x 128, v5e four of 128 x 128, v6e four of 256 x 256)."""

_FREE = frozenset(
    "parameter constant bitcast get-tuple-element tuple after-all partition-id replica-id iota add-dependency "
    "opt-barrier domain get-dimension-size".split()
)
_HBM = 0
_FORWARD, _BACKWARD = 0, 1


@dataclass
class _Streams:
    """Until when each stream is busy, in seconds since the computation began; `pending` by what will be waited for."""

    compute_s: float = 0.0
    links_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    copies_s: float = 0.0
    pending: dict[str, float] = field(default_factory=dict)

    def wait(self, name: str) -> None:
        self.compute_s = max(self.compute_s, self.pending.get(name.partition("#")[0], 0.0))

    def communicate(self, time_s: float, directions: Iterable[int]) -> float:
        """Occupies the links from now on, once they are free; returns until when."""
        directions = tuple(directions)
        until_s = max(self.compute_s, *(self.links_s[d] for d in directions)) + time_s
        for direction in directions:
            self.links_s[direction] = until_s
        return until_s


def step_time_s(module: Module, cluster: Cluster, axis_sizes: dict[str, int]) -> float:
    """Seconds of one step of a scheduled module on a TPU cluster."""
    return _Replay(module, cluster, axis_sizes).computation_s(module.entry)


class _Replay:
    def __init__(self, module: Module, cluster: Cluster, axis_sizes: dict[str, int]) -> None:
        self.module, self.device, self.axis_sizes = module, cluster.device, axis_sizes
        self.axes, self.mesh = list(axis_sizes), cluster.mesh(tuple(axis_sizes.values()))
        self.rate = self.device.memory_bytes_per_s * self.device.memory_efficiency
        self.flops = FlopCounter(module)
        self.memo: dict[tuple[str, frozenset[str]], float] = {}

    def computation_s(self, name: str, going_on: frozenset[str] = frozenset()) -> float:
        """Seconds of one run, beside collectives of the caller whose channels are `going_on`."""
        if (name, going_on) not in self.memo:
            computation, streams = self.module.computations[name], _Streams()
            streams.pending |= dict.fromkeys(going_on, 0.0)
            for instruction in computation:
                if instruction.opcode not in _FREE:
                    self._issue(instruction, computation, streams)
            self.memo[name, going_on] = max(streams.compute_s, *streams.pending.values(), 0.0)
        return self.memo[name, going_on]

    def _issue(self, instruction: Instruction, computation: Computation, streams: _Streams) -> None:
        name, opcode = instruction.name, instruction.opcode
        if opcode in ("while", "call", "conditional"):
            going_on = frozenset(key for key in streams.pending if key.startswith("channel "))
            for callee, times in callees(instruction, self.module):
                streams.compute_s += self.computation_s(callee, going_on) * (times or 1)
        elif opcode.endswith("-done"):
            streams.wait(instruction.operands[0])
        elif opcode == "async-update":
            streams.pending[name] = streams.pending.get(instruction.operands[0].partition("#")[0], 0.0)
        elif held := sites(instruction, computation, self.module):
            self._collectives(instruction, computation, held, streams)
        elif opcode.endswith("-start"):
            streams.copies_s = max(streams.copies_s, streams.compute_s) + self._copy_s(instruction)
            streams.pending[name] = streams.copies_s
        else:
            streams.compute_s += self._compute_s(instruction, computation)

    def _collectives(
        self, instruction: Instruction, computation: Computation, held: tuple[Site, ...], streams: _Streams
    ) -> None:
        """An instruction that is or holds collectives: starts them, waits for them, or computes beside them."""
        channels = [f"channel {site.channel}" for site in held if site.channel is not None]
        going_on = [channel for channel in channels if channel in streams.pending]
        if "async-collective-done" in instruction.name:
            for channel in going_on:
                streams.wait(channel)
            return
        if going_on and instruction.opcode == "fusion":
            hidden = {array for site in held for array in self._buffers(site)}
            streams.compute_s += self._compute_s(instruction, computation, hidden)
            return
        described = [describe(site, instruction, self.module, self.axis_sizes, 1.0) for site in held]
        until_s = streams.communicate(
            sum(map(self._collective_s, described)), _directions(held, self.module.num_partitions)
        )
        if "-start" in instruction.opcode or "async-collective-start" in instruction.name:
            streams.pending |= dict.fromkeys([instruction.name, *channels], until_s)
        else:
            inside_s = self._compute_s(instruction, computation) if self.flops.of(instruction, computation) else 0.0
            streams.compute_s = max(until_s, streams.compute_s + inside_s)

    def _collective_s(self, collective: CompiledCollective) -> float:
        if not collective.axes:
            return 0.0
        axes = tuple(sorted(self.axes.index(axis) for axis in collective.axes))
        return float(over_axes_s(collective.kind, self.mesh, axes, collective.payload_bytes))

    def _compute_s(self, instruction: Instruction, computation: Computation, hidden: frozenset = frozenset()) -> float:
        """Seconds of an instruction; `hidden` are arrays that a collective beside it reads and writes."""
        flops = self.flops.of(instruction, computation)
        moved = self._hbm_bytes(instruction, computation, hidden) / self.rate
        if not flops:
            return moved
        cycles = int(instruction.attribute(r'"estimated_cycles":"?(\d+)') or 0)
        if cycles:
            return max(cycles / CLOCK_HZ[self.device.name], flops / self.device.peak("bfloat16"), moved)
        dims = self.flops.matmul_dims(instruction, computation)
        kind = "convolution" if "conv_general_dilated" in instruction.attributes else "matmul"
        return max(float(compute_time_s(self.device, flops, "bfloat16", 0.0, dims, kind)), moved)

    def _hbm_bytes(self, instruction: Instruction, computation: Computation, hidden: frozenset) -> float:
        """Bytes that an instruction reads from and writes to HBM; a slice touches only what it slices."""

        def size(arrays: Iterable) -> float:
            return sum(a.size_bytes for a in arrays if a.memory_space == _HBM and a not in hidden)

        operands = [size(computation.operand_arrays(operand)) for operand in dict.fromkeys(instruction.operands)]
        written = size(instruction.arrays)
        moved = written + sum(operands)
        named = (instruction.name, instruction.opcode)
        if any("dynamic-update-slice" in word for word in named):
            whole = [sum(a.size_bytes for a in computation.operand_arrays(o)) for o in instruction.operands]
            updated = min((size for size in whole if size > 4), default=moved)  # more than an index
            return min(moved, 3 * updated)
        if instruction.opcode in ("slice", "gather") or any("dynamic-slice" in word for word in named):
            return min(moved, 3 * written)
        return moved

    def _copy_s(self, instruction: Instruction) -> float:
        """Of a copy between memories: its type is (source, destination, context)."""
        elements = tuple_elements(instruction.type_text)
        arrays = arrays_of(elements[1 if len(elements) > 1 else 0])
        return sum(a.size_bytes for a in arrays) / self.rate

    def _buffers(self, site: Site) -> set:
        operands = (a for o in site.instruction.operands for a in site.computation.operand_arrays(o))
        return {*site.instruction.arrays, *operands}


def _directions(held: tuple[Site, ...], num_devices: int) -> tuple[int, ...]:
    """The directions of the rings that collectives occupy: both, but for shifts to a neighbour."""
    pairs = source_target_pairs(held[0].instruction.attributes)
    if not pairs or any(site.kind != "collective-permute" for site in held):
        return (_FORWARD, _BACKWARD)
    source, target = pairs[0]
    return (_BACKWARD,) if (target - source) % num_devices >= num_devices / 2 else (_FORWARD,)
