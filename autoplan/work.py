"""How much moves through memory, operation by operation, once the compiler has fused the step."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cost_models import DeviceSpec, compute_time_s
from .fusion import REDUCTIONS, Fusions, is_fusible, narrowed_only
from .graph import CONTRACTIONS, Graph, Value


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
    fused = np.array([is_fusible(graph, n) or n.kind == "op" and n.name in REDUCTIONS for n in graph.nodes], bool)
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
        whole[value.index] = waits or node.name in REDUCTIONS
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
