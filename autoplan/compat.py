"""The only module that touches JAX internals: `jax._src` and `jaxlib.mlir`.

Everything here answers one of three questions about a jaxpr that JAX's public API does not answer:
how an equation may be partitioned (Shardy's op sharding rules), which source line wrote it, and how to
rebuild it around other sub-jaxprs. Each use says what public API would replace it.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
import contextlib
from dataclasses import dataclass
import functools
import itertools
from typing import Any

import jax

# `source_info_util` maps an equation's traceback to the user's frame. Would be replaced by a public
# `JaxprEqn.source_info` accessor; there is none today.
# A jaxpr made by hand wants to say what it was made for. `jax.extend.core` has Jaxpr and DebugInfo, but the latter's
# fields are not documented there.
from jax._src import config, core, source_info_util
from jax._src import mesh as mesh_lib
from jax.extend import core as jex_core

# The MLIR bindings run Shardy's rule-populating pass. Would be replaced by a public way to ask JAX for an
# operation's sharding rule (`custom_partitioning` only lets one *set* a rule).
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy
import numpy as np

Jaxpr = jex_core.Jaxpr
ClosedJaxpr = jex_core.ClosedJaxpr
JaxprEqn = jex_core.JaxprEqn
Literal = jex_core.Literal
Var = jex_core.Var

_POPULATE_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"


# ---------------------------------------------------------------------------------------------------------
# Jaxprs: open and closed forms, sub-jaxprs, source lines


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The bare Jaxpr of an open or closed one (newer JAX has a single class for both)."""
    return jaxpr if isinstance(jaxpr, Jaxpr) else jaxpr.jaxpr


def consts_of(jaxpr: Jaxpr | ClosedJaxpr) -> Sequence:
    """The constants bound to `constvars`; empty for an open jaxpr."""
    return getattr(jaxpr, "consts", ()) or ()


def close(jaxpr: Jaxpr, consts: Sequence = ()) -> ClosedJaxpr:
    return ClosedJaxpr(jaxpr, list(consts))


@dataclass(frozen=True)
class SubJaxpr:
    """One sub-jaxpr of an equation: parameter `name`, position `index` in it if it is a tuple."""

    name: str
    index: int | None
    jaxpr: Jaxpr


def subjaxprs(eqn: JaxprEqn) -> tuple[SubJaxpr, ...]:
    """Sub-jaxprs of an equation in a fixed order (parameter names sorted)."""
    found = []
    for name in sorted(eqn.params):
        value = eqn.params[name]
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            found.append(SubJaxpr(name, None, open_jaxpr(value)))
        elif isinstance(value, (tuple, list)):
            found += [SubJaxpr(name, i, open_jaxpr(v)) for i, v in enumerate(value)
                      if isinstance(v, (Jaxpr, ClosedJaxpr))]
    return tuple(found)


def _rewrap(old: Jaxpr | ClosedJaxpr, new: Jaxpr) -> Jaxpr | ClosedJaxpr:
    return new if isinstance(old, Jaxpr) else old.replace(jaxpr=new)


def with_subjaxprs(eqn: JaxprEqn, new: Sequence[Jaxpr]) -> JaxprEqn:
    """`eqn` with its sub-jaxprs (in the order of `subjaxprs`) replaced; calling conventions must agree."""
    params = dict(eqn.params)
    for sub, jaxpr in zip(subjaxprs(eqn), new, strict=True):
        if sub.index is None:
            params[sub.name] = _rewrap(params[sub.name], jaxpr)
        else:
            items = list(params[sub.name])
            items[sub.index] = _rewrap(items[sub.index], jaxpr)
            params[sub.name] = type(params[sub.name])(items)
    return eqn.replace(params=params)


