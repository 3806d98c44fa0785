"""What the compiler keeps in memory: which values are written out, and which live only inside a fusion.

A first model of XLA's fusion: cheap elementwise work is computed where it is read. A value is written out if
a heavy operation makes it or reads it, if it leaves the step or a loop body, or if it is read again much later
(a residual of the forward pass).
"""
from __future__ import annotations

import numpy as np

from .graph import Graph

# Operations that XLA fuses into what reads them. Everything else writes its result out.
FUSIBLE = frozenset("""
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim cbrt ceil clamp complex
conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt
imag integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or pad pow
random_wrap random_unwrap real reduce_precision rem reshape rev round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh slice sqrt square squeeze stop_gradient sub tan tanh xor
random_bits threefry2x32 one_minus_square optimization_barrier sharding_constraint transpose
""".split())
# Reductions read fused producers but write their own result.
_READS_FUSED = FUSIBLE | frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin reduce_precision".split())
# A fused value that is read this many positions after it was made is kept rather than computed again.
FAR = 40


def written_values(graph: Graph) -> np.ndarray:
    """Whether each value is written to memory; bool `[values]`."""
    written = np.zeros(len(graph.values), bool)
    for value in graph.values:
        producer = graph.nodes[value.producer]
        if producer.kind == "narrow":
            written[value.index] = narrowed_only(graph, graph.uses[producer.operands[0]].value)
            continue
        if producer.kind == "op" and narrowed_only(graph, value.index):
            continue
        if producer.kind != "op" or producer.name not in FUSIBLE:
            written[value.index] = True
            continue
        readers = [graph.nodes[graph.uses[u].node] for u in graph.uses_of[value.index]]
        heavy = any(r.kind not in ("op",) or r.name not in _READS_FUSED for r in readers)
        far = any(r.position - producer.position > FAR for r in readers)
        written[value.index] = bool(readers) and (heavy or far) and not _is_broadcast(graph, producer, value)
    return written


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
