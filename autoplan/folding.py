"""Folding: vertices of the choice problem, and the classes of those that share a strategy.

A vertex is a node of the graph or a *view*: the layout in which a value with several readers is kept, so that
a reshard that they share is paid once. Vertices are folded by colour refinement (a few rounds of the
one-dimensional Weisfeiler-Leman test: B. Weisfeiler, A. Leman, 1968) over their keys and neighbours: repeated
layers become one set of classes, whatever their number.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .graph import Graph
from .trace import Trace

# Neighbourhood radius of a class, in vertices. Large enough to tell the ends of a stack of layers from its
# middle, small enough that the middle of any depth is one set of classes.
ROUNDS = 4


@dataclass(frozen=True)
class Arc:
    """A value passes from vertex `source` to vertex `target`, `weight` times per step.

    `result` is the source's result (-1 for a view), `operand` the target's operand (-1 for a view, -2 for the
    input that a new state becomes). `use` is the use it serves, -1 from a producer to its view.
    """

    source: int
    target: int
    value: int
    result: int
    operand: int
    use: int
    weight: float


TO_VIEW, TO_STATE = -1, -2


@dataclass(frozen=True)
class Folded:
    """The graph's vertices, arcs and classes.

    Vertices 0 .. len(graph.nodes) - 1 are the nodes; the rest are views. `view_of[v]` is the view of value v or
    -1; `viewed[i]` the value of view i. `class_of[vertex]` numbers classes by first member; `members[c]`.
    """

    graph: Graph
    arcs: tuple[Arc, ...]
    view_of: tuple[int, ...]
    viewed: tuple[int, ...]
    class_of: np.ndarray
    members: tuple[tuple[int, ...], ...]

    @property
    def num_vertices(self) -> int:
        return len(self.graph.nodes) + len(self.viewed)

    def value_of_view(self, vertex: int) -> int | None:
        """The value that a view vertex keeps; None for a node."""
        index = vertex - len(self.graph.nodes)
        return self.viewed[index] if index >= 0 else None


def fold(graph: Graph, trace: Trace, rounds: int = ROUNDS) -> Folded:
    view_of, viewed = _views(graph)
    arcs = _arcs(graph, trace, view_of)
    class_of = _refine(graph, viewed, arcs, rounds)
    members: list[list[int]] = [[] for _ in range(int(class_of.max(initial=-1)) + 1)]
    for vertex, number in enumerate(class_of):
        members[number].append(vertex)
    return Folded(graph, tuple(arcs), tuple(view_of), tuple(viewed), class_of, tuple(map(tuple, members)))


def _views(graph: Graph) -> tuple[list[int], list[int]]:
    view_of, viewed = [-1] * len(graph.values), []
    for value in graph.values:
        if len(graph.uses_of[value.index]) > 1:
            view_of[value.index] = len(graph.nodes) + len(viewed)
            viewed.append(value.index)
    return view_of, viewed


def _arcs(graph: Graph, trace: Trace, view_of) -> list[Arc]:
    state = {graph.outputs[o]: graph.inputs[i] for i, o in trace.state_pairs if graph.outputs[o] >= 0}
    arcs = []
    for value in graph.values:
        source, result = value.producer, value.result
        if view_of[value.index] >= 0:
            node = graph.nodes[value.producer]
            weight = node.weight
            if node.kind == "carry":  # laid out again in every round
                weight = max(weight, *(graph.uses[number].weight for number in graph.uses_of[value.index]))
            arcs.append(Arc(source, view_of[value.index], value.index, result, TO_VIEW, -1, weight))
            source, result = view_of[value.index], TO_VIEW
        for number in graph.uses_of[value.index]:
            use = graph.uses[number]
            if number in state:
                if state[number] != source:  # an untouched state needs nothing
                    arcs.append(Arc(source, state[number], value.index, result, TO_STATE, number, use.weight))
            else:
                arcs.append(Arc(source, use.node, value.index, result, use.operand, number, use.weight))
    return arcs


def _refine(graph: Graph, viewed, arcs, rounds: int) -> np.ndarray:
    """Class of each vertex; 64-bit sums of mixed colours stand for multisets of neighbours."""
    keys: dict = {}
    first = [keys.setdefault(node.key, len(keys)) for node in graph.nodes]
    for value in viewed:
        v = graph.values[value]
        key = ("view", v.shape, v.dtype, graph.nodes[v.producer].weight)
        first.append(keys.setdefault(key, len(keys)))
    colour = _mix(np.array(first, np.uint64))
    source = np.array([a.source for a in arcs], np.int64)
    target = np.array([a.target for a in arcs], np.int64)
    label = _mix(np.array([(a.result + 4) * 1024 + a.operand + 4 for a in arcs], np.uint64))
    for _ in range(rounds):
        message = np.zeros_like(colour)
        np.add.at(message, target, _mix(colour[source] ^ label))
        np.add.at(message, source, _mix(_mix(colour[target]) + label))
        colour = _mix(colour * np.uint64(3) + message)
    number: dict = {}
    # The key is part of the class, so that a collision of hashes can never join what must stay apart.
    return np.array([number.setdefault((k, int(c)), len(number)) for k, c in zip(first, colour)], np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014), vectorised."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
