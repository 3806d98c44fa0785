"""From a Python function to its program: a flat jaxpr whose inputs and outputs are named leaves.

A step is traced once, with `jax.jit(...).trace`. Arguments may be arrays, `ShapeDtypeStruct`s, NumPy arrays,
Python scalars, typed keys, NNX objects (see `nnx`) and static values. Arrays that the step closes over become
inputs (see `constants`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
import functools
import inspect
from typing import Any

import jax
from jax import tree_util
from jax.extend import core as jex_core
from jax.sharding import NamedSharding, PartitionSpec

from . import compat, constants, nnx, state
from .errors import PinError
from .fingerprint import fingerprint as _fingerprint
from .signature import Names, Numbers, Signature, signature_of
from .updates import update_finder


@dataclass(frozen=True)
class Leaf:
    """An array that goes into a step or comes out of it.

    `path` starts with the argument's name, such as `state.params['w']`, or with `result`; an array that the
    step closes over is `closure[0]`. `spec` is the layout that the user pinned, if any.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    donated: bool = False
    spec: PartitionSpec | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced step.

    Attributes:
      jaxpr: the program on flat leaves.
      inputs: a leaf per input of `jaxpr`: the arguments' in the order of `in_tree`, then closed-over arrays.
      outputs: a leaf per output of `jaxpr`.
      state_pairs: (input, output) where the output is the new value of the input.
      in_tree: of `(args, kwargs)` without static arguments, with `nnx.Node`s for NNX objects.
      out_tree: of the result; with NNX objects among the arguments, of `(args, kwargs, result)` where args
        and kwargs hold only those objects.
      name: of the function.
      fingerprint: of the program; equal in every process.
      source: "file:line (function)" of the function, or "".
      consts: the values of the closed-over arrays.
      kept: per leaf of `out_tree` the input that it is (an array of an NNX object that the step left
        alone and does not own by donation, and which is therefore no output), or None.
      has_objects: whether there are NNX objects among the arguments or in the result.
      mesh_axes: (name, size) of the axes of the mesh that constraints and `shard_map`s in the program name; () if
        none does.
      notes: what the user should know of it.
    """

    jaxpr: jex_core.ClosedJaxpr
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    state_pairs: tuple[tuple[int, int], ...]
    in_tree: tree_util.PyTreeDef
    out_tree: tree_util.PyTreeDef
    name: str
    fingerprint: str
    source: str = ""
    consts: tuple[Any, ...] = field(default=(), repr=False)
    kept: tuple[int | None, ...] = field(default=(), repr=False)
    has_objects: bool = False
    mesh_axes: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()


def trace_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    static_argnums: Numbers = None,
    static_argnames: Names = None,
    donate_argnums: Numbers = None,
    donate_argnames: Names = None,
    pins: Any = None,
    out_pins: Any = None,
) -> Trace:
    """Traces `fun(*args, **kwargs)`.

    Args:
      static_argnums, static_argnames, donate_argnums, donate_argnames: as for `jax.jit`.
      pins, out_pins: layouts that the user asks for, as `in_shardings` and `out_shardings` of `jax.jit`: pytree
        prefixes of the positional arguments and of the result, of `PartitionSpec`s, `NamedSharding`s and None.

    Raises:
      StateError: donated state comes back in another form.
      PinError: the pins do not match the arguments or the result, or the program names several meshes.
    """
    signature = signature_of(fun, static_argnums, static_argnames, donate_argnums, donate_argnames)
    return trace_signature(signature, tuple(args), dict(kwargs or {}), pins, out_pins)


def trace_signature(
    signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], pins: Any = None, out_pins: Any = None
) -> Trace:
    """`trace_step` for a signature that is known. Under `jax.set_mesh`, the mesh's axes count as automatic."""
    with compat.automatic_mesh():
        return _trace_automatic(signature, args, kwargs, pins, out_pins)


def _trace_automatic(
    signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], pins: Any, out_pins: Any
) -> Trace:
    objects = nnx.has_objects(signature.dynamic(args, kwargs))
    traced = _trace(signature, args, kwargs, objects)
    strong = _strengthened(traced)
    if strong is not None:
        traced = _trace(signature, args, kwargs, objects, strong)
    return _build(signature, traced, len(args), signature.dynamic(args, kwargs), pins, out_pins)


