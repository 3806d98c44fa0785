"""The step as a graph: nodes with partitioning rules, values between them, and where each stands.

Calls (`jit`, `remat`, `custom_jvp`, ...) are looked through; `scan`, `while` and `cond` become their bodies
plus small boundary nodes, so that one body is planned once and its layout is the same on both sides of a
loop. Every use of a value has an `Address`: which operand of which equation of which sub-jaxpr, so that
emission can put a constraint exactly there.

On a TPU the matrix unit reads float32 operands at default precision as bfloat16, and what only it reads is kept and
sent so. There, `narrow` nodes stand for these conversions, which the program does not have.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
import functools
import math
from typing import NamedTuple

import jax
import numpy as np

from . import compat
from .rules import Rule, flops_of, identity, rules_of, scan_slice, scan_stack
from .schedule import updates_first
from .trace import Trace
from .units import format_bytes

# Calls whose single sub-jaxpr takes the equation's operands and gives its results, one to one.
TRANSPARENT = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
               "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"}
# Multiplications of matrices: what the matrix units do.
CONTRACTIONS = frozenset("dot_general conv_general_dilated ragged_dot ragged_dot_general".split())
# A loop whose trip count is not known when planning is priced as this many iterations.
UNKNOWN_TRIPS = 1.0


class Address(NamedTuple):
    """Where a value is made or read.

    `where` is "operand" or "result" of the equation at `site`, or "input" or "output" of the sub-jaxpr at
    `site`. A site alternates equation and sub-jaxpr numbers: (7, 0, 3) is equation 3 of sub-jaxpr 0 of
    equation 7; () is the whole program. "nowhere" is the address of what narrow nodes make.
    """

    where: str
    site: tuple[int, ...]
    index: int


class Wanted(NamedTuple):
    """Layouts that the program itself asks for: per operand and result None, or per dim the axes that split it, major
    first (None: left to the planner)."""

    operands: tuple[compat.Spec | None, ...]
    results: tuple[compat.Spec | None, ...]


@dataclass(frozen=True)
class Value:
    """One array of the program: made by result `result` of node `producer`."""

    index: int
    shape: tuple[int, ...]
    itemsize: float
    dtype: str
    producer: int
    result: int
    address: Address


@dataclass(frozen=True)
class Use:
    """Node `node` reads `value` as its operand `operand`, `weight` times per step."""

    value: int
    node: int
    operand: int
    weight: float
    address: Address


@dataclass(frozen=True)
class Node:
    """One operation, input, output or region boundary, run `weight` times per step.

    `key` is equal for nodes that may share a strategy: same kind, rule, sizes and weight.
    """

    index: int
    kind: str  # op, input, const, carry, slice, stack, join, narrow, output
    rule: int  # index into Graph.rules
    key: tuple
    weight: float
    position: int  # in program order
    operands: tuple[int, ...]  # use indices
    results: tuple[int, ...]  # value indices
    name: str
    source: str
    flops: float
    dtype: str
    region: tuple[int, ...]  # the loop bodies and branches it stands in, outermost first
    wanted: Wanted | None = None


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    uses: tuple[Use, ...]
    rules: tuple[Rule, ...]
    uses_of: tuple[tuple[int, ...], ...]  # by value
    inputs: tuple[int, ...]  # node of each program input
    outputs: tuple[int, ...]  # the use by which each program output is read (-1: a literal)
    num_positions: int
    region_ends: tuple[int, ...]  # by region, the last position inside it
    notes: tuple[str, ...]
    barred: frozenset[int]  # values that the compiler may not make again: remat regions read them behind a barrier

    def producer_of(self, value: int) -> Node:
        """The node of the program that makes a value; of a narrowed one, what makes the wide one."""
        node = self.nodes[self.values[value].producer]
        return self.producer_of(self.uses[node.operands[0]].value) if node.kind == "narrow" else node

    def readers_of(self, value: int) -> Iterator[Node]:
        """The nodes of the program that read a value, or its narrowed copy."""
        for use in self.uses_of[value]:
            node = self.nodes[self.uses[use].node]
            if node.kind == "narrow":
                yield from self.readers_of(node.results[0])
            else:
                yield node


@functools.cache
def itemsize_of(dtype) -> float:
    """Bytes per element; typed PRNG keys count their words, sub-byte integers their bits."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return 8.0
    name = np.dtype(dtype).name
    if name in ("int4", "uint4", "float4_e2m1fn"):
        return 0.5
    return float(np.dtype(dtype).itemsize)


