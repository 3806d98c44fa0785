"""Floating point operations of a step as written: two per multiply-add of its matmuls and convolutions."""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import jax
from jax.extend import core as jex_core


def step_flops(step: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Of one step on the whole batch, loops' lengths and rematerialised work included."""
    return _flops(jax.make_jaxpr(step)(*arguments).jaxpr)


def _flops(jaxpr: Any) -> float:
    return sum(_equation(eqn) for eqn in jaxpr.eqns)


def _equation(eqn: Any) -> float:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2.0 * eqn.outvars[0].aval.size * math.prod(left[dim] for dim in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        return _convolution(eqn)
    inside = sum(_flops(body) for value in eqn.params.values() for body in _bodies(value))
    return inside * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else inside


def _bodies(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [body for item in value for body in _bodies(item)]
    if isinstance(value, jex_core.ClosedJaxpr):
        return [value.jaxpr]
    return [value] if isinstance(value, jex_core.Jaxpr) else []


def _convolution(eqn: Any) -> float:
    """2 x outputs x input features x pairs of output and window position that read an input, not padding or a gap."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    left, right, out = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    pairs = math.prod(
        _pairs(left[i], right[k], out[o], stride, gap, spread, before)
        for i, k, o, stride, gap, spread, (before, _) in zip(
            numbers.lhs_spec[2:],
            numbers.rhs_spec[2:],
            numbers.out_spec[2:],
            params["window_strides"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            params["padding"],
            strict=True,
        )
    )
    outputs = out[numbers.out_spec[0]] * out[numbers.out_spec[1]]
    return 2.0 * outputs * right[numbers.rhs_spec[1]] * pairs / params["batch_group_count"]


def _pairs(inputs: int, window: int, outputs: int, stride: int, gap: int, spread: int, before: int) -> int:
    """Pairs along one spatial dim."""
    last = (inputs - 1) * gap
    places = (o * stride - before + k * spread for o in range(outputs) for k in range(window))
    return sum(0 <= place <= last and place % gap == 0 for place in places)
