"""Loops, branches, calls, derivatives and callbacks, with programs of their own inside."""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from .author import Author, Line, Program, Type, operation


def _body(a: Author, *inputs: Type) -> Program | None:
    """A program from `inputs` to something like the first of them."""
    return a.inner(
        [Type(t.shape, t.dtype, False) for t in inputs],
        lambda t: t.shape == inputs[0].shape and t.dtype == inputs[0].dtype,
    )


def _bounded(x: jax.Array) -> jax.Array:
    """What goes round a loop stays of the order of 1."""
    return jnp.tanh(x)


@operation
def scan(a: Author) -> Line | None:
    carry = a.floats()
    stacked = a.pick(lambda t: t.dtype == "float32" and t.rank >= 1 and 1 <= t.shape[0] <= 8)
    if carry is None or stacked is None:
        return None
    t, xs = a.values[carry], a.values[stacked]
    body = _body(a, t, Type(xs.shape[1:], xs.dtype))
    reverse = a.flip()
    if body is None:
        return None

    def run(c, v):
        def step(c, x):
            new = _bounded(body(c, x)[0])
            return new, (new.mean(), x * 2)

        last, (means, doubled) = lax.scan(step, c, v, reverse=reverse)
        return last, means, doubled

    return a.line(f"scan{' reverse' if reverse else ''} {{{body}}}", run, carry, stacked)


@operation
def scan_gradient(a: Author) -> Line | None:
    carry = a.floats()
    if carry is None:
        return None
    body = _body(a, a.values[carry])
    saved = a.flip()
    if body is None:
        return None

    def loss(v):
        def step(c, _):
            return _bounded(body(c)[0]), None

        return lax.scan(jax.checkpoint(step) if saved else step, v, None, length=3)[0].sum()

    return _derived(a, f"scan gradient {{{body}}}", jax.grad(loss), carry)


@operation
def fori(a: Author) -> Line | None:
    carry = a.floats()
    body = None if carry is None else _body(a, a.values[carry])
    if body is None:
        return None
    return a.line(f"fori {{{body}}}", lambda v: lax.fori_loop(0, 3, lambda i, c: _bounded(body(c)[0] + i), v), carry)


@operation
def while_loop(a: Author) -> Line | None:
    carry = a.floats()
    body = None if carry is None else _body(a, a.values[carry])
    if body is None:
        return None

    def run(v):
        count, out = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, _bounded(body(s[1])[0])), (0, v))
        return out

    return a.line(f"while {{{body}}}", run, carry)


@operation
def cond(a: Author) -> Line | None:
    x, flag = a.floats(), a.pick(lambda t: t.dtype in ("bool", "int32") and t.exact and t.size > 0)
    if x is None or flag is None:
        return None
    one, other = _body(a, a.values[x]), _body(a, a.values[x])
    if one is None or other is None:
        return None
    return a.line(
        f"cond {{{one}}} {{{other}}}",
        lambda p, v: lax.cond(p.reshape(-1)[0] > 0, lambda u: one(u)[0], lambda u: other(u)[0], v),
        flag,
        x,
    )


@operation
def switch(a: Author) -> Line | None:
    x, index = a.floats(), a.pick(lambda t: t.dtype == "int32" and t.exact and t.size > 0)
    body = None if x is None or index is None else _body(a, a.values[x])
    if body is None:
        return None
    return a.line(
        f"switch {{{body}}}",
        lambda i, v: lax.switch(i.reshape(-1)[0] % 3, [jnp.sin, lambda u: body(u)[0], lambda u: u * 2], v),
        index,
        x,
    )


@operation
def mapped(a: Author) -> Line | None:
    x = a.pick(lambda t: t.dtype == "float32" and t.rank >= 1 and 1 <= t.shape[0] <= 8)
    if x is None:
        return None
    t = a.values[x]
    body, how = a.inner([Type(t.shape[1:], t.dtype, False)]), a.choose(("map", "vmap"))
    if body is None or how == "vmap" and "ragged" in str(body):  # which jax does not batch
        return None
    return a.line(
        f"{how} {{{body}}}",
        lambda v: lax.map(lambda u: body(u)[0], v) if how == "map" else jax.vmap(lambda u: body(u)[0])(v),
        x,
    )