@functools.cache
def _name_of(dtype) -> str:
    return str(dtype)


@dataclass
class _Draft:
    kind: str
    rule: Rule | None  # None: the rule of `eqn`
    eqn: compat.JaxprEqn | None
    key: tuple
    weight: float
    position: int
    name: str
    source: str
    dtype: str
    region: tuple[int, ...]
    unit: int  # the equation of the whole program, loops with all that is in them
    operands: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


class _Builder:
    """Collects nodes, values and uses while walking the jaxpr; `build_graph` freezes the result."""

    def __init__(self, narrow: bool) -> None:
        self.narrow = narrow
        self.narrowed: dict[tuple, int] = {}
        self.drafts: list[_Draft] = []
        self.values: list[Value] = []
        self.uses: list[Use] = []
        self.position = 0
        self.unit = -1
        self.in_loop = False
        self.region: tuple[int, ...] = ()
        self.region_ends: list[int] = []
        self.notes: dict[str, None] = {}
        self.barred: set[int] = set()

    def node(self, kind: str, *, rule: Rule | None = None, eqn=None, key=(), weight=1.0, name="", source="",
             dtype="") -> int:
        self.drafts.append(_Draft(kind, rule, eqn, (kind, weight, *key), weight, self.position, name, source, dtype,
                                  self.region, self.unit))
        return len(self.drafts) - 1

    def result(self, node: int, aval, address: Address) -> int:
        draft = self.drafts[node]
        shape, dtype = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", np.dtype(np.int32))
        self.values.append(Value(len(self.values), shape, itemsize_of(dtype), _name_of(dtype), node,
                                 len(draft.results), address))
        draft.results.append(len(self.values) - 1)
        return len(self.values) - 1

    def use(self, node: int, value: int, address: Address, weight: float) -> int:
        draft = self.drafts[node]
        self.uses.append(Use(value, node, len(draft.operands), weight, address))
        draft.operands.append(len(self.uses) - 1)
        return len(self.uses) - 1

    # --- walking ---

    def walk(self, jaxpr: compat.Jaxpr, args: Sequence[int | None], site: tuple[int, ...], weight: float,
             consts: Sequence[int] | None = None) -> list[int | None]:
        """Adds the equations of `jaxpr`; gives the values of its outputs (None for literals)."""
        env: dict = dict(zip(jaxpr.invars, args, strict=True))
        for i, var in enumerate(jaxpr.constvars):
            env[var] = consts[i] if consts else self.constant(var, Address("const", site, i), weight)
        for number, eqn in enumerate(jaxpr.eqns):
            operands = [None if isinstance(v, compat.Literal) else env[v] for v in eqn.invars]
            results = self.equation(eqn, operands, (*site, number), weight)
            env.update(zip(eqn.outvars, results, strict=True))
        return [None if isinstance(v, compat.Literal) else env[v] for v in jaxpr.outvars]

    def walk_region(self, jaxpr: compat.Jaxpr, args, site, weight) -> list[int | None]:
        """`walk` of a loop body or branch, which is a region of its own."""
        outside = self.region
        self.region = (*outside, len(self.region_ends))
        self.region_ends.append(self.position)
        results = self.walk(jaxpr, args, site, weight)
        self.region_ends[self.region[-1]] = self.position
        self.region = outside
        return results

    def constant(self, var, address: Address, weight: float) -> int:
        shape = tuple(var.aval.shape)
        node = self.node("const", rule=identity(shape, 0, 1), key=(shape, str(var.aval.dtype)), weight=weight,
                         name="constant", dtype=str(var.aval.dtype))
        return self.result(node, var.aval, address)

    def equation(self, eqn, operands, site, weight) -> list[int | None]:
        name = eqn.primitive.name
        subs = compat.subjaxprs(eqn)
        if name in ("scan", "while", "cond"):
            outside, self.in_loop = self.in_loop, True
            if not outside:
                self.position, self.unit = self.position + 1, self.unit + 1
            walk = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}[name]
            results = walk(eqn, operands, site, weight)
            self.in_loop = outside
            return results
        if name == "optimization_barrier" or eqn.params.get("prevent_cse"):
            self.barred.update(v for v in operands if v is not None)
        if name in TRANSPARENT and len(subs) >= 1 and len(subs[0].jaxpr.invars) == len(operands):
            return self.walk(subs[0].jaxpr, self.filled(operands, eqn, site, weight), (*site, 0), weight)
        return self.operation(eqn, operands, site, weight)

    def filled(self, operands, eqn, site, weight) -> list[int]:
        """Operands with literals turned into constant values (a region's inputs must be values)."""
        return [v if v is not None else self.constant(eqn.invars[i], Address("const", site, i), weight)
                for i, v in enumerate(operands)]

    def operation(self, eqn, operands, site, weight) -> list[int]:
        self.position += 1
        self.unit += not self.in_loop
        avals = tuple(None if v is None else (tuple(a.aval.shape), _name_of(a.aval.dtype))
                      for v, a in zip(operands, eqn.invars))
        key = (eqn.primitive.name, _params_key(eqn), avals)
        dtype = _name_of(getattr(eqn.invars[0].aval, "dtype", "")) if eqn.invars else ""
        addresses = [Address("operand", site, i) for i in range(len(operands))]
        if self.narrow and _reads_narrow(eqn):  # their nodes come before the one that reads them
            operands = [self.narrowed_value(v, address, weight)
                        if v is not None and self.values[v].dtype == "float32" else v
                        for v, address in zip(operands, addresses)]
        node = self.node("op", eqn=eqn, key=key, weight=weight, name=eqn.primitive.name,
                         source=compat.source_line(eqn), dtype=dtype)
        for value, address in zip(operands, addresses):
            if value is not None:
                self.use(node, value, address, weight)
        return [self.result(node, v.aval, Address("result", site, i)) for i, v in enumerate(eqn.outvars)]

    def narrowed_value(self, value: int, address: Address, weight: float) -> int:
        """The bfloat16 copy of a value that contractions in this region read."""
        key = (value, self.region)
        if key not in self.narrowed:
            shape = self.values[value].shape
            node = self.node("narrow", rule=identity(shape, 1, 1), key=(shape,), weight=weight, name="narrow",
                             dtype="bfloat16")
            self.use(node, value, address, weight)
            aval = jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16)
            self.narrowed[key] = self.result(node, aval, Address("nowhere", (), 0))
        return self.narrowed[key]

    def boundary(self, kind: str, rule: Rule, aval, weight, address, source="", key=()) -> tuple[int, int]:
        """A region-boundary node with one result: (node, value)."""
        node = self.node(kind, rule=rule, key=(rule.sizes, str(aval.dtype), *key), weight=weight, name=kind,
                         source=source, dtype=str(aval.dtype))
        return node, self.result(node, aval, address)

    def carries(self, eqn, variables, operands, first, inside, site, weight) -> list[tuple[int, int]]:
        """Carry nodes of a loop: their value has one layout before, in and after the loop.

        `operands[first:]` are the initial values; `inside` is the address of the first carried input of
        the body.
        """
        out = []
        for k, var in enumerate(variables):
            node, value = self.boundary("carry", identity(var.aval.shape, 2, 1), var.aval, weight,
                                        Address("input", inside.site, inside.index + k), compat.source_line(eqn))
            self.use(node, operands[first + k], Address("operand", site, first + k), weight)
            out.append((node, value))
        return out

    def scan(self, eqn, operands, site, weight) -> list[int]:
        num_consts, num_carry = compat.scan_split(eqn)
        body, length = compat.subjaxprs(eqn)[0].jaxpr, eqn.params["length"]
        operands = self.filled(operands, eqn, site, weight)
        inner = weight * length
        carries = self.carries(eqn, body.invars[num_consts:num_consts + num_carry], operands, num_consts,
                               Address("input", (*site, 0), num_consts), site, weight)
        slices = []
        for k in range(num_consts + num_carry, len(operands)):
            stacked, var = eqn.invars[k].aval, body.invars[k]
            node, value = self.boundary("slice", scan_slice(stacked.shape), var.aval, weight,
                                        Address("input", (*site, 0), k), compat.source_line(eqn))
            self.use(node, operands[k], Address("operand", site, k), weight)
            slices.append(value)
        outs = self.walk_region(body, [*operands[:num_consts], *(v for _, v in carries), *slices], (*site, 0), inner)
        for k, (node, _) in enumerate(carries):
            if outs[k] is not None:
                self.use(node, outs[k], Address("output", (*site, 0), k), inner)
        results = [value for _, value in carries]
        for k in range(num_carry, len(eqn.outvars)):
            aval = eqn.outvars[k].aval
            node, value = self.boundary("stack", scan_stack(aval.shape), aval, weight, Address("result", site, k),
                                        compat.source_line(eqn))
            if outs[k] is not None:
                self.use(node, outs[k], Address("output", (*site, 0), k), inner)
            results.append(value)
        return results

    def while_loop(self, eqn, operands, site, weight) -> list[int]:
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        number = {sub.name: i for i, sub in enumerate(compat.subjaxprs(eqn))}
        jaxprs = {sub.name: sub.jaxpr for sub in compat.subjaxprs(eqn)}
        operands = self.filled(operands, eqn, site, weight)
        body, cond, first = jaxprs["body_jaxpr"], jaxprs["cond_jaxpr"], num_cond + num_body
        self.notes[f"a while loop of unknown length is priced as {UNKNOWN_TRIPS:g} iteration(s): "
                   f"{compat.source_line(eqn)}"] = None
        inner = weight * UNKNOWN_TRIPS
        carries = self.carries(eqn, body.invars[num_body:], operands, first,
                               Address("input", (*site, number["body_jaxpr"]), num_body), site, weight)
        values = [value for _, value in carries]
        self.walk_region(cond, [*operands[:num_cond], *values], (*site, number["cond_jaxpr"]), inner)
        outs = self.walk_region(body, [*operands[num_cond:first], *values], (*site, number["body_jaxpr"]), inner)
        for k, (node, _) in enumerate(carries):
            if outs[k] is not None:
                self.use(node, outs[k], Address("output", (*site, number["body_jaxpr"]), k), inner)
        return values

    def cond(self, eqn, operands, site, weight) -> list[int]:
        branches = compat.subjaxprs(eqn)
        operands = self.filled(operands, eqn, site, weight)[1:]
        share = weight / len(branches)
        outs = [self.walk_region(b.jaxpr, operands, (*site, i), share) for i, b in enumerate(branches)]
        results = []
        for k, var in enumerate(eqn.outvars):
            present = [i for i in range(len(branches)) if outs[i][k] is not None]
            node, value = self.boundary("join", identity(var.aval.shape, len(present), 1), var.aval, weight,
                                        Address("result", site, k), compat.source_line(eqn), key=(len(present),))
            for i in present:
                self.use(node, outs[i][k], Address("output", (*site, i), k), share)
            results.append(value)
        return results


