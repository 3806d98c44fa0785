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
from .cost_models import DeviceSpec, compute_time_s
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
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
# These read fused producers but write their own result.
_READS_FUSED = FUSIBLE | _REDUCTIONS | {"gather", "dynamic_slice"}
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
                                          and _is_fusible(graph, graph.nodes[graph.values[wide].producer]))
    if producer.kind == "op" and narrow_only[value.index]:
        return False
    if not _is_fusible(graph, producer):
        return True
    return bool(graph.uses_of[value.index]) and not _is_broadcast(graph, producer, value) \
        and _leaves_fusions(graph, value, absorbs)


def _is_fusible(graph: Graph, node: Node) -> bool:
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
    return any(r.region != producer.region or not (_is_fusible(graph, r) or r.kind == "op" and r.name in _READS_FUSED)
               for r in readers)


def overwrites(graph: Graph, fusions: Fusions, value: Value, last: list[int]) -> bool:
    """Whether a value takes the place of one that is read there for the last time."""
    producer = graph.nodes[value.producer]
    if producer.kind != "op":
        return False
    if _is_fusible(graph, producer):
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


@dataclass(frozen=True)
class Work:
    """What moves through memory, by node, and what of it costs nothing.

    Attributes:
      fused: whether a node is elementwise work or a reduction, which moves `read_bytes` (of whole values) and what it
        writes; one that writes nothing moves nothing, but what it reads is read by the fusion that it ends in.
      hidden_s: seconds of memory traffic, on one device, that hide behind the arithmetic of the contraction into which
        a node is fused.
      writes_narrow: by value, whether it is written as bfloat16 only.
      streamed: by value, the share of its bytes that goes through memory when it is written or read.
    """

    fused: np.ndarray
    read_bytes: np.ndarray
    hidden_s: np.ndarray
    writes_narrow: np.ndarray
    streamed: np.ndarray


def work_of(graph: Graph, fusions: Fusions, device: DeviceSpec, num_devices: int) -> Work:
    """The memory traffic of each node.

    XLA:TPU puts elementwise work and reductions into the contraction whose result they read, or else into the one that
    reads theirs (`_homes`): what they move hides behind its arithmetic as far as that takes longer than its own
    traffic. A value that several operations of one fusion read is read once. Values that fit the chip's own memory
    four times stay there half of the time (counted in programs compiled for v5e and v5p).
    """
    written = fusions.written
    fused = np.array([_is_fusible(graph, n) or n.kind == "op" and n.name in _REDUCTIONS for n in graph.nodes], bool)
    narrow = np.array([_writes_narrow(graph, v.index, written) for v in graph.values], bool)
    homes = _homes(graph, written | narrow, fused) if device.platform == "tpu" else [-1] * len(graph.nodes)
    size = np.array([np.prod(v.shape, dtype=float) * v.itemsize for v in graph.values])
    inner = np.array([_is_intermediate(graph, value) for value in graph.values], bool)
    streamed = np.where(inner & (size <= num_devices * device.on_chip_bytes / 4), 0.5, 1.0)
    size = size * streamed
    read, hidden = np.zeros(len(graph.nodes)), np.zeros(len(graph.nodes))
    slack: dict[int, float] = {}
    seen: dict[int, set[int]] = {}
    for node in sorted(graph.nodes, key=lambda n: n.position):
        if node.name in CONTRACTIONS:
            own = sum(size[graph.uses[u].value] for u in node.operands) + sum(size[v] for v in node.results)
            computing_s = float(compute_time_s(device, node.flops, node.dtype or "float32", 0.0))
            slack[node.index] = computing_s - own / _rate(device)
        writes = [v for v in node.results if written[v] or narrow[v]]
        if not fused[node.index] or not writes:
            continue
        home = homes[node.index]
        inside = seen.setdefault(home, set()) if home >= 0 else set()
        operands = [graph.uses[u].value for u in node.operands]
        sources = frozenset().union(*(({o} if written[o] or narrow[o] else fusions.sources[o]) for o in operands))
        fresh = {v for v in sources if v not in inside and graph.values[v].producer != home}
        inside |= sources | set(writes)
        read[node.index] = sum(size[v] for v in fresh)
        if home >= 0:
            moved = read[node.index] + sum(size[v] * (0.5 if narrow[v] else 1.0) for v in writes)
            hidden[node.index] = min(moved / _rate(device), max(slack.get(home, 0.0), 0.0))
            slack[home] = slack.get(home, 0.0) - hidden[node.index]
    return Work(fused, read, hidden, narrow, streamed)


def _writes_narrow(graph: Graph, value: int, written: np.ndarray) -> bool:
    if written[value] or not narrowed_only(graph, value):
        return False
    return bool(written[graph.nodes[graph.uses[graph.uses_of[value][0]].node].results[0]])


def _is_intermediate(graph: Graph, value: Value) -> bool:
    """Whether a value is made by an operation, and is no result of the step."""
    readers = (graph.nodes[graph.uses[number].node] for number in graph.uses_of[value.index])
    return graph.nodes[value.producer].kind in ("op", "narrow") and all(r.kind != "output" for r in readers)


def _rate(device: DeviceSpec) -> float:
    return device.memory_bytes_per_s * device.memory_efficiency


def _homes(graph: Graph, kept: np.ndarray, fused: np.ndarray) -> list[int]:
    """By node, the contraction into which it is fused, or -1: the last whose result it is made of without waiting for a
    reduction, else the first that reads what it makes. Both run as often as it does."""
    homes = [-1] * len(graph.nodes)
    after = [-1] * len(graph.values)  # the contraction in whose fusion a value is at hand
    whole = [False] * len(graph.values)  # is, or is made of, the result of a reduction
    for value in graph.values:
        node = graph.nodes[value.producer]
        if node.name in CONTRACTIONS:
            after[value.index] = homes[node.index] = node.index
        if not fused[node.index]:
            continue
        operands = [graph.uses[u].value for u in node.operands]
        waits = any(whole[o] for o in operands)
        found = [after[o] for o in operands if after[o] >= 0 and graph.nodes[after[o]].region == node.region]
        whole[value.index] = waits or node.name in _REDUCTIONS
        if found and not waits:
            homes[node.index] = max(found, key=lambda n: graph.nodes[n].position)
            after[value.index] = -1 if whole[value.index] else homes[node.index]
    before = [-1] * len(graph.values)  # the contraction whose fusion makes a value
    for value in reversed(graph.values):
        node = graph.nodes[value.producer]
        for number in graph.uses_of[value.index]:
            reader = graph.nodes[graph.uses[number].node]
            if reader.kind == "narrow":
                found = before[reader.results[0]]
            elif reader.name in CONTRACTIONS:
                found = reader.index
            else:
                found = before[reader.results[0]] if fused[reader.index] and reader.results else -1
            if found >= 0 and graph.nodes[found].region == node.region:
                before[value.index] = found  # uses are in program order; the first wins below
                break
        if fused[node.index] and homes[node.index] < 0:
            homes[node.index] = before[value.index]
    return homes
