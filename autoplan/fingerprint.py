"""A hash of a traced program, the same in every process and at every address.

The jaxpr is walked rather than printed: printing a large one takes seconds, and shows object addresses and
sets in an order that changes from process to process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import enum
import hashlib
import re
from typing import Any

import jax
from jax.extend import core as jex_core
import numpy as np

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def fingerprint(jaxpr: jex_core.ClosedJaxpr, extra: Iterable[str] = ()) -> str:
    """32 hex digits that identify the program: its equations, types and names of nested functions, and
    `extra`.

    Values of constants, source lines, addresses and weak types do not count.
    """
    known: dict[int, tuple[Any, str]] = {}
    parts = [_jaxpr(jaxpr, known), *extra]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _jaxpr(jaxpr: Any, known: dict[int, tuple[Any, str]]) -> str:
    """The digest of a jaxpr, open or closed; `known` remembers those that were seen, and keeps them alive."""
    if id(jaxpr) in known:
        return known[id(jaxpr)][1]
    body = getattr(jaxpr, "jaxpr", jaxpr)
    names: dict[Any, str] = {}

    def name(var: Any) -> str:
        if hasattr(var, "val"):
            return f"{_text(var.val, known)}:{_type(var.aval)}"
        return names.setdefault(var, str(len(names)))

    def typed(var: Any) -> str:
        return f"{name(var)}:{_type(var.aval)}"

    lines = [" ".join(map(typed, body.constvars)), " ".join(map(typed, body.invars))]
    for eqn in body.eqns:
        params = " ".join(
            f"{key}={_text(eqn.params[key], known)}" for key in sorted(eqn.params) if key != "weak_type"
        )
        operands, results = " ".join(map(name, eqn.invars)), " ".join(map(typed, eqn.outvars))
        lines.append(f"{results} = {eqn.primitive.name}[{params}] {operands}")
    lines.append(" ".join(map(name, body.outvars)))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    known[id(jaxpr)] = (jaxpr, digest)
    return digest


def _type(aval: Any) -> str:
    return f"{aval.dtype}{aval.shape}" if hasattr(aval, "dtype") and hasattr(aval, "shape") else str(aval)


def _text(value: Any, known: dict[int, tuple[Any, str]]) -> str:
    """A parameter of an equation as text."""
    if value is None or isinstance(value, (bool, int, float, complex, str, enum.Enum)):
        return str(value)
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return _jaxpr(value, known)
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{_text(k, known)}:{_text(v, known)}" for k, v in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(_text(item, known) for item in value)) + "}"
    if isinstance(value, jax.sharding.PartitionSpec):
        reduced = [sorted(map(str, getattr(value, kind, ()))) for kind in ("unreduced", "reduced")]
        return f"P({','.join(map(str, value))};{reduced})"
    if isinstance(value, jax.sharding.NamedSharding):
        return f"{_text(value.spec, known)}@{dict(value.mesh.shape)}"
    if isinstance(value, (np.ndarray, jax.Array)):
        return f"{value.dtype}{value.shape}" if value.size > 1 else f"{value.dtype}{value.shape}={value}"
    if isinstance(value, Sequence):
        return type(value).__name__ + "(" + ",".join(_text(item, known) for item in value) + ")"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _ADDRESS.sub("", str(value))