@operation
def associative_scan(a: Author) -> Line | None:
    x = a.floats(1)
    if x is None or not a.values[x].size:
        return None
    dim = a.whole(0, a.values[x].rank - 1)
    return a.line(f"associative_scan {dim}", lambda v: lax.associative_scan(lambda p, q: 0.5 * (p + q), v, axis=dim), x)


@operation
def call(a: Author) -> Line | None:
    x = a.floats()
    body = None if x is None else a.inner([Type(a.values[x].shape, "float32", a.values[x].exact)])
    how = a.choose(("jit", "checkpoint", "checkpoint dots", "named"))
    if body is None:
        return None
    wrap = {
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "named": jax.named_call,
        "checkpoint dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    }[how]
    return (
        a.line(f"{how} {{{body}}}", lambda v: wrap(lambda u: body(u)[0])(v), x, exact=True)
        if not _uses_sums(body)
        else a.line(f"{how} {{{body}}}", lambda v: wrap(lambda u: body(u)[0])(v), x)
    )


def _uses_sums(body: Program) -> bool:
    return not body.types[body.outputs[0]].exact


@operation
def own_derivative(a: Author) -> Line | None:
    """custom_jvp and custom_vjp, with their derivatives taken."""
    x, how = a.floats(), a.choose(("jvp", "vjp"))
    if x is None:
        return None
    if how == "jvp":

        @jax.custom_jvp
        def f(v):
            return jnp.sin(v)

        f.defjvp(lambda primals, tangents: (f(primals[0]), 2 * tangents[0] * jnp.cos(primals[0])))
    else:

        @jax.custom_vjp
        def f(v):
            return jnp.sin(v)

        f.defvjp(lambda v: (f(v), v), lambda v, g: (3 * g * v,))
    return a.line(f"custom_{how}", lambda v: (f(v), jax.grad(lambda u: f(u).sum())(v)), x)


@operation
def derivative(a: Author) -> Line | None:
    x = a.floats()
    body = None if x is None else a.inner([Type(a.values[x].shape, "float32", False)], lambda t: t.dtype == "float32")
    how = a.choose(("grad", "jvp", "hvp", "linearize", "remat grad"))
    if body is None or any(word in str(body) for word in ("while", "fori", "callback", "max pool", "digamma")):
        return None

    def loss(v):
        return jnp.sum(jnp.sin(body(v)[0]))

    functions = {
        "grad": jax.grad(loss),
        "remat grad": jax.grad(jax.checkpoint(loss)),
        "jvp": lambda v: jax.jvp(loss, (v,), (jnp.cos(v),))[1],
        "hvp": lambda v: jax.jvp(jax.grad(loss), (v,), (jnp.cos(v),))[1],
        "linearize": lambda v: jax.linearize(loss, v)[1](v),
    }
    return _derived(a, f"{how} {{{body}}}", functions[how], x)


def _derived(a: Author, text: str, function, x: int) -> Line | None:
    """A line, if what it takes the derivative of has one."""
    try:
        line = a.line(text, function, x)
    except (TypeError, ValueError, NotImplementedError):
        return None
    return line if line is not None and all(t.dtype == "float32" for t in line.results) else None


@operation
def callback(a: Author) -> Line | None:
    x = a.floats()
    if x is None:
        return None

    def host(v):
        return np.asarray(v) * np.float32(0.5)

    return a.line(
        "pure_callback",
        lambda v: jax.pure_callback(host, jax.ShapeDtypeStruct(v.shape, v.dtype), v, vmap_method="sequential"),
        x,
    )


@operation
def barrier(a: Author) -> Line | None:
    x = a.floats()
    return None if x is None else a.line("optimization_barrier", lax.optimization_barrier, x, exact=True)
