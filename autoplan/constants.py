"""Arrays that a step closes over, turned into inputs of its program.

JAX bakes a closed-over array into the program, whole on every device. Here large ones become further inputs,
so that they are planned, sharded and reported like the arguments. Small ones stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from . import compat

LEAST_BYTES = 1 << 16
"""Constants below this stay in the program: a copy of them on every device costs nothing to speak of."""


def hoist(
    jaxpr: jex_core.ClosedJaxpr, least_bytes: int = LEAST_BYTES
) -> tuple[jex_core.ClosedJaxpr, tuple[Any, ...]]:
    """Moves large constants, also those of nested `jit`s, to new inputs after the existing ones.

    Returns:
      The program, and the values of its new inputs in order; the program itself and () if there are none.
    """
    body, small, values = _lift(compat.open_jaxpr(jaxpr), compat.consts_of(jaxpr), least_bytes)
    return (compat.close(body, small), tuple(values)) if values else (jaxpr, ())


def _lift(body: Any, consts: Sequence[Any], least_bytes: int) -> tuple[Any, list[Any], list[Any]]:
    """The body with large constants as further inputs, its other constants, and the values of the inputs."""
    kept = [(var, value) for var, value in zip(body.constvars, consts) if _size_bytes(var.aval) < least_bytes]
    moved = [
        (var, value) for var, value in zip(body.constvars, consts) if _size_bytes(var.aval) >= least_bytes
    ]
    var_of = {id(value): var for var, value in moved}
    eqns = []
    for eqn in body.eqns:
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name != "jit" or not isinstance(inner, jex_core.ClosedJaxpr):
            eqns.append(eqn)
            continue
        inside, small, values = _lift(compat.open_jaxpr(inner), compat.consts_of(inner), least_bytes)
        for value, var in zip(values, inside.invars[len(inside.invars) - len(values) :], strict=True):
            if id(value) not in var_of:
                var_of[id(value)] = compat.new_var(var.aval)
                moved.append((var_of[id(value)], value))
        eqns.append(
            _with_operands(eqn, inside, small, [var_of[id(value)] for value in values]) if values else eqn
        )
    if not moved:
        return body, list(consts), []
    names = tuple(f"closure[{i}]" for i in range(len(moved)))
    debug_info = body.debug_info._replace(arg_names=(*(body.debug_info.arg_names or ()), *names))
    body = body.replace(
        constvars=[var for var, _ in kept],
        invars=[*body.invars, *(var for var, _ in moved)],
        eqns=eqns,
        debug_info=debug_info,
    )
    return body, [value for _, value in kept], [value for _, value in moved]


def _with_operands(eqn: Any, body: Any, consts: Sequence[Any], operands: Sequence[Any]) -> Any:
    """A `jit` equation around a new body that takes further operands."""
    template = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns[0].params
    params = dict(eqn.params, jaxpr=compat.close(body, consts))
    for name in ("in_shardings", "in_layouts", "donated_invars"):
        params[name] = (*eqn.params[name], *(template[name] * len(operands)))
    return eqn.replace(params=params, invars=[*eqn.invars, *operands])


def _size_bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize
