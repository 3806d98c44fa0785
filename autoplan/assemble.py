"""From a choice to a `Plan`: layouts of inputs and outputs, constraints, collectives, predictions."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
import functools

import numpy as np

from . import layouts
from .classics import Roles
from .folding import TO_STATE, TO_VIEW, Arc
from .fusion import FUSIBLE
from .graph import Graph, Use
from .layouts import WHOLE, Layout
from .memory import MemoryModel
from .plan import Collective, Constraint, LeafLayout
from .problem import ClassProblem
from .reshard import Transfer, path
from .trace import Trace


@dataclass(frozen=True)
class Scored:
    """A choice for one mesh and what it is predicted to cost."""

    shell: ClassProblem
    memory: MemoryModel
    choice: np.ndarray

    @functools.cached_property
    def step_time_s(self) -> float:
        """The choice's cost in the problem, and what gathers take longer than all computing that they run beside."""
        return float(self.shell.problem.cost(self.choice)) + self.excess_s

    @functools.cached_property
    def excess_s(self) -> float:
        """Seconds of gathers counted as hidden for which there is nothing to hide behind."""
        computing_s = sum(float(cost[s]) for cost, s in zip(self.shell.problem.node_costs, self.choice))
        return max(0.0, self._communication_s(lambda t: (t.time_s - t.exposed_s) * (not t.ring)) - computing_s)

    @property
    def communication_time_s(self) -> float:
        """Seconds that the step waits for collectives; the rest is computing, and writing what they bring."""
        return self._communication_s(lambda transfer: transfer.exposed_s) + self.excess_s

    def _communication_s(self, seconds: Callable[[Transfer], float]) -> float:
        total = 0.0
        for kind, (arc, weight) in self.shell.kinds.items():
            total += weight * sum(map(seconds, self.shell.transfers(arc, kind.beside, self.choice)))
        return total

    @property
    def peak_memory_bytes(self) -> float:
        return float(self.memory.profile(self.choice, self.shell.problem.edge_nodes).max(initial=0.0))


def input_leaves(scored: Scored, trace: Trace, roles: Roles, axis_names: Sequence[str]) -> tuple[LeafLayout, ...]:
    graph = scored.shell.folded.graph
    return tuple(_leaf(scored, leaf.path, graph.values[graph.nodes[node].results[0]],
                       _node_layout(scored, node), axis_names, role, str(leaf.dtype))
                 for leaf, node, role in zip(trace.inputs, graph.inputs, roles.inputs))


def output_leaves(scored: Scored, trace: Trace, inputs: Sequence[LeafLayout], axis_names: Sequence[str]
                  ) -> tuple[LeafLayout, ...]:
    """Outputs that are state take their input's layout; literals are whole; the rest is as chosen."""
    graph = scored.shell.folded.graph
    paired = {o: i for i, o in trace.state_pairs}
    out = []
    for k, (leaf, number) in enumerate(zip(trace.outputs, graph.outputs)):
        if k in paired:
            state = inputs[paired[k]]
            out.append(LeafLayout(leaf.path, state.shape, state.dtype, state.spec, state.bytes_per_device, "state"))
        elif number < 0:
            out.append(LeafLayout(leaf.path, leaf.shape, str(leaf.dtype), ((),) * len(leaf.shape), 0.0, "output"))
        else:
            use = graph.uses[number]
            out.append(_leaf(scored, leaf.path, graph.values[use.value], _node_layout(scored, use.node), axis_names,
                             "output", str(leaf.dtype)))
    return tuple(out)


def _node_layout(scored: Scored, node: int) -> Layout:
    options = scored.shell.strategies[scored.shell.folded.class_of[node]]
    codes = (options.results or options.operands)[0][scored.shell.strategy(node, scored.choice)]
    return tuple(map(int, codes))


def _leaf(scored: Scored, path, value, layout: Layout, axis_names, role: str, dtype: str) -> LeafLayout:
    codes = np.array([layout], np.int8).reshape(1, len(axis_names))
    size = float(layouts.local_bytes(value.shape, value.itemsize, codes, scored.shell.machine.shape)[0])
    return LeafLayout(path, value.shape, dtype, layouts.to_spec(layout, len(value.shape), axis_names), size, role)


def constraints(scored: Scored, axis_names: Sequence[str]) -> tuple[Constraint, ...]:
    """One constraint where a value is made, unless its layout follows by itself, and one per reshard of a use.

    Where two readers each reshard a value in the same way, the plan means two reshards (weights gathered again
    for the backward pass, not held since the forward). The later ones are marked `again`, so that the compiler
    does not make one of them.
    """
    shell, graph = scored.shell, scored.shell.folded.graph
    out: list[Constraint] = []

    def put(address, ways: Sequence[Layout], value, again: bool = False) -> None:
        if value.shape and "key" not in value.dtype and address.where != "const":
            *way, spec = (layouts.to_spec(layout, len(value.shape), axis_names) for layout in ways)
            out.append(Constraint(address.site, address.where, address.index, spec, tuple(way), again))

    seen: set[tuple[int, Layout]] = set()
    moved: set[int] = set()  # values that some reader reshards: were they not held, their makers would follow it
    for arc in sorted(shell.folded.arcs, key=lambda a: _position(shell, a)):
        given, wanted = shell.layouts_of(arc, scored.choice)
        if arc.operand == TO_VIEW or given == wanted or _pending(wanted) or _is_narrow(graph, arc):
            continue
        put(graph.uses[arc.use].address, path(given, wanted), graph.values[arc.value], (arc.value, wanted) in seen)
        seen.add((arc.value, wanted))
        moved.add(arc.value)
    for use, ways, again in _ways_of_narrow_reads(scored):
        put(use.address, ways, graph.values[use.value], again)
        moved.add(graph.uses[graph.nodes[graph.values[use.value].producer].operands[0]].value)
    for value, ways in zip(graph.values, _ways_of_values(scored)):
        producer = graph.nodes[value.producer]
        if value.address.where == "input" and not value.address.site:
            ways = ways[1:]  # arguments come in their layouts
        if value.address.where == "nowhere":
            continue
        if len(ways) > 1 or ways and (value.index in moved or not _follows(scored, producer, value, ways[0])):
            put(value.address, ways, value)
    return tuple(out)


