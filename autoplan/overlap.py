"""What can run at the same time: gathers beside contractions, and pending sums that go around while they are computed.

Which of it a platform does is said in `lowering`; here is what the program allows.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from . import lowering
from .folding import TO_STATE, TO_VIEW, Arc
from .graph import CONTRACTIONS, Graph, Node
from .reshard import Machine, Ring
from .rules import Dims
from .strategies import NONE, Strategies


def beside_contractions(graph: Graph, arcs: Sequence[Arc]) -> np.ndarray:
    """Whether a gather along each arc can run beside contractions, bool `[arcs]`.

    So can one of what depends on no contraction, if there is one before its first reader; and that of a new state, if
    there is one after it is made. Both are asked of the innermost loop body that the gather is in.
    """
    late = np.zeros(len(graph.values), bool)  # depends on a contraction, or on an earlier round of a loop
    for value in graph.values:
        node = graph.nodes[value.producer]
        own = node.name in CONTRACTIONS or node.kind == "carry"
        late[value.index] = own or any(late[graph.uses[u].value] for u in node.operands)
    positions: dict[tuple[int, ...], list[int]] = {}
    for node in sorted(graph.nodes, key=lambda node: node.position):
        for depth in range(len(node.region) + 1) if node.name in CONTRACTIONS else ():
            positions.setdefault(node.region[:depth], []).append(node.position)

    def hides(arc: Arc) -> bool:
        producer = graph.nodes[graph.values[arc.value].producer]
        if arc.operand == TO_STATE:
            within = positions.get(producer.region, [])
            return bool(within) and within[-1] > producer.position
        if late[arc.value]:
            return False
        readers = list(graph.readers_of(arc.value)) if arc.operand == TO_VIEW else [graph.nodes[arc.target]]
        first = min(readers, key=lambda node: node.position, default=producer)
        return bisect_left(positions.get(first.region, []), first.position) > 0

    return np.array([hides(arc) for arc in arcs], bool)


def ring_of(graph: Graph, node: Node, options: Strategies, machine: Machine, compute_s: np.ndarray) -> Ring | None:
    """Where the compiler passes the pending sum of a contraction around; None if it never does."""
    intensity = lowering.RING_INTENSITY.get(machine.device.name)
    if intensity is None or node.name not in ("dot_general", "conv_general_dilated"):
        return None
    value, rule = graph.values[node.results[0]], graph.rules[node.rule]
    if len(rule.operands) < 2 or node.flops < intensity * np.prod(value.shape, dtype=float) * value.itemsize:
        return None
    left, right = (_factors(dims) for dims in rule.operands[:2])
    kept = _factors(rule.results[0])
    if any(rule.sizes[f] > 1 for f in left & right & kept):
        return None
    shares = np.asarray(machine.shape) > 1
    reduces = np.isin(options.choice, list(rule.reduction))
    idle = ((options.choice == NONE) & shares).any(axis=1)
    taken = {side: np.isin(options.choice, list(side & kept)).any(axis=1) for side in (left, right)}
    dims = np.zeros((len(options), len(value.shape)), bool)
    for d, factors in enumerate(rule.results[0]):
        own = left if set(factors) <= left else right
        dims[:, d] = reduces.any(axis=1) & ~idle & ~taken[own]
    return Ring(dims, compute_s) if dims.any() else None


def _factors(dims: Dims) -> frozenset[int]:
    return frozenset(f for dim in dims for f in dim)