def scan_split(eqn: JaxprEqn) -> tuple[int, int]:
    """(number of constants, number of carried values) of a `scan` equation."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # Newer JAX keeps flat trees (consts, carry, xs) instead of counts.
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def trace_context() -> Any:
    """What else than its arguments decides what a function traces to: 64 bits, promotion, precision, key types, the
    context mesh. Hashable; equal contexts trace alike. A public `jax.config` snapshot would replace it."""
    return config.trace_context()


def source_line(eqn: JaxprEqn) -> str:
    """"file:line (function)" of the user's code that wrote the equation, or "" if unknown.

    Lines of installed libraries (flax, optax) are passed over where the user's own is on the stack.
    """
    frames = list(itertools.islice(source_info_util.user_frames(eqn.source_info.traceback), 64))
    own = (f for f in frames if "site-packages" not in f.file_name and "dist-packages" not in f.file_name)
    frame = next(own, frames[0] if frames else None)
    if frame is None:
        return ""
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def name_stack(eqn: JaxprEqn) -> str:
    """The equation's `jax.named_scope` path; flax modules put their names there."""
    return str(eqn.source_info.name_stack)


def is_dropped(var) -> bool:
    return isinstance(var, jex_core.DropVar)


def new_var(aval) -> Var:
    return Var(aval)


@functools.lru_cache(maxsize=4096)
def _template_eqn(shape: tuple[int, ...], dtype, sharding: jax.sharding.Sharding) -> JaxprEqn:
    def constrain(x):
        return jax.lax.with_sharding_constraint(x, sharding)

    return jax.make_jaxpr(constrain)(jax.ShapeDtypeStruct(shape, dtype)).eqns[0]


def constraint_eqn(var: Var, sharding: jax.sharding.Sharding, beside: JaxprEqn | None) -> JaxprEqn:
    """A `sharding_constraint` equation on `var` with a fresh result, as if written where `beside` was, if anywhere."""
    template = _template_eqn(tuple(var.aval.shape), var.aval.dtype, sharding)
    source = source_info_util.new_source_info() if beside is None else beside.source_info
    return template.replace(invars=[var], outvars=[new_var(var.aval)], source_info=source)