def _reads_narrow(eqn: compat.JaxprEqn) -> bool:
    """Whether an equation is a contraction at default precision."""
    precision = eqn.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    return (eqn.primitive.name in ("dot_general", "conv_general_dilated")
            and all(part in (None, jax.lax.Precision.DEFAULT) for part in parts))


def _params_key(eqn) -> tuple:
    """A hashable stand-in for an equation's parameters; jaxprs and functions by their text."""
    out = []
    for name, value in sorted(eqn.params.items()):
        if isinstance(value, (compat.Jaxpr, compat.ClosedJaxpr)) or callable(value):
            value = str(value)
        try:
            hash(value)
        except TypeError:
            value = str(value)
        out.append((name, value))
    return tuple(out)


def build_graph(trace: Trace, narrow: bool = False, wide: bool = False) -> Graph:
    """The graph of a traced step, with the partitioner's rule of every distinct equation.

    Args:
      narrow: with `narrow` nodes, as on TPUs.
      wide: with 16-bit floats made, kept and sent as 32-bit ones, as XLA:CPU does; arguments come as they are.
    """
    builder = _Builder(narrow)
    jaxpr = compat.open_jaxpr(trace.jaxpr)
    paired = {i for i, _ in trace.state_pairs}
    inputs, args = [], []
    for i, (var, leaf) in enumerate(zip(jaxpr.invars, trace.inputs, strict=True)):
        shape = tuple(var.aval.shape)
        node = builder.node("input", rule=identity(shape, 0, 1), name=leaf.path, dtype=str(var.aval.dtype),
                            key=(shape, str(var.aval.dtype), i in paired, leaf.donated, str(leaf.spec)))
        inputs.append(node)
        args.append(builder.result(node, var.aval, Address("input", (), i)))
    outs = builder.walk(jaxpr, args, (), 1.0)
    builder.position += 1
    outputs = []
    for k, value in enumerate(outs):
        outputs.append(_output(builder, trace, value, k))
    if wide:
        builder.values = [_widened(value, builder.drafts[value.producer].kind) for value in builder.values]
    graph = _freeze(builder, inputs, outputs)
    fixed = ("input", "const", "output")
    units = [-1 if draft.kind in fixed else draft.unit for draft in builder.drafts]
    in_place = {outputs[o] for i, o in trace.state_pairs if trace.inputs[i].donated}
    return updates_first(graph, units, in_place)