def _is_narrow(graph: Graph, arc: Arc) -> bool:
    """Whether an arc leads to or from a narrow node, which the program does not have."""
    target = graph.nodes[arc.target].kind if arc.operand >= 0 else ""
    return target == "narrow" or graph.nodes[graph.values[arc.value].producer].kind == "narrow"


def _ways_of_narrow_reads(scored: Scored) -> Iterator[tuple[Use, tuple[Layout, ...], bool]]:
    """(use, layouts to take on there, whether again) of each contraction that reads a narrowed value: the way from the
    layout of the wide value, by that of the narrow one and of its view, to the one wanted."""
    shell, graph = scored.shell, scored.shell.folded.graph
    arc_of_use = {arc.use: arc for arc in shell.folded.arcs if arc.use >= 0}
    view_arc = {arc.value: arc for arc in shell.folded.arcs if arc.operand == TO_VIEW}
    for node in graph.nodes:
        if node.kind != "narrow":
            continue
        given, narrow = shell.layouts_of(arc_of_use[node.operands[0]], scored.choice)
        shared = () if _pending(given) else path(given, narrow)
        kept, value = narrow, node.results[0]
        if value in view_arc:
            _, kept = shell.layouts_of(view_arc[value], scored.choice)
            shared += path(narrow, kept)
        seen: set[Layout] = set()
        for number in graph.uses_of[value]:
            _, wanted = shell.layouts_of(arc_of_use[number], scored.choice)
            if way := (*shared, *path(kept, wanted)):
                yield graph.uses[number], way, wanted != kept and wanted in seen
            seen.add(wanted)


def _pending(layout: Layout) -> bool:
    return any(code < WHOLE for code in layout)


def _ways_of_values(scored: Scored) -> list[tuple[Layout, ...]]:
    """The layouts that each value takes on where it is made: what its producer gives, then the way to its view's.
    A pending sum with one reader goes straight to what the reader wants; () is nothing to ask for."""
    shell = scored.shell
    ways: list[tuple[Layout, ...]] = [()] * len(shell.folded.graph.values)
    for arc in shell.folded.arcs:
        given, wanted = shell.layouts_of(arc, scored.choice)
        if arc.operand == TO_VIEW or (shell.folded.view_of[arc.value] < 0 and _pending(given)):
            start = () if _pending(given) else (given,)
            ways[arc.value] = () if _pending(wanted) else (*start, *path(given, wanted))
        elif shell.folded.view_of[arc.value] < 0:
            ways[arc.value] = (given,)
    return ways


def _follows(scored: Scored, producer, value, layout: Layout) -> bool:
    """Whether the partitioner gives an elementwise result this layout anyway: the operands of its shape have it, and no
    axis is left that it could give to a dim because a reader would like that."""
    shell = scored.shell
    if any(code == WHOLE and size > 1 for code, size in zip(layout, shell.machine.shape)):
        return False
    if producer.kind != "op" or producer.name not in FUSIBLE:
        return False
    if not shell.folded.graph.rules[producer.rule].elementwise:
        return False
    options = shell.strategies[shell.folded.class_of[producer.index]]
    s = shell.strategy(producer.index, scored.choice)
    shapes = [shell.folded.graph.values[shell.folded.graph.uses[u].value].shape for u in producer.operands]
    own = [tuple(map(int, o[s])) for o, shape in zip(options.operands, shapes) if shape == value.shape]
    return bool(own) and all(o == layout for o in own)


def collectives(scored: Scored, axis_names: Sequence[str]) -> tuple[Collective, ...]:
    """Every collective of the step, in program order."""
    shell = scored.shell
    out = []
    for arc, beside in sorted(zip(shell.folded.arcs, shell.beside), key=lambda pair: _position(shell, pair[0])):
        for transfer in shell.transfers(arc, bool(beside), scored.choice):
            op, source = _purpose(shell, arc)
            op = f"{op} (reduce-scatter beside it)" if transfer.ring else op
            out.append(Collective(transfer.kind, tuple(axis_names[a] for a in transfer.axes), transfer.wire_bytes,
                                  arc.weight, transfer.time_s, source, op, transfer.time_s - transfer.exposed_s))
    return tuple(out)


def _position(shell: ClassProblem, arc: Arc) -> tuple[int, int]:
    graph = shell.folded.graph
    if arc.operand in (TO_VIEW, TO_STATE):
        return graph.nodes[graph.values[arc.value].producer].position, arc.value
    return graph.nodes[arc.target].position, arc.value


def _purpose(shell: ClassProblem, arc: Arc) -> tuple[str, str]:
    """(what a collective is for, the user's line)."""
    graph = shell.folded.graph
    producer = graph.producer_of(arc.value)
    readers = list(graph.readers_of(arc.value)) if arc.operand == TO_VIEW or _is_narrow(graph, arc) else \
        [graph.nodes[arc.target]]
    names = list(dict.fromkeys(reader.name for reader in readers))[:3]
    return f"{producer.name} -> {', '.join(names)}", producer.source or (readers[0].source if len(readers) == 1 else "")
