"""States that are born sharded: made by a program whose results are laid out as the plan wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import Mesh, NamedSharding
import numpy as np

from . import constants, nnx
from .errors import StateError, describe_array
from .plan import LeafLayout, Plan

_SHOWN = 5
_Types = dict[str, tuple[tuple[int, ...], str]]


def born(
    make_state: Callable[..., Any], args: Sequence[Any], plan: Plan, mesh: Mesh, names: Sequence[str]
) -> Any:
    """`make_state(*args)`, laid out like the arguments of the plan's step that it is.

    Args:
      names: of the step's parameters, in order.

    Raises:
      StateError: the result is no argument of the step, nor a tuple of several.
    """
    dynamic = [i for i, arg in enumerate(args) if _is_dynamic(arg)]
    found: dict[str, Any] = {}

    def make(*arrays: Any) -> list[Any]:
        full = list(args)
        for i, array in zip(dynamic, arrays, strict=True):
            full[i] = nnx.merge(array, tagged=False) if nnx.has_nodes(array) else array
        result, keys = nnx.split_with_keys(make_state(*full), tagged=False)
        leaves, found["tree"] = jax.tree.flatten(result)
        found["keys"], found["is_tuple"] = keys, type(result) in (tuple, list)
        return leaves

    inputs = [nnx.split(args[i], tagged=False) if nnx.has_objects(args[i]) else args[i] for i in dynamic]
    traced = jax.jit(make).trace(*inputs)
    program, values = constants.hoist(traced.jaxpr)
    types = [(tuple(aval.shape), str(aval.dtype)) for aval in traced.jaxpr.out_avals]
    layouts = _layouts(found["keys"], types, found["is_tuple"], plan, names)
    shardings = [NamedSharding(mesh, layout.partition_spec) for layout in layouts]
    make_leaves = jax.jit(jex_core.jaxpr_as_fun(program), out_shardings=shardings)
    result = found["tree"].unflatten(make_leaves(*jax.tree.leaves(inputs), *values))
    return nnx.merge(result, tagged=False) if nnx.has_nodes(result) else result


def _is_dynamic(arg: Any) -> bool:
    """Whether an argument of `make_state` holds arrays, rather than sizes and settings."""
    leaves = jax.tree.leaves(arg, is_leaf=nnx.is_object)
    return bool(leaves) and all(isinstance(x, (jax.Array, np.ndarray)) or nnx.is_object(x) for x in leaves)


def _layouts(
    keys: Sequence[nnx.Keys],
    types: Sequence[tuple[tuple[int, ...], str]],
    is_tuple: bool,
    plan: Plan,
    names: Sequence[str],
) -> list[LeafLayout]:
    """The planned layout of each leaf of the new state."""
    arguments = {name: _below(name, plan.inputs) for name in names}
    whole = {"".join(key): kind for key, kind in zip(keys, types, strict=True)}
    for layouts in arguments.values():
        if whole and _types(layouts) == whole:
            return [layouts["".join(key)] for key in keys]
    if not is_tuple:
        raise _mismatch(whole, arguments, plan)
    parts: dict[str, _Types] = {}
    for key, kind in zip(keys, types, strict=True):
        parts.setdefault(key[0], {})["".join(key[1:])] = kind
    remaining = list(arguments)
    chosen: dict[str, dict[str, LeafLayout]] = {}
    for index, part in parts.items():
        name = next((name for name in remaining if _types(arguments[name]) == part), None)
        if name is None:
            raise _mismatch(
                part, {name: arguments[name] for name in remaining}, plan, f"element {index[1:-1]} of "
            )
        remaining.remove(name)
        chosen[index] = arguments[name]
    return [chosen[key[0]]["".join(key[1:])] for key in keys]


def _below(name: str, leaves: Sequence[LeafLayout]) -> dict[str, LeafLayout]:
    """The leaves of an argument by their path below its name."""
    found = {}
    for leaf in leaves:
        rest = leaf.path[len(name) :]
        if leaf.path.startswith(name) and (not rest or rest[0] in ".["):
            found[rest] = leaf
    return found


def _types(layouts: dict[str, LeafLayout]) -> _Types:
    return {path: (layout.shape, layout.dtype) for path, layout in layouts.items()}


def _mismatch(
    part: _Types, arguments: dict[str, dict[str, LeafLayout]], plan: Plan, what: str = ""
) -> StateError:
    """The error for a state that is no argument: its differences from the one that is most like it."""
    nearest = max(arguments, key=lambda name: len(part.keys() & arguments[name].keys()), default=None)
    taken = _types(arguments[nearest]) if nearest is not None else {}
    problems = [f"{nearest}{path} is missing" for path in taken if path not in part]
    problems += [f"{nearest or ''}{path} is not in the plan" for path in part if path not in taken]
    problems += [
        f"{nearest}{path} is {describe_array(*reversed(part[path]))} and was planned as "
        f"{describe_array(*reversed(taken[path]))}"
        for path in part
        if path in taken and part[path] != taken[path]
    ]
    shown = "; ".join(problems[:_SHOWN]) + (
        f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    )
    return StateError(
        f"{what}what make_state returns must be an argument of {plan.program}, or a tuple of several",
        got=shown,
        action=f"Call {plan.program}.plan(...) with what make_state returns, for instance "
        "jax.eval_shape(make_state, ...)",
    )
