"""Whether a result is an update of an argument: made from it element by element, as by `0.9 * m + g`."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from jax.extend import core as jex_core

from . import compat

_ELEMENTWISE = frozenset(
    """
    abs add add_any and atan2 ceil clamp convert_element_type copy cos div eq erf exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow reduce_precision rem round
    rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sqrt
    square sub tan tanh xor
""".split()
)
_CALLS = ("closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2")
_BODIES = ("jaxpr", "call_jaxpr")  # the parameters that hold their bodies


def update_finder(jaxpr: jex_core.ClosedJaxpr) -> Callable[[int, int], bool]:
    """A function of an input and an output: whether the output is computed from the input element by element,
    all values on the way having its shape."""
    makers: dict[int, dict[Any, Any]] = {}
    body = compat.open_jaxpr(jaxpr)

    @functools.cache
    def sources(result: int) -> frozenset[int]:
        return frozenset(_sources(body, result, makers))

    return lambda source, result: source in sources(result)


def _sources(jaxpr: Any, result: int, makers: dict[int, dict[Any, Any]]) -> set[int]:
    """The inputs that an output is an update of; `makers` remembers which equation makes a variable."""
    if id(jaxpr) not in makers:
        makers[id(jaxpr)] = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    made_by = makers[id(jaxpr)]
    index = {var: i for i, var in enumerate(jaxpr.invars)}
    found: set[int] = set()
    seen: set[Any] = set()
    waiting = [jaxpr.outvars[result]]
    while waiting:
        var = waiting.pop()
        if isinstance(var, compat.Literal) or var in seen:
            continue
        seen.add(var)
        if var in index:
            found.add(index[var])
        elif var in made_by:
            operands = _operands(made_by[var], var, makers)
            waiting += [v for v in operands if v.aval.shape == var.aval.shape]
    return found


def _operands(eqn: Any, var: Any, makers: dict[int, dict[Any, Any]]) -> list[Any]:
    """The operands that a result of an equation is computed from element by element."""
    if eqn.primitive.name == "optimization_barrier":
        return [eqn.invars[eqn.outvars.index(var)]]
    if eqn.primitive.name in _ELEMENTWISE:
        return list(eqn.invars)
    body = next((eqn.params[name] for name in _BODIES if name in eqn.params), None)
    if body is None or eqn.primitive.name not in _CALLS:
        return []
    body = compat.open_jaxpr(body)
    return [eqn.invars[i] for i in _sources(body, eqn.outvars.index(var), makers)]