def _widened(value: Value, kind: str) -> Value:
    return replace(value, itemsize=4.0) if kind != "input" and value.dtype in ("bfloat16", "float16") else value


def _output(builder: _Builder, trace: Trace, value: int | None, k: int) -> int:
    if value is None:
        return -1
    aval = builder.values[value]
    pin = str(trace.outputs[k].spec)
    node = builder.node("output", rule=identity(aval.shape, 1, 0), key=(aval.shape, aval.dtype, pin),
                        name=trace.outputs[k].path, dtype=aval.dtype)
    return builder.use(node, value, Address("output", (), k), 1.0)


def _freeze(builder: _Builder, inputs, outputs) -> Graph:
    distinct: dict[tuple, int] = {}
    rules: list[Rule | None] = []
    eqns: list = []
    rule_of_draft = []
    for draft in builder.drafts:
        key = ("boundary", draft.rule) if draft.rule is not None else draft.key[2:]
        if key not in distinct:
            distinct[key] = len(rules)
            rules.append(draft.rule)
            eqns.append(draft.eqn)
        rule_of_draft.append(distinct[key])
    missing = [i for i, r in enumerate(rules) if r is None]
    for i, rule in zip(missing, rules_of([eqns[i] for i in missing])):
        rules[i] = rule
    flops = [0.0 if eqn is None else flops_of(eqn, rule) for eqn, rule in zip(eqns, rules)]
    nodes = tuple(Node(i, d.kind, r, d.key, d.weight, d.position, tuple(d.operands), tuple(d.results), d.name,
                       d.source, flops[r], d.dtype, d.region, _wanted(d))
                  for i, (d, r) in enumerate(zip(builder.drafts, rule_of_draft)))
    uses_of: list[list[int]] = [[] for _ in builder.values]
    for i, use in enumerate(builder.uses):
        uses_of[use.value].append(i)
    notes = list(builder.notes) + _unknown_notes(nodes, rules, builder.values, builder.uses)
    return Graph(nodes, tuple(builder.values), tuple(builder.uses), tuple(rules), tuple(map(tuple, uses_of)),
                 tuple(inputs), tuple(outputs), builder.position + 1, tuple(builder.region_ends), tuple(notes),
                 frozenset(builder.barred))


def _wanted(draft: _Draft) -> Wanted | None:
    return None if draft.eqn is None or (found := compat.wanted_specs(draft.eqn)) is None else Wanted(*found)


def _unknown_notes(nodes, rules, values, uses) -> list[str]:
    """What is kept whole for want of a partitioning rule, largest first."""
    seen: dict[tuple[str, str], float] = {}
    for node in nodes:
        unknown = rules[node.rule].unknown
        if unknown and node.kind == "op":
            touched = (*node.results, *(uses[u].value for u in node.operands))
            size = max((math.prod(values[v].shape) * values[v].itemsize for v in touched), default=0.0)
            key = (f"{node.name} ({unknown})" if unknown != node.name else node.name, node.source)
            seen[key] = max(seen.get(key, 0.0), size)
    return [f"kept whole on every device, no partitioning rule for {name}: arrays of up to {format_bytes(size)} at "
            f"{source or '?'}"
            for (name, source), size in sorted(seen.items(), key=lambda item: -item[1])]

