"""The layouts that people write by hand, as restrictions of the same choice problem.

Each mesh axis plays one part: `data` (the batch is split, the state is whole), `fsdp` (the batch and the state
are split; ZeRO-3: S. Rajbhandari et al., 2020), `tensor` (weights are split and used split, the batch is not;
Megatron: M. Shoeybi et al., 2019), or `free`. A restriction only forbids strategies, so whatever is best
without it is never worse. Where a part is impossible (a dim that does not divide), it is not asked for.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
import math

import numpy as np

from .folding import Folded
from .fusion import FUSIBLE
from .layouts import WHOLE
from .problem import ClassProblem
from .strategies import NONE
from .trace import Trace

# State leaves smaller than this many elements per device of the axis are left whole by hand-written FSDP.
SMALL = 128


@dataclass(frozen=True)
class Roles:
    """What each input is: "state" or "batch" or "input", and which factor of each node carries the batch."""

    inputs: tuple[str, ...]
    batch_factor: dict[int, int]  # by node
    weight_operands: dict[int, tuple[int, ...]]  # by node: operands that are matrices of the state


def roles_of(folded: Folded, trace: Trace) -> Roles:
    inputs = input_roles(trace)
    return Roles(inputs, _batch_factors(folded, trace, inputs), _weight_operands(folded, inputs))


def input_roles(trace: Trace) -> tuple[str, ...]:
    """State: what comes back, and its neighbours in the same argument. Batch: the other arrays with a leading
    dim. A step that returns no state has its largest argument as state (inference)."""
    def argument(path: str) -> str:
        return path.split(".")[0].split("[")[0]

    paired = {i for i, _ in trace.state_pairs}
    states = {argument(trace.inputs[i].path) for i in paired}
    if not states:
        size: Counter = Counter()
        for leaf in trace.inputs:
            size[argument(leaf.path)] += math.prod(leaf.shape)
        states = {max(size, key=size.get)} if len(size) > 1 else set()
    return tuple("state" if i in paired or argument(leaf.path) in states or leaf.path.startswith("closure")
                 else "batch" if leaf.shape and np.issubdtype(_plain(leaf.dtype), np.generic) else "input"
                 for i, leaf in enumerate(trace.inputs))


def _plain(dtype):
    """The dtype, or object for typed keys, which are no batch."""
    return dtype if isinstance(dtype, np.dtype) else np.dtype(object) if "key" in str(dtype) else np.dtype(dtype)


def batched_inputs(trace: Trace, inputs: Sequence[str]) -> list[int]:
    """The batch inputs whose leading dim is the batch: the size that most of them have there."""
    leading = Counter(leaf.shape[0] for leaf, role in zip(trace.inputs, inputs) if role == "batch" and leaf.shape)
    size = leading.most_common(1)[0][0] if leading else None
    return [i for i, (leaf, role) in enumerate(zip(trace.inputs, inputs))
            if role == "batch" and leaf.shape and leaf.shape[0] == size]


def _batch_factors(folded: Folded, trace: Trace, inputs: Sequence[str]) -> dict[int, int]:
    """Follows the batch from the batch inputs' leading dims through the factors."""
    graph = folded.graph
    carries = {graph.nodes[graph.inputs[i]].results[0]: {0} for i in batched_inputs(trace, inputs)}
    factor: dict[int, int] = {}
    for _ in range(2):  # a second round carries it around loops
        for node in graph.nodes:
            rule = graph.rules[node.rule]
            for k, number in enumerate(node.operands):
                for dim in carries.get(graph.uses[number].value, ()):
                    if rule.operands[k][dim] and node.index not in factor:
                        factor[node.index] = rule.operands[k][dim][0]
            if node.index in factor:
                for value, dims in zip(node.results, rule.results):
                    found = {d for d, f in enumerate(dims) if f and f[0] == factor[node.index]}
                    carries.setdefault(value, set()).update(found)
    return factor


def _weight_operands(folded: Folded, inputs: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Which operands of each node are matrices of the state, looking through casts and the like."""
    graph = folded.graph
    weights = {graph.nodes[n].results[0] for n, role in zip(graph.inputs, inputs) if role == "state"
               and len(graph.values[graph.nodes[n].results[0]].shape) >= 2}
    out: dict[int, tuple[int, ...]] = {}
    for node in graph.nodes:
        reads = tuple(k for k, u in enumerate(node.operands) if graph.uses[u].value in weights)
        if not reads or node.kind not in ("op", "slice", "narrow"):
            continue
        alone = len(node.operands) == 1
        if node.kind in ("slice", "narrow") or (alone and node.name in FUSIBLE):
            weights.update(node.results)
        elif node.name not in FUSIBLE:
            out[node.index] = reads
    return out


def restrict(shell: ClassProblem, roles: Roles, parts: Sequence[str]) -> list[np.ndarray]:
    """Which strategies of each class play the `parts` of the axes; bool `[S]` per class."""
    graph = shell.folded.graph
    role_of_input = dict(zip(graph.inputs, roles.inputs))
    out = []
    for c, members in enumerate(shell.folded.members):
        options = shell.strategies[c]
        mask = np.ones(len(options), bool)
        first = members[0]
        if first >= len(graph.nodes):
            out.append(mask)
            continue
        kind = graph.nodes[first].kind
        for axis, part in enumerate(parts):
            if part == "free":
                continue
            if kind == "input":
                wish = _input_wish(shell, options, axis, part, role_of_input[first], first)
            elif kind == "op":
                wish = _op_wish(shell, roles, options, axis, part, members)
            else:
                continue
            if (mask & wish).any():
                mask &= wish
        out.append(mask)
    return out


def _input_wish(shell, options, axis: int, part: str, role: str, node: int) -> np.ndarray:
    code = options.results[0][:, axis]
    shape = shell.folded.graph.values[shell.folded.graph.nodes[node].results[0]].shape
    if role == "batch":
        return code == (0 if part in ("data", "fsdp") else WHOLE)
    if role != "state" or part == "data":
        return code == WHOLE
    large = math.prod(shape) >= SMALL * shell.machine.shape[axis]
    if part == "fsdp":
        return code >= 0 if large else code == WHOLE
    return code >= 0 if large and len(shape) >= 2 else np.ones(len(code), bool)


def _op_wish(shell, roles: Roles, options, axis: int, part: str, members) -> np.ndarray:
    choice = options.choice[:, axis]
    batch = next((roles.batch_factor[m] for m in members if m in roles.batch_factor), None)
    if part in ("data", "fsdp"):
        if batch is not None:
            return choice == batch
        return choice <= NONE if part == "data" else np.ones(len(choice), bool)
    wish = np.ones(len(choice), bool) if batch is None else choice != batch
    reads = roles.weight_operands.get(members[0], ()) if batch is not None else ()
    rule = shell.folded.graph.rules[shell.folded.graph.nodes[members[0]].rule]
    for k in reads:
        factors = [f for dim in rule.operands[k] for f in dim if f != batch]
        wish &= np.isin(choice, factors)
    return wish


def named_parts(num_axes: int) -> dict[str, tuple[str, ...]]:
    """The classic layouts of a mesh with `num_axes` axes, by name."""
    named = {name: (name,) * num_axes for name in ("data", "fsdp")}
    if num_axes >= 3:
        named["data x fsdp x tensor"] = ("data",) * (num_axes - 2) + ("fsdp", "tensor")
    if num_axes >= 2:
        for first in ("data", "fsdp"):
            named[f"{first} x tensor"] = (first,) * (num_axes - 1) + ("tensor",)
    named["tensor"] = ("tensor",) * num_axes
    return named