def barrier_eqn(variables: Sequence[Var]) -> JaxprEqn:
    """An `optimization_barrier` over `variables` with fresh results."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
    template = jax.make_jaxpr(lambda *xs: jax.lax.optimization_barrier(xs))(*avals).eqns[0]
    return template.replace(invars=list(variables), outvars=[new_var(v.aval) for v in variables])


def clamped_eqn(index: Var, most: int) -> JaxprEqn:
    """An equation that clamps a scalar index to 0 .. `most`, with a fresh result."""
    template = jax.make_jaxpr(lambda i: jax.lax.clamp(np.asarray(0, i.dtype), i, np.asarray(most, i.dtype)))(
        jax.ShapeDtypeStruct((), index.aval.dtype)).eqns[0]
    operands = [v if isinstance(v, Literal) else index for v in template.invars]
    return template.replace(invars=operands, outvars=[new_var(index.aval)])


# ---------------------------------------------------------------------------------------------------------
# Layouts that programs ask for

Spec = tuple[tuple[str, ...] | None, ...]


def wanted_specs(eqn: JaxprEqn) -> tuple[tuple[Spec | None, ...], tuple[Spec | None, ...]] | None:
    """The layouts in which a `sharding_constraint` or a `shard_map` wants its operands (those that are no literals) and
    gives its results: per dim the axes that split it, None where they are free. None: it asks for nothing."""
    if eqn.primitive.name == "sharding_constraint" and isinstance(eqn.params["sharding"], jax.sharding.NamedSharding):
        free = eqn.params.get("unconstrained_dims", frozenset())
        return (None,), (_spec(eqn.params["sharding"].spec, eqn.outvars[0].aval.ndim, free),)
    if eqn.primitive.name == "shard_map":
        known = [(v, spec) for v, spec in zip(eqn.invars, eqn.params["in_specs"]) if not isinstance(v, Literal)]
        return (tuple(_spec(spec, v.aval.ndim) for v, spec in known),
                tuple(_spec(spec, v.aval.ndim) for v, spec in zip(eqn.outvars, eqn.params["out_specs"])))
    return None


def _spec(spec: jax.sharding.PartitionSpec, rank: int, free: Collection[int] = ()) -> Spec:
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(None if d in free or e is jax.sharding.PartitionSpec.UNCONSTRAINED else
                 () if e is None else (e,) if isinstance(e, str) else tuple(e) for d, e in enumerate(entries))


def meshes_of(jaxpr: Jaxpr) -> Iterator[tuple[dict[str, int], JaxprEqn]]:
    """(sizes of its axes, where) of every mesh that a program names."""
    for eqn in jaxpr.eqns:
        if wanted_specs(eqn) is not None:
            mesh = eqn.params["mesh"] if eqn.primitive.name == "shard_map" else eqn.params["sharding"].mesh
            yield dict(mesh.shape), eqn
        for sub in subjaxprs(eqn) if eqn.primitive.name != "shard_map" else ():
            yield from meshes_of(sub.jaxpr)


def with_abstract_meshes(jaxpr: Jaxpr) -> Jaxpr:
    """The program with meshes of no particular devices."""
    def changed(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name == "shard_map":
            return eqn.replace(params=eqn.params | {"mesh": _abstract(eqn.params["mesh"])})
        if wanted_specs(eqn) is not None:
            old = eqn.params["sharding"]
            sharding = jax.sharding.NamedSharding(_abstract(old.mesh), old.spec, memory_kind=old.memory_kind)
            return eqn.replace(params=eqn.params | {"sharding": sharding})
        subs = subjaxprs(eqn)
        return with_subjaxprs(eqn, [with_abstract_meshes(sub.jaxpr) for sub in subs]) if subs else eqn

    return jaxpr.replace(eqns=[changed(eqn) for eqn in jaxpr.eqns])


def _abstract(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> jax.sharding.AbstractMesh:
    return getattr(mesh, "abstract_mesh", mesh)


def mesh_set_around() -> jax.sharding.Mesh | None:
    """The mesh of `jax.set_mesh` or None, also while something outside (grad, vmap, jit) is being traced.

    `jax.sharding.get_mesh` would do, were it not refused under a trace.
    """
    mesh = mesh_lib.get_concrete_mesh()
    return mesh if mesh.axis_names else None


def automatic_mesh() -> contextlib.AbstractContextManager:
    """A context in which the axes of a mesh set by `jax.set_mesh` are automatic, whatever they are outside."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    if mesh.empty or mesh.axis_types == automatic:
        return contextlib.nullcontext()
    same = jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=automatic)
    return jax.sharding.use_abstract_mesh(same)


def memory_kind(aval: Any) -> str | None:
    """The kind of memory that a value has asked for ("pinned_host"), None for the device's own. The space is a public
    enum (`jax.memory.Space`), and so is `memory_kind=`; a `NamedSharding` that takes the space would replace this."""
    return "pinned_host" if getattr(aval, "memory_space", None) == jax.memory.Space.Host else None


# ---------------------------------------------------------------------------------------------------------
# Shardy's op sharding rules


