"""What the compiler keeps in memory: which values are written out, and which live only inside fusions.

A model of XLA's fusion. What a contraction, a reduction, a gather or the like makes is written out, and so is what they
read. Elementwise work between is done where it is read, again in every reader, as long as that moves fewer bytes than
writing it once would:

    written  <=>  n * sources > sources + (1 + n) * own     (bytes of it and of its written sources; n reading fusions)

So the backward pass makes exp(x) again from x rather than keeping it, but sums of many tensors are kept. Compiled TPU
programs agree (a GPT keeps scores and probabilities, the inputs and outputs of its GELUs, and nothing else of them).
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import lowering
from .graph import CONTRACTIONS, Graph, Node, Use, Value

# Operations that XLA fuses into what reads them. Everything else writes its result out.
FUSIBLE = frozenset("""
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim cbrt ceil clamp complex
conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt
imag integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or pad pow
random_wrap random_unwrap real reduce_precision rem reshape rev round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh slice sqrt square squeeze stop_gradient sub tan tanh xor
random_bits threefry2x32 one_minus_square optimization_barrier sharding_constraint transpose
""".split())
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
# These read fused producers but write their own result.
_READS_FUSED = FUSIBLE | REDUCTIONS | {"gather", "dynamic_slice"}
# No fusion reads more arrays than this, and more reading fusions than this are counted as so many.
MOST = 64
# Rounds in which what is written and what reads it are found together.
ROUNDS = 2
# A contraction makes an operand where it reads it if that meets at most so many columns of the other operand: it is not
# worth making in advance what one pass of the matrix unit uses up (heads of up to 256; layers are wider).
FEW_COLUMNS = 256
# These write their result over their first operand, if nothing else reads that.
_IN_PLACE = frozenset("scatter scatter_add scatter_mul scatter_min scatter_max dynamic_update_slice".split())
# XLA:CPU does not compute these again.
EXPENSIVE = frozenset("""
acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 lgamma log log1p
logistic pow rem rsqrt sin sinh sqrt tan tanh random_bits threefry2x32
""".split())


@dataclass(frozen=True)
class Fusions:
    """By value: whether it is written to memory, and which written values are read to make it."""

    written: np.ndarray  # bool [values]
    sources: tuple[frozenset[int], ...]


def fusions_of(graph: Graph, platform: str) -> Fusions:
    narrow_only = [narrowed_only(graph, value.index) for value in graph.values]
    lanes = lowering.TILES.get(platform, (1, 1))[1]
    absorbs = np.array([platform == "tpu" and _absorbs(graph, use) for use in graph.uses], bool)
    must = np.array([_is_written_anyway(graph, value, narrow_only, absorbs) or _is_laid_anew(graph, value, lanes)
                     for value in graph.values], bool)
    written = must
    for _ in range(ROUNDS):  # what is written decides how many fusions read the rest, and the other way round
        sources, written = _decide(graph, _num_fusions(graph, written), must, narrow_only, platform)
    return Fusions(written, sources)


def _is_laid_anew(graph: Graph, value: Value, lanes: int) -> bool:
    """Whether a reshape moves its elements: where lines of memory hold `lanes` of them, one that makes last dims of
    another size, and not of whole lines."""
    node = graph.nodes[value.producer]
    if node.name != "reshape" or lanes == 1 or not node.operands or not value.shape:
        return False
    before, after = graph.values[graph.uses[node.operands[0]].value].shape, value.shape
    return bool(before) and before[-1] != after[-1] and (before[-1] % lanes != 0 or after[-1] % lanes != 0) \
        and 1 not in (before[-1], after[-1])


def _absorbs(graph: Graph, use: Use) -> bool:
    """Whether a contraction makes an operand itself where it reads it: it needs each element a few times only."""
    node = graph.nodes[use.node]
    if node.name not in CONTRACTIONS or node.name.startswith("conv") or use.operand > 1:
        return False
    rule = graph.rules[node.rule]
    own, kept = ({f for dim in dims for f in dim} for dims in (rule.operands[use.operand], rule.results[0]))
    return np.prod([rule.sizes[f] for f in kept - own], dtype=float) <= FEW_COLUMNS


def _is_written_anyway(graph: Graph, value: Value, narrow_only: list[bool], absorbs: np.ndarray) -> bool:
    producer = graph.nodes[value.producer]
    if producer.kind == "narrow":
        wide = graph.uses[producer.operands[0]].value
        return narrow_only[wide] and not (absorbs[list(graph.uses_of[value.index])].all()
                                          and is_fusible(graph, graph.nodes[graph.values[wide].producer]))
    if producer.kind == "op" and narrow_only[value.index]:
        return False
    if not is_fusible(graph, producer):
        return True
    return bool(graph.uses_of[value.index]) and not _is_broadcast(graph, producer, value) \
        and _leaves_fusions(graph, value, absorbs)


def is_fusible(graph: Graph, node: Node) -> bool:
    return node.kind == "op" and (node.name in FUSIBLE or _is_one_hot(graph, node))


def _is_one_hot(graph: Graph, node: Node) -> bool:
    """A scatter into zeros of one element per row, as the gradient of `take_along_axis` is: XLA selects instead."""
    if node.name.replace("-", "_") != "scatter_add" or len(node.operands) < 2:
        return False
    zeros, updates = (graph.values[graph.uses[u].value] for u in (node.operands[0], node.operands[-1]))
    rows = [size for size in updates.shape if size > 1]
    return graph.nodes[zeros.producer].name in ("broadcast_in_dim", "constant") and any(
        rows == [size for d, size in enumerate(zeros.shape) if d != dim and size > 1]
        for dim in range(len(zeros.shape)))


def _num_fusions(graph: Graph, written: np.ndarray) -> list[int]:
    """By value, how many fusions (or other operations) read it, itself or in what is made of it."""
    count = [0] * len(graph.values)
    for value in reversed(graph.values):
        for number in graph.uses_of[value.index]:
            reader = graph.nodes[graph.uses[number].node]
            inside = [v for v in reader.results if not written[v]] if reader.kind in ("op", "narrow") else []
            count[value.index] = min(count[value.index] + max(1, sum(count[v] for v in inside)), MOST)
    return count


def _decide(graph: Graph, count: list[int], must: np.ndarray, narrow_only: list[bool], platform: str
            ) -> tuple[tuple[frozenset[int], ...], np.ndarray]:
    """(written values that are read to make each value, whether each is written)."""
    size = [np.prod(value.shape, dtype=float) * value.itemsize for value in graph.values]
    written = must.copy()
    dear = np.zeros(len(graph.values), bool)  # has work in it that XLA:CPU does not do again
    sources: list[frozenset[int]] = []
    for value in graph.values:
        v, producer = value.index, graph.nodes[value.producer]
        operands = [graph.uses[u].value for u in producer.operands]
        sources.append(frozenset().union(*(sources[o] if not written[o] else {o} for o in operands)))
        narrows = producer.kind == "narrow" and narrow_only[operands[0]]
        if written[v] or not (producer.kind == "op" or narrows) or narrow_only[v] or not count[v] \
                or _is_broadcast(graph, producer, value):
            continue
        every = sum(size[o] for o in sources[v])
        dear[v] = producer.name in EXPENSIVE or any(dear[o] and not written[o] for o in operands)
        written[v] = len(sources[v]) > MOST or count[v] * every > every + (1 + count[v]) * size[v] or (
            platform == "cpu" and bool(dear[v]) and count[v] > 1)
    return tuple(sources), written


def _leaves_fusions(graph: Graph, value: Value, absorbs: np.ndarray) -> bool:
    """Whether something reads a value that is no elementwise work, or is done more often, or behind a barrier."""
    if value.index in graph.barred:
        return True
    producer = graph.nodes[value.producer]
    readers = [graph.nodes[graph.uses[u].node] for u in graph.uses_of[value.index] if not absorbs[u]]
    return any(r.region != producer.region or not (is_fusible(graph, r) or r.kind == "op" and r.name in _READS_FUSED)
               for r in readers)


def overwrites(graph: Graph, fusions: Fusions, value: Value, last: list[int]) -> bool:
    """Whether a value takes the place of one that is read there for the last time."""
    producer = graph.nodes[value.producer]
    if producer.kind != "op":
        return False
    if is_fusible(graph, producer):
        candidates = fusions.sources[value.index]
    elif producer.name.replace("-", "_") in _IN_PLACE:
        candidates = {graph.uses[producer.operands[0]].value}
    else:
        return False
    sources = (graph.values[v] for v in candidates if fusions.written[v] and last[v] == producer.position)
    return any(source.shape == value.shape and source.itemsize >= value.itemsize
               and graph.nodes[source.producer].kind != "input" for source in sources)


def last_reads(graph: Graph, written: np.ndarray) -> list[int]:
    """By value, the last position at which it is read; reads in a loop last until its end, and what a fusion reads is
    read where the fusion is. -1: never."""
    last = [-1] * len(graph.values)
    for value in reversed(graph.values):
        outside = graph.nodes[value.producer].region
        for number in graph.uses_of[value.index]:
            reader = graph.nodes[graph.uses[number].node]
            inside = [region for region in reader.region if region not in outside]
            end = graph.region_ends[inside[0]] if inside else reader.position
            if reader.kind in ("op", "narrow"):
                end = max([end, *(last[v] for v in reader.results if not written[v])])
            last[value.index] = max(last[value.index], end)
    return last


def narrowed_only(graph: Graph, value: int) -> bool:
    """Whether a value is read through one narrow node alone: what makes it then writes it narrow."""
    uses = graph.uses_of[value]
    return len(uses) == 1 and graph.nodes[graph.uses[uses[0]].node].kind == "narrow" \
        and graph.nodes[graph.values[value].producer].kind == "op"


def _is_broadcast(graph: Graph, producer, value) -> bool:
    """Constants and broadcasts of something smaller are made again wherever they are read."""
    if producer.name not in ("broadcast_in_dim", "iota"):
        return False
    return all(np.prod(graph.values[graph.uses[u].value].shape) < np.prod(value.shape) for u in producer.operands)