@dataclass
class _Traced:
    """What tracing found. `in_keys` and `out_keys` are the leaves' paths, `objects_given` whether there are NNX objects
    among the arguments; the rest is as in `Trace`."""

    stage: Any = None
    in_keys: list[nnx.Keys] = field(default_factory=list)
    in_tree: Any = None
    out_keys: list[nnx.Keys] = field(default_factory=list)
    out_tree: Any = None
    kept: tuple[int | None, ...] = ()
    num_object_leaves: int = 0
    objects_given: bool = False
    has_objects: bool = False
    pairs: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def returned_keys(self) -> list[nnx.Keys]:
        """The paths of the outputs of the program: without the leaves that are kept."""
        return [keys for keys, kept in zip(self.out_keys, self.kept, strict=True) if kept is None]

    @property
    def num_object_outputs(self) -> int:
        """How many outputs of the program are new values of arrays in the arguments' NNX objects."""
        return sum(kept is None for kept in self.kept[: self.num_object_leaves])


def _trace(
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    objects: bool,
    replace: dict[int, jax.ShapeDtypeStruct] | None = None,
) -> _Traced:
    """Traces; `replace` gives other types for some input leaves."""
    found = _Traced()
    num_args = len(args)

    @functools.wraps(signature.fun)
    def step(*args: Any, **kwargs: Any) -> list[Any]:
        dynamic = signature.dynamic(args, kwargs)
        donated = jax.tree.leaves(jax.tree.broadcast(signature.donated(args, kwargs), dynamic))
        tracers = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(dynamic)) if not donated[i]}
        if objects:
            args, kwargs = nnx.merge((args, kwargs), inner=True)
        result = signature.fun(*args, **kwargs)
        leaves = _split_result(signature, num_args, found, args, kwargs, result, objects)
        kept = [tracers.get(id(leaf)) for leaf in leaves[: found.num_object_leaves]]
        found.kept = (*kept, *(None for _ in leaves[found.num_object_leaves :]))
        return [leaf for leaf, source in zip(leaves, found.kept, strict=True) if source is None]

    with nnx.context(objects):
        dynamic, keys = nnx.split_with_keys(signature.dynamic(args, kwargs), tagged=objects)
        found.in_keys = _argument_keys(keys, signature.dynamic_names(num_args))
        leaves, found.in_tree = jax.tree.flatten(dynamic)
        leaves = [(replace or {}).get(i, _abstract(leaf)) for i, leaf in enumerate(leaves)]
        pure_args, pure_kwargs = _with_static(
            signature, args, kwargs, jax.tree.unflatten(found.in_tree, leaves)
        )
        found.stage = jax.jit(
            step,
            static_argnums=sorted(signature.static_argnums),
            static_argnames=sorted(signature.static_argnames),
            donate_argnums=sorted(n for n in signature.donate_argnums if n < num_args),
            donate_argnames=sorted(name for name in signature.donate_argnames if name in kwargs),
        ).trace(*pure_args, **pure_kwargs)
    found.pairs, found.notes = _find_pairs(found)
    return found


def _abstract(leaf: Any) -> Any:
    """The type of a leaf without its placement, which would leave marks in the program; or what is no array,
    for `jax.jit` to refuse by name."""
    try:
        aval = leaf if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else jax.typeof(leaf)
    except TypeError:
        return leaf
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _split_result(
    signature: Signature, num_args: int, found: _Traced, args: Any, kwargs: Any, result: Any, objects: bool
) -> list[Any]:
    """The leaves of the result, those of changed NNX objects first; notes their tree and paths in `found`."""
    found.has_objects, found.objects_given = objects or nnx.has_objects(result), objects
    if not objects:
        result, keys = nnx.split_with_keys(result, tagged=False)
        found.out_keys = [("result", *key) for key in keys]
        leaves, found.out_tree = jax.tree.flatten(result)
        return leaves
    changed = nnx.only_objects(signature.dynamic(args, kwargs))
    pure, keys = nnx.split_with_keys((*changed, result))
    leaves, found.out_tree = jax.tree.flatten(pure)
    found.num_object_leaves = len(jax.tree.leaves(pure[:2]))
    found.out_keys = _argument_keys(keys[: found.num_object_leaves], signature.dynamic_names(num_args))
    found.out_keys += [("result", *key[1:]) for key in keys[found.num_object_leaves :]]
    return leaves


def _with_static(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: Any) -> Any:
    """`(args, kwargs)` with the arguments that are not static replaced by `dynamic`."""
    remaining = iter(dynamic[0])
    new_args = tuple(arg if i in signature.static_argnums else next(remaining) for i, arg in enumerate(args))
    static = {key: value for key, value in kwargs.items() if key in signature.static_argnames}
    return new_args, {**static, **dynamic[1]}


