"""How an equation may be partitioned: its factors, read from the partitioner and composed.

A `Rule` is einsum-like: every dim of every operand and result is a list of factors, major first. Splitting
a factor over a mesh axis splits every dim that begins with it; splitting a *reduction* factor leaves the
results as a pending reduction. An equation that lowers to several operations gets the composition of their
rules: factors along shared dims are the same factor.

Operations without a Shardy rule are answered in `_apply`, or all their dims are blocked and the rule says
so (`Rule.unknown`), which the plan reports.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
import math

import jax

from . import compat

Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Rule:
    """Factors of one equation: `sizes[f]`; per operand and result, per dim, factor numbers major first."""

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduction: frozenset[int] = frozenset()
    blocked: frozenset[int] = frozenset()
    unknown: str = ""  # the operation without a rule, for the report
    together: frozenset[int] = frozenset()  # may be split only where no axis is left that splits nothing

    @property
    def elementwise(self) -> bool:
        """Whether every result dim stands in some operand and nothing is reduced or reshaped."""
        if self.reduction or self.blocked or not self.operands:
            return False
        return all(dims == self.results[0] for dims in self.results) and any(
            dims == self.results[0] for dims in self.operands)


def identity(shape: Sequence[int], num_operands: int, num_results: int) -> Rule:
    """All operands and results have the same shape and the same layout."""
    dims = tuple((i,) for i in range(len(shape)))
    return Rule(tuple(shape), (dims,) * num_operands, (dims,) * num_results)


def scan_slice(shape: Sequence[int]) -> Rule:
    """One iteration's slice of a scanned array: the leading dim is not split."""
    dims = tuple((i,) for i in range(len(shape)))
    return Rule(tuple(shape), (dims,), (dims[1:],), blocked=frozenset((0,)))


def scan_stack(shape: Sequence[int]) -> Rule:
    """Iterations' values stacked along a new leading dim, which is not split. `shape` is the result's."""
    dims = tuple((i,) for i in range(len(shape)))
    return Rule(tuple(shape), (dims[1:],), (dims,), blocked=frozenset((0,)))


def replicated(operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], unknown: str) -> Rule:
    """Nothing may be split; `unknown` says why."""
    sizes: list[int] = []

    def dims(shape: Sequence[int]) -> Dims:
        start = len(sizes)
        sizes.extend(shape)
        return tuple((start + i,) for i in range(len(shape)))

    ins, outs = tuple(map(dims, operands)), tuple(map(dims, results))
    return Rule(tuple(sizes), ins, outs, blocked=frozenset(range(len(sizes))), unknown=unknown)


def rules_of(eqns: Sequence[compat.JaxprEqn]) -> list[Rule]:
    """The rule of each equation; operands are the non-literal ones, in order."""
    lowerable = [i for i, eqn in enumerate(eqns) if not eqn.effects and eqn.primitive.name != "shard_map"]
    requests = [(compat.eqn_function(eqns[i]), [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
                                                for v in operands_of(eqns[i])]) for i in lowerable]
    lowered = dict(zip(lowerable, compat.lower_with_rules(requests)))
    return [_rule_of(eqn, lowered.get(i)) for i, eqn in enumerate(eqns)]


def operands_of(eqn: compat.JaxprEqn) -> list[compat.Var]:
    return [v for v in eqn.invars if not isinstance(v, compat.Literal)]


def _rule_of(eqn: compat.JaxprEqn, lowered: compat.LoweredFunction | None) -> Rule:
    operands = [v.aval.shape for v in operands_of(eqn)]
    results = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
    if lowered is None:
        known = compat.wanted_specs(eqn) is not None
        return replicated(operands, results, "" if known else eqn.primitive.name)
    rule = compose(lowered, [len(s) for s in operands], [len(s) for s in results])
    if eqn.primitive.name == "conv_general_dilated":
        return _computed_right(eqn, rule)
    return replace(rule, blocked=rule.blocked | _updated_in_one_place(eqn, rule))


def _updated_in_one_place(eqn: compat.JaxprEqn, rule: Rule) -> set[int]:
    """Factors of the dims along which an update is placed by one index. XLA computes the local index on every device
    and relies on its being clamped: an index out of bounds is lost, and the one update of a scatter (which becomes a
    `dynamic_update_slice`) may be read from another device's part."""
    name, shapes = eqn.primitive.name.replace("-", "_"), [v.aval.shape for v in eqn.invars]
    if name == "dynamic_update_slice":
        placed = [d for d, (whole, part) in enumerate(zip(*shapes[:2])) if whole != part]
    elif name.startswith("scatter") and math.prod(shapes[1][:-1]) == 1:
        placed = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    else:
        placed = ()
    return {f for d in placed for f in rule.results[0][d]}


