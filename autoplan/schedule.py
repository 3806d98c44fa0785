"""When operations run: program order, but for updates, which run as soon as they can.

A traced step has all gradients first and the optimizer's updates after. XLA schedules for memory: the gradient of a
weight, and what is made of it on the way into a donated state, runs when its operands are there, so that not all
gradients are held at once (unless something needs them all, as clipping by the global norm does).
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .graph import Graph

NOWHERE = -1


def updates_first(graph: Graph, unit_of: Sequence[int], in_place: Collection[int]) -> Graph:
    """The graph with the positions of its nodes in the order in which XLA would run them.

    Args:
      unit_of: by node, the equation of the program to which it belongs, loops with all that is in them, numbered in
        program order; NOWHERE for inputs, constants and outputs.
      in_place: uses by which outputs take the place of inputs.
    """
    count = max(unit_of, default=NOWHERE) + 1
    readers: list[set[int]] = [set() for _ in range(count)]
    leaves, reach = [False] * count, [0] * count  # reach: the set of outputs that a unit leads to, as bits
    number_of = {use: k for k, use in enumerate(graph.outputs)}
    for value in graph.values:
        unit = unit_of[value.producer]
        for number in graph.uses_of[value.index] if unit != NOWHERE else ():
            reader = unit_of[graph.uses[number].node]
            if reader == NOWHERE:
                leaves[unit] |= number not in in_place
                reach[unit] |= 1 << number_of[number]
            elif reader != unit:
                readers[unit].add(reader)
    eager = [False] * count
    for unit in reversed(range(count)):
        eager[unit] = not leaves[unit] and all(eager[reader] for reader in readers[unit])
        for reader in readers[unit]:
            reach[unit] |= reach[reader]
    return _placed(graph, unit_of, _order(readers, eager, [bits.bit_count() for bits in reach]))


def _order(readers: Sequence[set[int]], eager: Sequence[bool], reach: Sequence[int]) -> list[int]:
    """Program order, but for eager units, which run when the last of their operands is there, those that lead to the
    fewest outputs first; those that need nothing but inputs run just before the first that reads them."""
    operands: list[list[int]] = [[] for _ in readers]
    for unit, found in enumerate(readers):
        for reader in found:
            operands[reader].append(unit)
    lazy = [False] * len(readers)
    for unit in range(len(readers)):
        lazy[unit] = eager[unit] and all(lazy[o] for o in operands[unit])
    missing = [sum(not lazy[o] for o in found) for found in operands]
    order: list[int] = []
    done = [False] * len(readers)
    ready: list[tuple[int, int]] = []

    def run(unit: int) -> None:
        waiting = [unit]
        while waiting:
            unit = waiting[-1]
            if before := [operand for operand in operands[unit] if not done[operand]]:  # lazy ones
                waiting += before
                continue
            waiting.pop()
            if done[unit]:
                continue
            order.append(unit)
            done[unit] = True
            for reader in () if lazy[unit] else readers[unit]:
                missing[reader] -= 1
                if eager[reader] and not missing[reader]:
                    heapq.heappush(ready, (reach[reader], reader))

    for unit in range(len(readers)):
        while ready:
            run(heapq.heappop(ready)[1])
        if not eager[unit]:
            run(unit)
    while ready:
        run(heapq.heappop(ready)[1])
    for unit in range(len(readers)):
        if not done[unit]:
            run(unit)
    return order


def _placed(graph: Graph, unit_of: Sequence[int], order: Sequence[int]) -> Graph:
    positions: dict[int, list[int]] = defaultdict(list)
    for node in graph.nodes:
        positions[unit_of[node.index]].append(node.position)
    for node in graph.nodes:
        if node.region:
            positions[unit_of[node.index]].append(graph.region_ends[node.region[0]])
    first = {unit: min(found) for unit, found in positions.items()}
    shift, next_free = {NOWHERE: 0}, 1
    for unit in order:
        if unit in first:
            shift[unit] = next_free - first[unit]
            next_free += max(positions[unit]) - first[unit] + 1
    nodes = tuple(replace(node, position=node.position + shift[unit_of[node.index]]) for node in graph.nodes)
    ends = list(graph.region_ends)
    for node in graph.nodes:
        for region in node.region:
            ends[region] = graph.region_ends[region] + shift[unit_of[node.index]]
    return replace(graph, nodes=nodes, region_ends=tuple(ends))
