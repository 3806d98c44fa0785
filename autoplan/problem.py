"""The choice problem of a folded graph on one mesh: strategies per class, their costs, and memory.

    minimise  sum_c count_c time_c(s_c)  +  sum_arcs weight * reshard_time(layout of source, layout wanted)

over one strategy per class (`_class_costs`, `_reshard_matrix`), subject to the memory rows of `memory.MemoryModel`.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
import math
from typing import NamedTuple

import numpy as np

from . import layouts
from .cost_models import compute_time_s
from .folding import TO_STATE, TO_VIEW, Arc, Folded
from .fusion import Fusions, fusions_of
from .graph import Node
from .reshard import Machine, applying_steps, reshard_time_s
from .search import Problem
from .strategies import Strategies, enumerate_strategies, layout_strategies

# Reads of these touch only what they give back, not their whole first operand.
_PARTIAL_READERS = {"gather", "dynamic_slice", "slice"}


class ArcKind(NamedTuple):
    """Classes of an arc's ends, result and operand there, and the bytes of the whole value. Arcs of one kind
    reshard alike under every choice."""

    source: int
    target: int
    result: int
    operand: int
    full_bytes: float


@dataclass(frozen=True)
class ClassProblem:
    """The problem and how to read its answer.

    `strategies[c]` are those of class c; `kinds` holds one arc of each kind and the weight of all; `edge_of[arc]`
    is the problem's edge of each arc (-1 within a class); `fusions` says what is kept in memory.
    """

    folded: Folded
    machine: Machine
    strategies: tuple[Strategies, ...]
    kinds: dict[ArcKind, tuple[Arc, float]]
    problem: Problem
    edge_of: np.ndarray
    fusions: Fusions

    @property
    def written(self) -> np.ndarray:
        """Whether each value is kept in memory, bool `[values]`."""
        return self.fusions.written

    def strategy(self, vertex: int, choice: np.ndarray) -> int:
        return int(choice[self.folded.class_of[vertex]])

    def given(self, arc: Arc) -> np.ndarray:
        """Layouts in which the arc's source gives the value, by its strategy `[S, axes]`."""
        source = self.strategies[self.folded.class_of[arc.source]]
        return source.results[max(arc.result, 0)]

    def wanted(self, arc: Arc) -> np.ndarray:
        """Layouts in which the arc's target wants the value, by its strategy `[S, axes]`."""
        target = self.strategies[self.folded.class_of[arc.target]]
        return target.results[0] if arc.operand in (TO_VIEW, TO_STATE) else target.operands[arc.operand]

    def layouts_of(self, arc: Arc, choice: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(given, wanted) layout of an arc under a choice."""
        given = self.given(arc)[self.strategy(arc.source, choice)]
        wanted = self.wanted(arc)[self.strategy(arc.target, choice)]
        return tuple(given.tolist()), tuple(wanted.tolist())

    def full_bytes(self, value: int) -> float:
        return _full_bytes(self.folded, value)


def build_problem(folded: Folded, machine: Machine, allowed: dict[int, Callable[[np.ndarray], np.ndarray]]
                  ) -> ClassProblem:
    """The problem of `folded` on `machine`. `allowed[node]` tells which layouts `[n, axes]` a pinned input may take."""
    fusions = fusions_of(folded.graph, machine.device.platform)
    strategies = _strategies(folded, machine.shape, allowed)
    groups = _arcs_by_kind(folded)
    kinds = {kind: (folded.arcs[arcs[0]], sum(folded.arcs[a].weight for a in arcs)) for kind, arcs in groups.items()}
    shell = ClassProblem(folded, machine, strategies, kinds, Problem((), np.zeros((0, 2), np.int64), ()),
                         np.full(len(folded.arcs), -1, np.int64), fusions)
    node_costs = [_class_costs(folded, machine, strategies, fusions.written, c) for c in range(len(strategies))]
    pairs, costs = [], []
    cache: dict = {}
    for kind, (arc, weight) in kinds.items():
        cost = weight * _reshard_matrix(kind.full_bytes, shell.given(arc), shell.wanted(arc), machine, cache)
        if kind.source == kind.target:
            node_costs[kind.source] += np.diagonal(cost)
        else:
            shell.edge_of[groups[kind]] = len(pairs)
            pairs.append((kind.source, kind.target))
            costs.append(cost)
    problem = Problem(tuple(node_costs), np.array(pairs, np.int64).reshape(-1, 2), tuple(costs))
    return replace(shell, problem=problem)


def _arcs_by_kind(folded: Folded) -> dict[ArcKind, list[int]]:
    sizes = [_full_bytes(folded, v) for v in range(len(folded.graph.values))]
    classes = folded.class_of.tolist()
    groups: dict[ArcKind, list[int]] = {}
    for number, arc in enumerate(folded.arcs):
        kind = ArcKind(classes[arc.source], classes[arc.target], arc.result, arc.operand, sizes[arc.value])
        groups.setdefault(kind, []).append(number)
    return groups


def _full_bytes(folded: Folded, value: int) -> float:
    v = folded.graph.values[value]
    return math.prod(v.shape) * v.itemsize


def _strategies(folded: Folded, axis_sizes, allowed) -> tuple[Strategies, ...]:
    """Strategies by class: of nodes from their rules, then of views from what their neighbours give and want."""
    graph, rules = folded.graph, folded.graph.rules
    cache: dict = {}
    out: dict[int, Strategies] = {}
    for c, members in enumerate(folded.members):
        if members[0] >= len(graph.nodes):
            continue
        node = graph.nodes[members[0]]
        rule = rules[node.rule]
        if node.kind in ("input", "const", "output"):
            shape = graph.values[node.results[0]].shape if node.results else \
                graph.values[graph.uses[node.operands[0]].value].shape
            every = layouts.all_layouts(shape, axis_sizes)
            if node.index in allowed:
                every = every[allowed[node.index](every)]
            out[c] = layout_strategies(every, len(node.operands), len(node.results), axis_sizes)
            continue
        key = (node.rule, node.name, node.dtype)
        if key not in cache:
            cache[key] = enumerate_strategies(rule, axis_sizes, node.name, node.dtype)
        out[c] = cache[key]
    touching: dict[int, dict] = defaultdict(dict)
    for arc in folded.arcs:
        if folded.value_of_view(arc.target) is not None:
            c = int(folded.class_of[arc.source])
            touching[int(folded.class_of[arc.target])][(0, c, arc.result)] = out[c].results[arc.result]
        elif folded.value_of_view(arc.source) is not None:
            c = int(folded.class_of[arc.target])
            want = out[c].results[0] if arc.operand == TO_STATE else out[c].operands[arc.operand]
            touching[int(folded.class_of[arc.source])][(1, c, arc.operand)] = want
    for c, sides in touching.items():
        distinct, _ = layouts.unique(np.concatenate(list(sides.values())))
        out[c] = layout_strategies(distinct, 1, 1, axis_sizes)
    return tuple(out[c] for c in range(len(folded.members)))


def _class_costs(folded: Folded, machine: Machine, strategies, written, c: int) -> np.ndarray:
    """Seconds of computing of all members of class c, by strategy `[S]`."""
    graph, members = folded.graph, folded.members[c]
    total = np.zeros(len(strategies[c]))
    if members[0] >= len(graph.nodes) or graph.nodes[members[0]].kind != "op":
        return total

    def is_read(value: int) -> bool:
        return bool(written[value]) or graph.nodes[graph.values[value].producer].kind == "narrow"

    patterns = Counter((tuple(is_read(graph.uses[u].value) for u in graph.nodes[m].operands),
                        tuple(bool(written[v]) for v in graph.nodes[m].results)) for m in members)
    node = graph.nodes[members[0]]
    for pattern, count in patterns.items():
        total += count * node.weight * _op_time_s(graph, node, strategies[c], machine, *pattern)
    return total


def _op_time_s(graph, node: Node, options: Strategies, machine: Machine, reads, writes) -> np.ndarray:
    moved = np.zeros(len(options))
    for v, kept, codes in zip(node.results, writes, options.results):
        if kept:
            moved += layouts.local_bytes(graph.values[v].shape, graph.values[v].itemsize, codes, machine.shape)
    if node.name in _PARTIAL_READERS:
        moved *= 2
        reads = (False, *reads[1:])
    for u, kept, codes in zip(node.operands, reads, options.operands):
        value = graph.values[graph.uses[u].value]
        if kept:
            moved += layouts.local_bytes(value.shape, value.itemsize, codes, machine.shape)
    # Elementwise work is bound by memory; only contractions are charged for their arithmetic.
    heavy = node.name in ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
    flops = node.flops / options.splits if heavy else 0.0
    return compute_time_s(machine.device, flops, node.dtype or "float32", moved)


def _reshard_matrix(full_bytes: float, before: np.ndarray, after: np.ndarray, machine: Machine, cache: dict
                    ) -> np.ndarray:
    """Reshard times `[n, m]`; computed once per pair of distinct layout sets and size."""
    p, row = layouts.unique(before)
    q, column = layouts.unique(after)
    pair = (p.tobytes(), q.tobytes(), p.shape, q.shape)
    if pair not in cache:
        cache[pair] = applying_steps(p, q, machine)
    if (full_bytes, pair) not in cache:
        cache[full_bytes, pair] = reshard_time_s(full_bytes, p, q, machine, cache[pair])
    return cache[full_bytes, pair][np.ix_(row, column)]