def _computed_right(eqn: compat.JaxprEqn, rule: Rule) -> Rule:
    """A convolution's rule without what XLA's SPMD partitioner computes wrongly or dies of (tried with jaxlib 0.10.2
    and 0.12.0.1, on every strategy of some fifty convolutions):

    - dims of the window split in a weight gradient: the sum is off by a factor where an axis is left over;
    - the batch of a grouped convolution's weight gradient: likewise, unless every axis splits something;
    - the features of a grouped convolution: wrong values or a failed check in `CreateShardedConvolution`, but for
      the groups of a depthwise one with a window.
    """
    if len(rule.operands) < 2:  # a literal operand: nothing is known about which one is left
        return replace(rule, blocked=frozenset(range(len(rule.sizes))))
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    left, right = rule.operands
    blocked = {f for d in numbers.lhs_spec[2:] for f in left[d]} | {f for d in numbers.rhs_spec[2:] for f in right[d]}
    if params["batch_group_count"] == params["feature_group_count"] == 1:
        return replace(rule, blocked=rule.blocked | blocked)
    batch = set(left[numbers.lhs_spec[1 if params["batch_group_count"] > 1 else 0]])
    groups = _depthwise_factors(eqn, rule)
    blocked |= set(range(len(rule.sizes))) - batch - groups
    return replace(rule, blocked=rule.blocked | blocked, together=rule.reduction - blocked)


def _depthwise_factors(eqn: compat.JaxprEqn, rule: Rule) -> set[int]:
    """The factors of the groups, if there is one group per feature, and a window."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    left, right = (v.aval.shape for v in eqn.invars)
    if params["batch_group_count"] > 1:
        window, dim = eqn.outvars[0].aval.shape, numbers.lhs_spec[0]
        taps = math.prod(window[d] for d in numbers.out_spec[2:])
        alone = params["batch_group_count"] == left[dim] == right[numbers.rhs_spec[0]]
    else:
        taps, dim = math.prod(right[d] for d in numbers.rhs_spec[2:]), numbers.lhs_spec[1]
        alone = params["feature_group_count"] == left[dim] == right[numbers.rhs_spec[0]]
    return set(rule.operands[0][dim]) if alone and taps > 1 else set()


# ---------------------------------------------------------------------------------------------------------
# Composition


@dataclass
class _Factors:
    """Union-find over factors; a factor may be split into an ordered list of parts (major first)."""

    sizes: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    parts: dict[int, list[int]] = field(default_factory=dict)
    reduced: set[int] = field(default_factory=set)
    blocked: set[int] = field(default_factory=set)

    def new(self, size: int) -> int:
        self.sizes.append(size)
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def find(self, factor: int) -> int:
        while self.parent[factor] != factor:
            factor = self.parent[factor]
        return factor

    def leaves(self, factors: Sequence[int]) -> list[int]:
        """The unsplit factors, major first; factors of size one are dropped."""
        out: list[int] = []
        for factor in map(self.find, factors):
            if factor in self.parts:
                out += self.leaves(self.parts[factor])
            elif self.sizes[factor] != 1:
                out.append(factor)
        return out

    def mark(self, factors: Sequence[int], flag: set[int]) -> None:
        flag.update(self.leaves(factors))

    def flagged(self, factor: int, flag: set[int]) -> bool:
        return any(self.find(f) == factor for f in flag)

    def _split(self, factor: int, major: int) -> None:
        parts = [self.new(major), self.new(self.sizes[factor] // major)]
        self.parts[factor] = parts
        for flag in (self.reduced, self.blocked):
            if self.flagged(factor, flag):
                flag.update(parts)

    def unify(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Makes two descriptions of one dim agree; what cannot agree is blocked."""
        while True:
            a, b = self.leaves(left), self.leaves(right)
            clash = next(((x, y) for x, y in zip(a, b) if x != y), None)
            if clash is None:
                if len(a) != len(b):
                    self.mark(a + b, self.blocked)
                return
            x, y = clash
            if self.sizes[x] == self.sizes[y]:
                self.parent[y] = x
            elif self.sizes[x] > self.sizes[y] > 0 and self.sizes[x] % self.sizes[y] == 0:
                self._split(x, self.sizes[y])
            elif self.sizes[y] > self.sizes[x] > 0 and self.sizes[y] % self.sizes[x] == 0:
                self._split(y, self.sizes[x])
            else:
                self.mark(a + b, self.blocked)
                return


_FREE = {"stablehlo.constant", "stablehlo.iota"}
_SAME_BY_POSITION = {"stablehlo.while", "stablehlo.optimization_barrier"}