@dataclass(frozen=True)
class LoweredRule:
    """Shardy's rule of one lowered operation; per operand and result, per dim, factor indices major first."""

    factor_sizes: tuple[int, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    reduction: tuple[int, ...]
    blocked: tuple[int, ...]  # need replication, or a permutation (halo) when split


@dataclass(frozen=True)
class LoweredOp:
    name: str
    operands: tuple[int, ...]  # value numbers
    results: tuple[int, ...]
    rule: LoweredRule | None


@dataclass(frozen=True)
class LoweredFunction:
    """One equation after lowering: SSA values by number, operations in order, calls inlined."""

    shapes: tuple[tuple[int, ...], ...]  # by value number
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    ops: tuple[LoweredOp, ...]


def lower_with_rules(functions: Sequence[tuple[Callable, Sequence[jax.ShapeDtypeStruct]]]
                     ) -> list[LoweredFunction | None]:
    """Lowers each function once, in one module, and reads the partitioner's rule of every operation.

    A function that JAX cannot lower on its own (effects, unknown primitives) gives None; the others are
    then lowered one by one.
    """
    if not functions:
        return []
    try:
        return _lower_together(functions)
    except Exception:  # JAX raises many kinds here; one unlowerable function must not cost the others
        if len(functions) == 1:
            return [None]
        half = len(functions) // 2
        return lower_with_rules(functions[:half]) + lower_with_rules(functions[half:])


def _lower_together(functions) -> list[LoweredFunction]:
    def named(i: int, fun: Callable) -> Callable:
        def call(*args):
            return fun(*args)
        call.__name__ = f"autoplan_rule_{i}"
        return jax.jit(call)

    calls = [named(i, fun) for i, (fun, _) in enumerate(functions)]
    spans, flat = [], []
    for _, avals in functions:
        spans.append((len(flat), len(flat) + len(avals)))
        flat += list(avals)

    def autoplan_rules(*args):
        return [call(*args[lo:hi]) for call, (lo, hi) in zip(calls, spans)]

    module = jax.jit(autoplan_rules, keep_unused=True).lower(*flat).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(_POPULATE_PIPELINE).run(module.operation)
        table = {ir.StringAttr(f.attributes["sym_name"]).value: f for f in module.body.operations
                 if "sym_name" in f.attributes and f.operation.name == "func.func"}
        return [_read_function(table[f"autoplan_rule_{i}"], table) for i in range(len(functions))]


def _read_function(func, table) -> LoweredFunction:
    shapes: list[tuple[int, ...]] = []
    ops: list[LoweredOp] = []

    def number(value) -> int:
        value_type = value.type
        ranked = ir.RankedTensorType.isinstance(value_type) if hasattr(ir.RankedTensorType, "isinstance") \
            else isinstance(value_type, ir.RankedTensorType)
        shapes.append(tuple(ir.RankedTensorType(value_type).shape) if ranked else ())
        return len(shapes) - 1

    def walk(function, arguments: Sequence[int]) -> list[int]:
        block = function.regions[0].blocks[0]
        env = dict(zip(block.arguments, arguments, strict=True))
        for op in block.operations:
            name = op.operation.name
            operands = tuple(env[v] for v in op.operation.operands)
            if name == "func.return":
                return list(operands)
            if name == "func.call":
                callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                env.update(zip(op.operation.results, walk(table[callee], operands)))
                continue
            results = tuple(number(v) for v in op.operation.results)
            env.update(zip(op.operation.results, results))
            ops.append(LoweredOp(name, operands, results, _read_rule(op)))
        raise AssertionError("a function without a return")

    arguments = tuple(number(v) for v in func.regions[0].blocks[0].arguments)
    results = tuple(walk(func, arguments))
    return LoweredFunction(tuple(shapes), arguments, results, tuple(ops))


def _read_rule(op) -> LoweredRule | None:
    if "sdy.sharding_rule" not in op.attributes:
        return None
    rule = sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"])

    def mappings(attrs):
        return tuple(tuple(tuple(sdy.DimMappingAttr(d).factor_indices) for d in
                           sdy.TensorMappingAttr(t).dim_mappings) for t in attrs)

    blocked = set(rule.need_replication_factors) | set(rule.permutation_factors)
    return LoweredRule(tuple(rule.factor_sizes), mappings(rule.operand_mappings),
                       mappings(rule.result_mappings), tuple(rule.reduction_factors), tuple(sorted(blocked)))


def eqn_function(eqn: JaxprEqn) -> Callable:
    """A function that evaluates just this equation, literals included."""
    # One fresh argument per operand occurrence: an operand used twice may be laid out in two ways.
    arguments = [new_var(v.aval) for v in eqn.invars if not isinstance(v, Literal)]
    taken: Iterator[Var] = iter(arguments)
    operands = [v if isinstance(v, Literal) else next(taken) for v in eqn.invars]
    outvars = [new_var(v.aval) for v in eqn.outvars]
    names = tuple(f"x{i}" for i in range(len(arguments)))
    debug_info = core.DebugInfo("autoplan", eqn.primitive.name, names, ("",) * len(outvars))
    jaxpr = Jaxpr([], arguments, outvars, [eqn.replace(invars=operands, outvars=outvars)], eqn.effects, debug_info)
    return jex_core.jaxpr_as_fun(close(jaxpr))

