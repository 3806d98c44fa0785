"""The choice problem of a folded graph on one mesh: strategies per class, their costs, and memory.

    minimise  sum_c count_c time_c(s_c)  +  sum_arcs weight * reshard_time(layout of source, layout wanted)

over one strategy per class (`_class_costs`, `_reshard_matrix`), subject to the memory rows of `memory.MemoryModel`.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
import math
from typing import NamedTuple

import numpy as np

from . import layouts, lowering
from .cost_models import compute_time_s
from .folding import TO_STATE, TO_VIEW, Arc, Folded
from .fusion import Fusions, fusions_of
from .graph import CONTRACTIONS, Node
from .overlap import beside_contractions, ring_of
from .reshard import Machine, Ring, Transfer, applying_steps, collectives_between, reshard_time_s
from .search import Problem
from .strategies import Strategies, enumerate_strategies, layout_strategies
from .work import Work, work_of

# Reads of these touch only what they give back, not their whole first operand.
_PARTIAL_READERS = {"gather", "dynamic_slice", "slice"}


class ArcKind(NamedTuple):
    """Classes of an arc's ends, result and operand there, the bytes of the whole value, and whether gathers of it can
    run beside contractions. Arcs of one kind reshard alike under every choice."""

    source: int
    target: int
    result: int
    operand: int
    full_bytes: float
    beside: bool


@dataclass(frozen=True)
class ClassProblem:
    """The problem and how to read its answer.

    `strategies[c]` are those of class c; `kinds` holds one arc of each kind and the weight of all; `edge_of[arc]`
    is the problem's edge of each arc (-1 within a class); `fusions` says what is kept in memory; `beside[arc]` whether
    a gather can run beside contractions, and `rings[c]` where the pending sum of class c goes around.
    """

    folded: Folded
    machine: Machine
    strategies: tuple[Strategies, ...]
    kinds: dict[ArcKind, tuple[Arc, float]]
    problem: Problem
    edge_of: np.ndarray
    fusions: Fusions
    beside: np.ndarray
    rings: dict[int, Ring]

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

    def transfers(self, arc: Arc, beside: bool, choice: np.ndarray) -> list[Transfer]:
        """The collectives along an arc under a choice."""
        given, wanted = self.layouts_of(arc, choice)
        if given == wanted:
            return []
        ring = self.rings.get(int(self.folded.class_of[arc.source]))
        if ring is not None:
            row = self.strategy(arc.source, choice)
            ring = Ring(ring.dims[row : row + 1], ring.beside_s[row : row + 1])
        hidden = lowering.hidden_share(self.machine.device.platform) if beside else 0.0
        return collectives_between(self.full_bytes(arc.value), given, wanted, self.machine, hidden=hidden, ring=ring)


def build_problem(folded: Folded, machine: Machine, allowed: dict[int, Callable[[np.ndarray], np.ndarray]],
                  wanted: dict[int, Strategies] | None = None) -> ClassProblem:
    """The problem of `folded` on `machine`. `allowed[node]` tells which layouts `[n, axes]` a pinned input or output
    may take, `wanted[node]` gives the strategies of what the program itself lays out."""
    graph = folded.graph
    fusions = fusions_of(graph, machine.device.platform)
    strategies = _strategies(folded, machine, allowed, wanted or {})
    beside = beside_contractions(graph, folded.arcs)
    groups = _arcs_by_kind(folded, beside)
    kinds = {kind: (folded.arcs[arcs[0]], sum(folded.arcs[a].weight for a in arcs)) for kind, arcs in groups.items()}
    work = work_of(graph, fusions, machine.device, math.prod(machine.shape))
    rings = {}
    for c, members in enumerate(folded.members):
        if members[0] < len(graph.nodes) and (node := graph.nodes[members[0]]).name in CONTRACTIONS:
            compute_s = op_time_s(graph, node, strategies[c], machine, work, fusions.written)
            if (ring := ring_of(graph, node, strategies[c], machine, compute_s)) is not None:
                rings[c] = ring
    shell = ClassProblem(folded, machine, strategies, kinds, Problem((), np.zeros((0, 2), np.int64), ()),
                         np.full(len(folded.arcs), -1, np.int64), fusions, beside, rings)
    node_costs = [_class_costs(shell, work, c) for c in range(len(strategies))]
    pairs, costs = [], []
    cache: dict = {}
    for kind, (arc, weight) in kinds.items():
        cost = weight * _reshard_matrix(shell, kind, arc, cache)
        if kind.source == kind.target:
            node_costs[kind.source] += np.diagonal(cost)
        else:
            shell.edge_of[groups[kind]] = len(pairs)
            pairs.append((kind.source, kind.target))
            costs.append(cost)
    problem = Problem(tuple(node_costs), np.array(pairs, np.int64).reshape(-1, 2), tuple(costs))
    return replace(shell, problem=problem)


def leaning_to_links(shell: ClassProblem, weight: float) -> Problem:
    """The problem with computing C weighed by 1 - w, and by w what gathers G beside it hide, for w in 0 .. 1.

    The step takes max(C, G) and all that is neither. Of this the sum is a lower bound for every w, as the problem
    itself is for w = 0.
    """
    cache: dict = {}
    edges = []
    for kind, (arc, count) in shell.kinds.items():
        if kind.source == kind.target:
            continue
        cost = shell.problem.edge_costs[len(edges)]
        if kind.beside:
            alone, beside = (_reshard_matrix(shell, kind._replace(beside=b), arc, cache) for b in (False, True))
            possible = np.isfinite(alone)
            hides = np.subtract(alone, beside, out=np.zeros_like(alone), where=possible)
            cost = cost + weight * count * hides
        edges.append(cost)
    nodes = tuple((1 - weight) * cost for cost in shell.problem.node_costs)
    return replace(shell.problem, node_costs=nodes, edge_costs=tuple(edges))


def _arcs_by_kind(folded: Folded, beside: np.ndarray) -> dict[ArcKind, list[int]]:
    sizes = [_full_bytes(folded, v) for v in range(len(folded.graph.values))]
    classes = folded.class_of.tolist()
    groups: dict[ArcKind, list[int]] = {}
    for number, arc in enumerate(folded.arcs):
        ends = classes[arc.source], classes[arc.target]
        kind = ArcKind(*ends, arc.result, arc.operand, sizes[arc.value], bool(beside[number]))
        groups.setdefault(kind, []).append(number)
    return groups


def _full_bytes(folded: Folded, value: int) -> float:
    v = folded.graph.values[value]
    return math.prod(v.shape) * v.itemsize


def _strategies(folded: Folded, machine: Machine, allowed, wanted) -> tuple[Strategies, ...]:
    """Strategies by class: of nodes from their rules, then of views from what their neighbours give and want."""
    graph, rules, axis_sizes = folded.graph, folded.graph.rules, machine.shape
    carry = lowering.carries(machine.device.platform)
    cache: dict = {}
    out: dict[int, Strategies] = {}
    for c, members in enumerate(folded.members):
        if members[0] >= len(graph.nodes):
            continue
        node = graph.nodes[members[0]]
        rule = rules[node.rule]
        if node.index in wanted:
            out[c] = wanted[node.index]
            continue
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
            cache[key] = enumerate_strategies(rule, axis_sizes, node.name, node.dtype, carry)
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


def _class_costs(shell: ClassProblem, work: Work, c: int) -> np.ndarray:
    """Seconds of computing of all members of class c, by strategy `[S]`."""
    folded, options = shell.folded, shell.strategies[c]
    graph, members = folded.graph, folded.members[c]
    total = np.zeros(len(options))
    if members[0] >= len(graph.nodes) or graph.nodes[members[0]].kind != "op":
        return total
    patterns: dict[tuple, list[int]] = {}
    for m in members:
        node = graph.nodes[m]
        kept = tuple(bool(shell.written[v]) for v in node.results)
        reads = tuple(_is_read(graph, shell.written, u) for u in node.operands)
        patterns.setdefault((reads, kept, work.read_bytes[m], work.hidden_s[m]), []).append(m)
    for alike in patterns.values():
        node = graph.nodes[alike[0]]
        total += len(alike) * node.weight * op_time_s(graph, node, options, shell.machine, work, shell.written)
    return total


def _is_read(graph, written: np.ndarray, use: int) -> bool:
    value = graph.uses[use].value
    return bool(written[value]) or graph.nodes[graph.values[value].producer].kind == "narrow"


def op_time_s(graph, node: Node, options: Strategies, machine: Machine, work: Work, written: np.ndarray) -> np.ndarray:
    """Seconds that one device computes in one execution of a node, by strategy `[S]`.

    Elementwise work is bound by memory: only contractions are charged for their arithmetic. What is fused into a
    contraction (`Work`) runs beside it.
    """
    moved = np.zeros(len(options))
    for v, codes in zip(node.results, options.results):
        if written[v] or work.writes_narrow[v]:
            size = (graph.values[v].itemsize if written[v] else 2.0) * work.streamed[v]
            moved += layouts.local_bytes(graph.values[v].shape, size, codes, machine.shape)
    if work.fused[node.index]:
        moved += work.read_bytes[node.index] / options.splits
    else:
        operands = list(zip(node.operands, options.operands))
        if node.name in _PARTIAL_READERS:
            moved, operands = 2 * moved, operands[1:]
        for u, codes in operands:
            value = graph.values[graph.uses[u].value]
            if _is_read(graph, written, u):
                size = value.itemsize * work.streamed[value.index]
                moved += layouts.local_bytes(value.shape, size, codes, machine.shape)
    if node.name not in CONTRACTIONS:
        time_s = compute_time_s(machine.device, 0.0, node.dtype or "float32", moved)
    else:
        flops, dims = node.flops / options.splits, _matmul_dims(graph, node, options, machine)
        kind = "convolution" if node.name == "conv_general_dilated" else "matmul"
        time_s = compute_time_s(machine.device, flops, node.dtype or "float32", moved, dims, kind)
    return np.maximum(time_s - work.hidden_s[node.index] / math.prod(machine.shape), 0.0)


def _matmul_dims(graph, node: Node, options: Strategies, machine: Machine) -> np.ndarray:
    """(m, k, n) of the matmul that a device computes, by strategy `[S, 3]`. Batched ones are one after another on a
    CPU, and one with as many times the rows elsewhere."""
    rule = graph.rules[node.rule]
    sides = (*rule.operands[:2], ())[:2]  # a literal operand is a scalar
    left, right, kept = (frozenset(f for dim in dims for f in dim) for dims in (*sides, rule.results[0]))
    splits = options.choice[..., None] == np.arange(len(rule.sizes))  # [S, axes, factors]
    parts = np.where(splits, np.asarray(machine.shape)[:, None], 1).prod(axis=1)
    local = np.asarray(rule.sizes, np.float64) / parts

    def product(factors: frozenset[int]) -> np.ndarray:
        return local[:, sorted(factors)].prod(axis=1)

    columns, batch = product((right & kept) - left), product(left & right & kept)
    result = np.prod(graph.values[node.results[0]].shape, dtype=float) / parts[:, sorted(kept)].prod(axis=1)
    depth = node.flops / options.splits / (2 * np.maximum(result, 1.0))
    rows = result / columns / (batch if machine.device.platform == "cpu" else 1.0)
    return np.stack([rows, depth, columns], axis=-1)


def _reshard_matrix(shell: ClassProblem, kind: ArcKind, arc: Arc, cache: dict) -> np.ndarray:
    """Reshard times `[n, m]`; computed once per pair of distinct layout sets and size."""
    before, after = shell.given(arc), shell.wanted(arc)
    hidden = lowering.hidden_share(shell.machine.device.platform) if kind.beside else 0.0
    q, column = layouts.unique(after)
    ring = shell.rings.get(kind.source) if arc.result >= 0 else None
    if ring is not None:
        cost = reshard_time_s(kind.full_bytes, before, q, shell.machine, hidden=hidden, ring=ring)
        return cost[:, column]
    p, row = layouts.unique(before)
    pair = (p.tobytes(), q.tobytes(), p.shape, q.shape)
    if pair not in cache:
        cache[pair] = applying_steps(p, q, shell.machine)
    key = (kind.full_bytes, pair, hidden)
    if key not in cache:
        cache[key] = reshard_time_s(kind.full_bytes, p, q, shell.machine, cache[pair], hidden=hidden)
    return cache[key][np.ix_(row, column)]