def _argument_keys(keys: Sequence[nnx.Keys], names: Sequence[str]) -> list[nnx.Keys]:
    """Paths in `(args, kwargs)` as paths that start with the argument's name."""
    return [(names[int(key[1][1:-1])] if key[0] == "[0]" else key[1][2:-2], *key[2:]) for key in keys]


def _find_pairs(found: _Traced) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """State pairs, and notes: exact for NNX objects, which keep their paths; by `state.find_pairs` for the rest."""
    inputs = [
        state.Entry(keys, tuple(aval.shape), aval.dtype, info.donated)
        for keys, aval, info in zip(
            found.in_keys, found.stage.jaxpr.in_avals, jax.tree.leaves(found.stage.args_info), strict=True
        )
    ]
    outputs = [
        state.Entry(keys, tuple(aval.shape), aval.dtype)
        for keys, aval in zip(found.returned_keys, found.stage.jaxpr.out_avals, strict=True)
    ]
    split = found.num_object_outputs
    index_of = {entry.keys: i for i, entry in enumerate(inputs)}
    pairs = [(index_of[entry.keys], j) for j, entry in enumerate(outputs[:split]) if entry.keys in index_of]
    state.check_kept([inputs[i] for i, _ in pairs], [outputs[j] for _, j in pairs])
    objects = {i for i, _ in pairs} | {i for i in found.kept if i is not None}
    rest = [i for i in range(len(inputs)) if i not in objects]
    is_update = update_finder(found.stage.jaxpr)
    others, notes = state.find_pairs(
        [inputs[i] for i in rest], outputs[split:], lambda i, j: is_update(rest[i], split + j)
    )
    return tuple(sorted(pairs + [(rest[i], split + j) for i, j in others])), notes


def _strengthened(found: _Traced) -> dict[int, jax.ShapeDtypeStruct] | None:
    """Types for state that goes in weakly typed (a Python scalar) and comes out strongly typed, or None.

    From its second call on, such a step takes the strong type; so that is what is traced.
    """
    before, after = found.stage.jaxpr.in_avals, found.stage.jaxpr.out_avals
    weak = [
        i
        for i, j in found.pairs
        if getattr(before[i], "weak_type", False) and not getattr(after[j], "weak_type", False)
    ]
    return {i: jax.ShapeDtypeStruct(before[i].shape, before[i].dtype) for i in weak} or None


def _build(
    signature: Signature, found: _Traced, num_args: int, dynamic: Any, pins: Any, out_pins: Any
) -> Trace:
    closed = found.stage.jaxpr
    jaxpr, consts = constants.hoist(closed)
    source = _source(signature.fun)
    mesh_axes = _mesh_axes(jaxpr)
    if mesh_axes:
        jaxpr = compat.close(compat.with_abstract_meshes(compat.open_jaxpr(jaxpr)), compat.consts_of(jaxpr))
    out_specs = _pinned_results(out_pins, found, source)
    specs = _pinned_specs(pins, dynamic, found, signature.dynamic_names(num_args))
    donated = [info.donated for info in jax.tree.leaves(found.stage.args_info)]
    paths = [*("".join(keys) for keys in found.in_keys), *(f"closure[{i}]" for i in range(len(consts)))]
    inputs = []
    for i, (path, aval) in enumerate(zip(paths, jaxpr.in_avals, strict=True)):
        is_argument = i < len(found.in_keys)
        inputs.append(
            Leaf(
                path,
                tuple(aval.shape),
                aval.dtype,
                is_argument and donated[i],
                specs[i] if is_argument else None,
            )
        )
    outputs = [
        Leaf("".join(keys), tuple(aval.shape), aval.dtype, spec=spec)
        for keys, aval, spec in zip(found.returned_keys, jaxpr.out_avals, out_specs, strict=True)
    ]
    pairs = []
    for i, j in found.pairs:
        before, after = inputs[i].spec, outputs[j].spec
        if None in (before, after):  # a new state comes where the old one was
            inputs[i] = replace(inputs[i], spec=before if after is None else after)
        if before == after or None in (before, after):
            pairs.append((i, j))
    leaves = [f"{leaf.path} {leaf.donated} {_spec_text(leaf.spec)}" for leaf in (*inputs, *outputs)]
    return Trace(
        jaxpr,
        tuple(inputs),
        tuple(outputs),
        tuple(pairs),
        found.in_tree,
        found.out_tree,
        signature.name,
        _fingerprint(jaxpr, [*leaves, str(tuple(pairs))]),
        source,
        consts,
        found.kept,
        found.has_objects,
        mesh_axes,
        found.notes,
    )