def compose(function: compat.LoweredFunction, operand_ranks: Sequence[int], result_ranks: Sequence[int]) -> Rule:
    """The rule of a lowered equation from those of its operations.

    Trailing dims that only the lowered form has (the words of a typed PRNG key) are left out.
    """
    factors = _Factors()
    dims: dict[int, list[list[int]]] = {}
    for value in function.arguments:
        dims[value] = [[factors.new(size)] for size in function.shapes[value]]
    unknown = ""
    for op in function.ops:
        unknown = _apply(op, function, factors, dims) or unknown
    rank = dict(zip(function.arguments, operand_ranks))
    return _finish(factors, [dims[v][:rank[v]] for v in function.arguments],
                   [dims[v][:r] for v, r in zip(function.results, result_ranks)], unknown)


def _apply(op: compat.LoweredOp, function, factors: _Factors, dims) -> str:
    """Adds one operation; returns its name if there is no rule for it."""
    for value in op.results:
        dims[value] = [[factors.new(size)] for size in function.shapes[value]]
    if op.rule is not None:
        _apply_rule(op, factors, dims)
        return ""
    if op.name in _FREE:
        return ""
    if op.name in _SAME_BY_POSITION:
        for operand, result in zip(op.operands, op.results):
            _same(factors, dims[operand], dims[result])
        return ""
    if op.name == "chlo.top_k":
        for result in op.results:
            _same(factors, dims[op.operands[0]][:-1], dims[result][:-1])
            factors.mark(dims[result][-1], factors.blocked)
        factors.mark(dims[op.operands[0]][-1], factors.blocked)
        return ""
    shapes = {function.shapes[v] for v in (*op.operands, *op.results)}
    if op.name.startswith("chlo.") and len(shapes) == 1:  # special functions, all elementwise
        for operand in op.operands:
            _same(factors, dims[operand], dims[op.results[0]])
        return ""
    for value in (*op.operands, *op.results):
        for dim in dims[value]:
            factors.mark(dim, factors.blocked)
    return "" if all(s == () for s in shapes) else op.name


def _same(factors: _Factors, left, right) -> None:
    for a, b in zip(left, right, strict=True):
        factors.unify(a, b)


def _apply_rule(op: compat.LoweredOp, factors: _Factors, dims) -> None:
    local = [factors.new(size) for size in op.rule.factor_sizes]
    for value, mapping in (*zip(op.operands, op.rule.operands), *zip(op.results, op.rule.results)):
        for dim, mapped in zip(dims[value], mapping, strict=True):
            factors.unify([local[f] for f in mapped], dim)
    inside = {f for dims_ in op.rule.operands for dim in dims_ for f in dim}
    outside = {f for dims_ in op.rule.results for dim in dims_ for f in dim}
    for f in op.rule.reduction:
        factors.mark([local[f]], factors.reduced)
    # A dim that only one side has is not split there, unless it is reduced or broadcast.
    loose = (inside - outside - set(op.rule.reduction)) | (
        set() if op.name == "stablehlo.broadcast_in_dim" else outside - inside)
    for f in loose:
        factors.mark([local[f]], factors.blocked)
    for f in op.rule.blocked:
        factors.mark([local[f]], factors.blocked)


def _finish(factors: _Factors, operands, results, unknown: str) -> Rule:
    number: dict[int, int] = {}

    def numbered(dim: Sequence[int]) -> tuple[int, ...]:
        return tuple(number.setdefault(f, len(number)) for f in factors.leaves(dim))

    ins = tuple(tuple(map(numbered, dims)) for dims in operands)
    outs = tuple(tuple(map(numbered, dims)) for dims in results)
    reduced = {factors.find(f) for f in factors.reduced}
    blocked = {factors.find(f) for f in factors.blocked}
    in_results = {f for dims in outs for dim in dims for f in dim}
    return Rule(tuple(factors.sizes[f] for f in number), ins, outs,
                frozenset(n for f, n in number.items() if f in reduced and n not in in_results),
                frozenset(n for f, n in number.items() if f in blocked or (f in reduced and n in in_results)),
                unknown)


def flops_of(eqn: compat.JaxprEqn, rule: Rule) -> float:
    """Floating-point operations of one execution: 2·prod(factors) for contractions, one per element else."""
    name = eqn.primitive.name
    if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        return 2.0 * math.prod(rule.sizes)
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        out, kernel = eqn.outvars[0].aval.shape, eqn.invars[1].aval.shape
        taps = math.prod(kernel) / kernel[numbers.rhs_spec[0]]  # input features per group x window
        holes = math.prod(eqn.params["lhs_dilation"])  # zeros between the input's elements, which no one multiplies
        return 2.0 * math.prod(out) * taps / eqn.params["batch_group_count"] / holes
    sizes = [math.prod(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    return float(max(sizes, default=0))
