"""What users ask for themselves: layouts of arguments and results, constraints inside the step, `shard_map` regions.

A pin is kept, or refused with its reason. Of a constraint inside the step, a dim that its axes do not divide is left to
the planner, and a note of the plan says so, as `jax.jit` would replicate it without a word.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import math

import jax
import numpy as np

from . import layouts
from .compat import Spec
from .errors import PinError, check_divisible
from .folding import Folded
from .graph import Graph, Node
from .reshard import Machine
from .strategies import NONE, Strategies, enumerate_strategies, layout_strategies
from .trace import Leaf, Trace

Allowed = dict[int, Callable[[np.ndarray], np.ndarray]]


def pins_possible(trace: Trace, names: Sequence[str], fixed: bool) -> bool:
    """Whether a mesh with these axes has all that the pins name; a fixed mesh must, others are passed over."""
    used = {axis for leaf in (*trace.inputs, *trace.outputs) if leaf.spec is not None for entry in leaf.spec
            for axis in ((entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ())}
    return fixed or used <= set(names)


def pinned_leaves(trace: Trace, graph: Graph, machine: Machine, names: Sequence[str]) -> Allowed:
    """By node of a pinned argument or result, which layouts `[n, axes]` its pin allows.

    Raises:
      PinError: the mesh cannot do it.
    """
    nodes = [*graph.inputs, *(graph.uses[use].node if use >= 0 else -1 for use in graph.outputs)]
    allowed: Allowed = {}
    for leaf, node in zip((*trace.inputs, *trace.outputs), nodes, strict=True):
        if leaf.spec is not None and node >= 0:
            check_divisible(leaf.path, leaf.shape, leaf.dtype, leaf.spec, dict(zip(names, machine.shape)), PinError,
                            trace.source)
            allowed[node] = _matcher(_of_leaf(leaf), tuple(names), path=leaf.path, shape=leaf.shape, dtype=leaf.dtype)
    return allowed


def wanted_strategies(graph: Graph, machine: Machine, names: Sequence[str]) -> dict[int, Strategies]:
    """By node that stands for a constraint or a `shard_map` of the program, its strategies.

    Raises:
      PinError: axes split a dim in another than the mesh's order, or the mesh has no such axes.
    """
    found = {}
    for node in graph.nodes:
        if node.wanted is None:
            continue
        operands = [graph.values[graph.uses[u].value].shape for u in node.operands]
        results = [graph.values[v].shape for v in node.results]
        if node.name == "sharding_constraint":
            codes = layouts.all_layouts(results[0], machine.shape)
            spec = _dividing(node.wanted.results[0], results[0], dict(zip(names, machine.shape)))
            match = _matcher(spec, tuple(names), source=node.source, shape=results[0])
            found[node.index] = layout_strategies(codes[match(codes)], len(operands), 1, machine.shape)
        else:
            found[node.index] = _in_one_way(node, [*operands, *results], machine, tuple(names))
    return found


def left_whole(folded: Folded, lines: frozenset[str], axis_sizes: Sequence[int]) -> dict[int, Strategies]:
    """By the first node of each class with an operation of these lines ("file:line"), its one strategy: unsplit. What
    the program lays out itself is not among them."""
    graph, found = folded.graph, {}
    for members in folded.members:
        own = [graph.nodes[m] for m in members if m < len(graph.nodes)]
        if any(n.kind == "op" and n.wanted is None and n.source.partition(" ")[0] in lines for n in own):
            rule = graph.rules[own[0].rule]
            found[own[0].index] = enumerate_strategies(rule, axis_sizes, carry=False).keep(np.array([0]))
    return found


def _in_one_way(node: Node, shapes: Sequence[tuple[int, ...]], machine: Machine, names: tuple[str, ...]) -> Strategies:
    """The strategy of a `shard_map`: all devices work on what its specs give them."""
    specs = (*node.wanted.operands, *node.wanted.results)
    codes = [np.array([_layout(spec, names, source=node.source, shape=shape)], np.int8)
             for spec, shape in zip(specs, shapes, strict=True)]
    count = len(node.operands)
    return Strategies(np.full((1, len(names)), NONE, np.int16), tuple(codes[:count]), tuple(codes[count:]),
                      np.array([math.prod(machine.shape)], np.int64))


def undivided(graph: Graph, sizes: dict[str, int]) -> Iterator[str]:
    """Notes on the constraints of the program that ask for what does not divide."""
    for node in graph.nodes:
        if node.wanted is None or node.name != "sharding_constraint":
            continue
        spec, shape = node.wanted.results[0], graph.values[node.results[0]].shape
        for dim, (asked, kept) in enumerate(zip(spec, _dividing(spec, shape, sizes))):
            if asked != kept:
                ways = math.prod(sizes[axis] for axis in asked)
                yield (f"the constraint at {node.source or '?'} is not kept in dim {dim}: its size {shape[dim]} is no "
                       f"multiple of the {ways} ways of {', '.join(asked)}; pad it to {-(-shape[dim] // ways) * ways}")


def _dividing(spec: Spec, shape: Sequence[int], sizes: dict[str, int]) -> Spec:
    """A spec with dims that it would split unevenly left free."""
    return tuple(None if entry and size % math.prod(sizes.get(axis, 1) for axis in entry) else entry
                 for entry, size in zip(spec, shape))


def _of_leaf(leaf: Leaf) -> Spec:
    entries = [*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec))]
    return tuple(None if e is jax.sharding.PartitionSpec.UNCONSTRAINED else
                 () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def _layout(spec: Spec, names: tuple[str, ...], **where) -> layouts.Layout:
    """The layout of a spec, free dims left whole."""
    for entry in spec:
        if missing := [axis for axis in entry or () if axis not in names]:
            raise PinError("a layout names axes of the mesh", got=f"{missing} on a mesh of {', '.join(names)}",
                           action="Pass the mesh that the step names as `cluster=`", **where)
        order = [names.index(axis) for axis in entry or ()]
        if order != sorted(order):
            raise PinError("axes that split one dim together must be in the mesh's order", got=str(entry),
                           action=f"Write them as {tuple(names[i] for i in sorted(order))}", **where)
    return layouts.from_spec(spec, names)


def _matcher(spec: Spec, names: tuple[str, ...], **where) -> Callable[[np.ndarray], np.ndarray]:
    fixed = _layout(spec, names, **where)
    free = [dim for dim, entry in enumerate(spec) if entry is None]

    def match(codes: np.ndarray) -> np.ndarray:
        good = np.ones(len(codes), bool)
        for axis, code in enumerate(fixed):
            good &= (codes[:, axis] == code) | ((code < 0) & np.isin(codes[:, axis], free))
        return good

    return match