def _mesh_axes(jaxpr: jex_core.ClosedJaxpr) -> tuple[tuple[str, int], ...]:
    """(name, size) of the axes of the one mesh that a program names."""
    found: dict[tuple[tuple[str, int], ...], str] = {}
    for axes, eqn in compat.meshes_of(compat.open_jaxpr(jaxpr)):
        found.setdefault(tuple(axes.items()), compat.source_line(eqn))
    if len(found) > 1:
        (first, one), (second, other), *_ = found.items()
        raise PinError(
            "the constraints and `shard_map`s of a step name one mesh",
            got=f"{dict(first)} at {one} and {dict(second)} at {other}",
            action="Use one mesh for all, and pass it as `cluster=`",
        )
    return next(iter(found), ())


def _spec_text(spec: PartitionSpec | None) -> str:
    return "" if spec is None else str(spec)


def _source(fun: Callable[..., Any]) -> str:
    """ "file:line (function)", or ""."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"


_FREE = object()  # stands for None among pins


def _pinned_specs(
    pins: Any, dynamic: Any, found: _Traced, names: Sequence[str]
) -> list[PartitionSpec | None]:
    """A pinned spec or None per input leaf."""
    if pins is None:
        return [None] * len(found.in_keys)
    args, kwargs = jax.tree.unflatten(found.in_tree, range(len(found.in_keys)))
    try:
        flat = _broadcast_pins(pins, args)
    except ValueError as error:
        raise PinError(
            "in_shardings must be a pytree prefix of the tuple of positional arguments that are not static",
            got=str(error),
            action=f"Give one layout, or one per argument: ({', '.join(names)}). Arguments passed by name take none",
        ) from error
    positional = found.in_keys[: len(jax.tree.leaves(args))]
    specs = [_pinned_spec(pin, "".join(keys)) for pin, keys in zip(flat, positional, strict=True)]
    return specs + [None] * len(jax.tree.leaves(kwargs))


def _pinned_results(pins: Any, found: _Traced, source: str) -> list[PartitionSpec | None]:
    """A pinned spec or None per output of the program."""
    specs: list[PartitionSpec | None] = [None] * len(found.out_keys)
    if pins is not None:
        tree = jax.tree.unflatten(found.out_tree, range(len(found.out_keys)))
        result = tree[2] if found.objects_given else tree
        try:
            flat = _broadcast_pins(pins, result)
        except ValueError as error:
            raise PinError(
                "out_shardings must be a pytree prefix of the step's result", got=str(error), source=source,
                action="Give one layout, or one per part of the result",
            ) from error  # fmt: skip
        for i, pin in zip(jax.tree.leaves(result), flat, strict=True):
            specs[i] = _pinned_spec(pin, "".join(found.out_keys[i]))
    return [spec for spec, kept in zip(specs, found.kept, strict=True) if kept is None]


def _is_pin(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, jax.sharding.Sharding))


def _broadcast_pins(pins: Any, tree: Any) -> list[Any]:
    """A pin per leaf of `tree`, `_FREE` where nothing is asked for; ValueError if `pins` is no prefix of it."""
    # None pins nothing, but None in the tree is no leaf: they must not be taken for each other.
    given = jax.tree.map(lambda pin: _FREE if pin is None else pin, pins, is_leaf=_is_pin)
    broadcast = jax.tree.broadcast(given, tree, is_leaf=_is_pin)
    return jax.tree.leaves(broadcast, is_leaf=lambda x: x is not None and _is_pin(x))


def _pinned_spec(pin: Any, path: str) -> PartitionSpec | None:
    if pin is _FREE:
        return None
    if isinstance(pin, NamedSharding):
        if pin.memory_kind not in (None, "device", "unpinned_host"):  # the latter is what CPU devices have
            raise PinError(
                "layouts are pinned in the devices' own memory",
                got=f"memory_kind={pin.memory_kind!r}",
                path=path,
                action="Leave memory_kind out",
            )
        pin = pin.spec
    if isinstance(pin, PartitionSpec):
        if getattr(pin, "unreduced", None) or getattr(pin, "reduced", None):
            raise PinError(
                "arguments are pinned whole or split, not as pending sums",
                got=str(pin),
                path=path,
                action="Leave `unreduced` and `reduced` out",
            )
        return pin
    raise PinError(
        "a layout is a PartitionSpec, a NamedSharding or None",
        got=repr(pin),
        path=path,
        action="Give the dims' mesh axes, for instance PartitionSpec('x', None)",
    )
