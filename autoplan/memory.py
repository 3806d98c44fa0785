"""Memory over the step: which buffers live when, and how large they are under a choice.

Liveness over program order. A value lives from where it is made to where it is last read; inputs live all
through the step unless they are donated; a donated state's new value takes its place. A reshard holds its
source and its result at once. Values that only exist inside fusions take nothing (`fusion`).
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from . import layouts, lowering
from .folding import TO_STATE, TO_VIEW
from .fusion import last_reads, overwrites
from .layouts import WHOLE
from .problem import ClassProblem
from .search import Buffer
from .trace import Trace

# Reshard buffers of values smaller than this share of the arguments are left out of the memory rows.
NEGLIGIBLE = 1e-3


@dataclass(frozen=True)
class MemoryModel:
    """Buffers by class or edge, and the intervals of program positions in which copies of them live."""

    buffers: tuple[Buffer, ...]
    labels: tuple[str, ...]
    interval_buffer: np.ndarray  # [I] index into buffers
    start: np.ndarray  # [I] first position
    stop: np.ndarray  # [I] one past the last position
    num_positions: int

    def sizes(self, choice: np.ndarray, edge_nodes: np.ndarray) -> np.ndarray:
        """Bytes of one copy of each buffer under a choice, `[B]`."""
        return np.array([b.bytes_for(choice, edge_nodes) for b in self.buffers])

    def profile(self, choice: np.ndarray, edge_nodes: np.ndarray) -> np.ndarray:
        """Bytes live per device at every position, `[positions]`."""
        size = self.sizes(choice, edge_nodes)[self.interval_buffer]
        change = np.zeros(self.num_positions + 1)
        np.add.at(change, self.start, size)
        np.add.at(change, self.stop, -size)
        return np.maximum(np.cumsum(change[:-1]), 0.0)

    def rows(self) -> sp.csr_array:
        """How many copies of each buffer live at each program point that can be the peak: `[R, B]`.

        Points with the same buffers are one row; a point is left out if its neighbour holds all that it does.
        """
        change = np.zeros((self.num_positions + 1, len(self.buffers)), np.int32)
        np.add.at(change, (self.start, self.interval_buffer), 1)
        np.add.at(change, (self.stop, self.interval_buffer), -1)
        live = np.cumsum(change[:-1], axis=0)
        live = live[np.r_[True, (live[1:] != live[:-1]).any(axis=1)]]
        below_next = np.r_[(live[:-1] <= live[1:]).all(axis=1), False]
        below_last = np.r_[False, (live[1:] <= live[:-1]).all(axis=1)]
        return sp.csr_array(np.unique(live[~(below_next | below_last)], axis=0).astype(np.float64))

    def at(self, position: int) -> np.ndarray:
        """How many copies of each buffer live at one program point, `[B]`."""
        alive = (self.start <= position) & (position < self.stop)
        return np.bincount(self.interval_buffer[alive], minlength=len(self.buffers))


class _Collector:
    def __init__(self, shell: ClassProblem) -> None:
        self.shell = shell
        self.number: dict[tuple, int] = {}
        self.buffers: list[Buffer] = []
        self.labels: list[str] = []
        self.intervals: list[tuple[int, int, int]] = []

    def add(self, key: tuple, make, label: str, start: int, stop: int) -> None:
        if key not in self.number:
            self.number[key] = len(self.buffers)
            self.buffers.append(make())
            self.labels.append(label)
        self.intervals.append((self.number[key], start, max(stop, start + 1)))


def memory_model(shell: ClassProblem, trace: Trace) -> MemoryModel:
    graph, folded = shell.folded.graph, shell.folded
    collector = _Collector(shell)
    arguments = sum(shell.full_bytes(graph.nodes[n].results[0]) for n in graph.inputs)
    donated = {trace_in: trace.inputs[trace_in].donated for trace_in in range(len(trace.inputs))}
    paired = dict(trace.state_pairs)
    in_place = {graph.outputs[o] for i, o in trace.state_pairs if donated[i]}
    last = last_reads(graph, shell.written)
    input_of = {node: i for i, node in enumerate(graph.inputs)}
    for value in graph.values:
        if shell.written[value.index] and shell.full_bytes(value.index) > 0:
            start, stop = _lifetime(graph, value, last[value.index], in_place, input_of, donated, paired)
            if start + 1 < stop and overwrites(graph, shell.fusions, value, last):
                start += 1
            _add_value(collector, value, start, stop)
    for number, arc in enumerate(folded.arcs):
        narrow = graph.nodes[graph.values[arc.value].producer].kind == "narrow"
        if (shell.written[arc.value] or narrow) and shell.full_bytes(arc.value) >= NEGLIGIBLE * arguments:
            _add_reshard(collector, number, arc, last)
    which, start, stop = (np.array(x, np.int64) for x in zip(*collector.intervals)) if collector.intervals else (
        np.zeros(0, np.int64),) * 3
    return MemoryModel(tuple(collector.buffers), tuple(collector.labels), which, start, stop, graph.num_positions)


def _lifetime(graph, value, last_read: int, in_place, input_of, donated, paired) -> tuple[int, int]:
    """First position, and one past the last, at which a value is held."""
    producer = graph.nodes[value.producer]
    end = graph.num_positions
    if producer.kind == "input":
        i = input_of[producer.index]
        if not donated[i] or i in paired:
            return 0, end
    if producer.kind == "const":
        return 0, end
    leaves = {number for number in graph.uses_of[value.index] if graph.nodes[graph.uses[number].node].kind == "output"}
    if leaves - in_place:
        return producer.position, end
    if leaves:
        last_read = max((graph.nodes[graph.uses[number].node].position for number in graph.uses_of[value.index]
                         if number not in leaves), default=producer.position)
    return producer.position, min(max(producer.position, last_read) + 1, end)


def _add_value(collector: _Collector, value, start: int, stop: int) -> None:
    """The value as it is kept: in its view's layout if it has one. Arguments are kept as they come; what is gathered of
    them is a copy (`_add_reshard`)."""
    shell = collector.shell
    node = shell.folded.graph.nodes[value.producer]
    view = -1 if node.kind == "input" else shell.folded.view_of[value.index]
    vertex, result = (view, 0) if view >= 0 else (value.producer, value.result)
    c = int(shell.folded.class_of[vertex])
    ring = shell.rings.get(c)

    def make() -> Buffer:
        codes = shell.strategies[c].results[result]
        size = _held_bytes(shell, value, codes)
        if ring is not None:  # a sum that goes around is there in blocks only
            pending = np.where(codes < WHOLE, np.asarray(shell.machine.shape), 1).prod(axis=1)
            size = np.where(ring.dims.any(axis=1), size / pending, size)
        return Buffer(c, None, size)

    collector.add((c, result, value.shape, value.itemsize), make, node.name, start, stop)


def _held_bytes(shell: ClassProblem, value, codes: np.ndarray) -> np.ndarray:
    tile = lowering.TILES.get(shell.machine.device.platform)
    return layouts.held_bytes(value.shape, value.itemsize, codes, shell.machine.shape, tile)


def _add_reshard(collector: _Collector, number: int, arc, last: list[int]) -> None:
    """The second copy that a reshard holds while it runs; of arguments, and of what is read of them as bfloat16, the
    view's, for as long as it is read."""
    shell = collector.shell
    graph = shell.folded.graph
    if arc.operand == TO_STATE:
        return
    value = graph.values[arc.value]
    producer = graph.nodes[value.producer]
    start = producer.position if arc.operand == TO_VIEW else graph.nodes[arc.target].position
    stop = start + 1
    copied = arc.operand == TO_VIEW and (producer.kind == "input" or not shell.written[arc.value])
    if copied:
        readers = [reader.position for reader in graph.readers_of(arc.value)]
        start, stop = min(readers, default=start), last[arc.value] + 1
    edge = int(shell.edge_of[number])
    given, wanted = shell.given(arc), shell.wanted(arc)
    held = given if arc.operand == TO_VIEW and not copied else wanted

    def make() -> Buffer:
        sizes = _held_bytes(shell, value, held)
        # An all-reduce writes over what it reads.
        done = np.where(given < WHOLE, WHOLE, given)
        differs = (done[:, None, :] != wanted[None, :, :]).any(axis=-1)
        usage = np.where(differs, sizes[:, None] if held is given else sizes[None, :], 0.0)
        if edge >= 0:
            return Buffer(None, edge, usage)
        return Buffer(int(shell.folded.class_of[arc.source]), None, np.diagonal(usage).copy())

    key = ("edge", edge) if edge >= 0 else ("self", int(shell.folded.class_of[arc.source]), arc.result, arc.operand)
    collector.add(key, make, f"reshard of {producer.name}", start, stop)
