"""Elementwise work, shapes, indexing, sorting and dtypes."""

from __future__ import annotations

import math

import jax
from jax import lax
import jax.numpy as jnp

from .author import MOST_ELEMENTS, Author, Line, Type, operation

SMOOTH = {
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "erf": lax.erf,
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "expm1": lambda x: jnp.expm1(-x * x),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    "rsqrt": lambda x: lax.rsqrt(x * x + 1),
    "cbrt": jnp.cbrt,
    "square": lambda x: 0.3 * x * x,
    "integer_pow": lambda x: 0.1 * x**3,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "lgamma": lambda x: lax.lgamma(jnp.abs(x) + 1),
    "digamma": lambda x: lax.digamma(jnp.abs(x) + 1),
    "erf_inv": lambda x: lax.erf_inv(0.5 * jnp.tanh(x)),
    "gelu": jax.nn.gelu,
    "softplus": jax.nn.softplus,
}
BITWISE = {
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "relu": lambda x: jnp.maximum(x, 0),
    "copy": jnp.copy,
    "stop_gradient": lax.stop_gradient,
    "half": lambda x: (x * 0.5).astype(x.dtype),
}
SMOOTH_PAIRS = {
    "div": lambda x, y: x / (1 + y * y),
    "atan2": lambda x, y: jnp.arctan2(x, 2 + jnp.abs(y)),
    "pow": lambda x, y: (1 + jnp.abs(x)) ** jnp.tanh(y),
    "mul": lambda x, y: x * y,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "logaddexp": jnp.logaddexp,
}
EXACT_PAIRS = {"max": jnp.maximum, "min": jnp.minimum}
INTEGER_PAIRS = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "xor": jnp.bitwise_xor,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "rem": lambda x, y: x % (jnp.abs(y) + 1),
    "shift": lambda x, y: x << (y & 3),
    "max": jnp.maximum,
}
COMPARISONS = {"eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "ge": jnp.greater_equal}


@operation
def smooth(a: Author) -> Line | None:
    x, name = a.pick(lambda t: t.is_float), a.choose(sorted(SMOOTH))
    return None if x is None else a.line(name, SMOOTH[name], x)


@operation
def bitwise(a: Author) -> Line | None:
    x, name = a.pick(lambda t: t.is_float or t.dtype == "int32"), a.choose(sorted(BITWISE))
    return None if x is None else a.line(name, BITWISE[name], x, exact=True)


def _mates(a: Author, fits) -> tuple[int, int] | None:
    """Two values of one dtype that broadcast."""
    x = a.pick(fits)
    if x is None:
        return None
    mine = a.values[x]

    def broadcasts(t: Type) -> bool:
        try:
            shape = jnp.broadcast_shapes(t.shape, mine.shape)
        except ValueError:
            return False
        return t.dtype == mine.dtype and math.prod(shape) <= MOST_ELEMENTS

    return x, a.pick(broadcasts)


@operation
def smooth_pair(a: Author) -> Line | None:
    pair, name = _mates(a, lambda t: t.is_float), a.choose(sorted(SMOOTH_PAIRS))
    return None if pair is None else a.line(name, SMOOTH_PAIRS[name], *pair)


@operation
def exact_pair(a: Author) -> Line | None:
    pair, name = _mates(a, lambda t: t.is_float), a.choose(sorted(EXACT_PAIRS))
    return None if pair is None else a.line(name, EXACT_PAIRS[name], *pair, exact=True)


@operation
def integer_pair(a: Author) -> Line | None:
    pair, name = _mates(a, lambda t: t.is_int), a.choose(sorted(INTEGER_PAIRS))
    return None if pair is None else a.line(name, INTEGER_PAIRS[name], *pair)


@operation
def compare(a: Author) -> Line | None:
    pair, name = _mates(a, lambda t: t.exact and t.dtype != "key"), a.choose(sorted(COMPARISONS))
    if pair is None or not a.values[pair[1]].exact:
        return None
    return a.line(name, COMPARISONS[name], *pair)


@operation
def select(a: Author) -> Line | None:
    mask = a.pick(lambda t: t.dtype == "bool" and t.exact)
    if mask is None:
        return None
    x = a.pick(lambda t: t.is_float and t.shape == a.values[mask].shape)
    if x is None:
        return a.line("where 1 0", lambda m: jnp.where(m, 1.0, -0.5), mask, exact=True)
    return a.line("where", lambda m, v: jnp.where(m, v, 0.25), mask, x, exact=True)


@operation
def rounding(a: Author) -> Line | None:
    x = a.pick(lambda t: t.is_float and t.exact)
    name = a.choose(("floor", "ceil", "round", "sign", "clamp", "reduce_precision", "is_finite"))
    functions = {
        "floor": jnp.floor,
        "ceil": jnp.ceil,
        "round": jnp.round,
        "sign": jnp.sign,
        "is_finite": jnp.isfinite,
        "clamp": lambda v: lax.clamp(jnp.asarray(-0.5, v.dtype), v, jnp.asarray(0.75, v.dtype)),
        "reduce_precision": lambda v: lax.reduce_precision(v, 5, 4),
    }
    return None if x is None else a.line(name, functions[name], x, exact=True)


@operation
def convert(a: Author) -> Line | None:
    x = a.pick(lambda t: t.dtype != "key" and t.exact)
    dtype = a.choose(("float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool"))
    return None if x is None else a.line(f"to {dtype}", lambda v: v.astype(dtype), x, exact=True)


@operation
def widen(a: Author) -> Line | None:
    x = a.pick(lambda t: t.is_float)
    return None if x is None else a.line("to float32", lambda v: v.astype("float32"), x, exact=True)


@operation
def tiny_floats(a: Author) -> Line | None:
    """Through a dtype that few operations know."""
    x = a.pick(lambda t: t.dtype == "float32" and t.exact)
    dtype = a.choose(("float8_e4m3fn", "float8_e5m2", "int4"))
    return None if x is None else a.line(f"via {dtype}", lambda v: v.astype(dtype).astype("float32"), x, exact=True)


@operation
def bitcast(a: Author) -> Line | None:
    x = a.pick(lambda t: t.dtype == "float32" and t.exact)
    return None if x is None else a.line("bitcast", lambda v: lax.bitcast_convert_type(v, "int32") >> 20, x)


@operation
def complex_parts(a: Author) -> Line | None:
    x = a.floats()
    return None if x is None else a.line("complex", lambda v: jnp.abs(lax.complex(v, 0.5 * v) * (1 + 1j)), x)


# Shapes


@operation
def reshape(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0 and t.size > 0)
    if x is None:
        return None
    size = a.values[x].size
    first = a.choose([d for d in range(1, size + 1) if size % d == 0])
    rest = size // first
    second = a.choose([d for d in range(1, rest + 1) if rest % d == 0])
    shape = a.choose(((first, rest), (first, second, rest // second), (size,)))
    return a.line(f"reshape {shape}", lambda v: v.reshape(shape), x, exact=True)


@operation
def transpose(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 1)
    if x is None:
        return None
    order = list(range(a.values[x].rank))
    shift = a.whole(1, len(order) - 1)
    order = order[shift:] + order[:shift]
    return a.line(f"transpose {order}", lambda v: v.transpose(order), x, exact=True)


@operation
def broadcast(a: Author) -> Line | None:
    x, size = a.pick(lambda t: t.rank < 4), a.choose((2, 3, 4, 8))
    if x is None:
        return None
    at = a.whole(0, a.values[x].rank)
    return a.line(f"repeat {size} at {at}", lambda v: jnp.repeat(jnp.expand_dims(v, at), size, at), x, exact=True)


@operation
def reverse(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0)
    dim = None if x is None else a.whole(0, a.values[x].rank - 1)
    return None if x is None else a.line(f"rev {dim}", lambda v: lax.rev(v, (dim,)), x, exact=True)


@operation
def concatenate(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0)
    if x is None:
        return None
    mine, dim = a.values[x], a.whole(0, a.values[x].rank - 1)
    y = a.pick(
        lambda t: (
            t.dtype == mine.dtype
            and t.rank == mine.rank
            and t.shape[:dim] + t.shape[dim + 1 :] == mine.shape[:dim] + mine.shape[dim + 1 :]
        )
    )
    return a.line(f"concatenate {dim}", lambda v, w: jnp.concatenate([v, w], dim), x, y, exact=True)


@operation
def pad(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0 and t.is_float)
    if x is None:
        return None
    amount = a.choose(((1, 1, 0), (0, 2, 0), (2, 0, 1), (-1, 1, 0), (0, 0, 1)))
    dim = a.whole(0, a.values[x].rank - 1)
    config = [amount if d == dim else (0, 0, 0) for d in range(a.values[x].rank)]
    return a.line(f"pad {config}", lambda v: lax.pad(v, jnp.asarray(0.5, v.dtype), config), x, exact=True)


@operation
def strided_slice(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0 and max(t.shape) > 1)
    if x is None:
        return None
    shape = a.values[x].shape
    dim = a.choose([d for d, s in enumerate(shape) if s > 1])
    start = a.whole(0, shape[dim] - 2)
    stop, step = a.whole(start + 1, shape[dim]), a.whole(1, 2)
    return a.line(
        f"slice {start}:{stop}:{step} of {dim}", lambda v: lax.slice_in_dim(v, start, stop, step, dim), x, exact=True
    )


@operation
def roll(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0)
    dim = None if x is None else a.whole(0, a.values[x].rank - 1)
    return None if x is None else a.line(f"roll {dim}", lambda v: jnp.roll(v, 1, dim), x, exact=True)


# Indexing


def _indices(a: Author) -> int | None:
    return a.pick(lambda t: t.dtype == "int32" and t.rank <= 2 and t.exact)


@operation
def take(a: Author) -> Line | None:
    x, i = a.pick(lambda t: t.rank > 0 and t.size > 0 and t.is_float), _indices(a)
    if x is None or i is None:
        return None
    dim, mode = a.whole(0, a.values[x].rank - 1), a.choose(("clip", "fill", "wrap"))
    return a.line(
        f"take {dim} {mode}", lambda v, k: jnp.take(v, k, axis=dim, mode=mode, fill_value=0), x, i, exact=True
    )


@operation
def take_along(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0 and t.is_float and t.exact)
    if x is None:
        return None
    dim = a.whole(0, a.values[x].rank - 1)
    return a.line(f"take_along {dim}", lambda v: jnp.take_along_axis(v, jnp.argsort(v, axis=dim), dim), x, exact=True)


@operation
def dynamic_slice(a: Author) -> Line | None:
    x, i = a.pick(lambda t: t.rank > 0 and t.size > 0), a.pick(lambda t: t.dtype == "int32" and t.exact and t.size > 0)
    if x is None or i is None:
        return None
    dim = a.whole(0, a.values[x].rank - 1)
    size = a.whole(1, a.values[x].shape[dim])
    return a.line(
        f"dynamic_slice {size} of {dim}",
        lambda v, k: lax.dynamic_slice_in_dim(v, k.reshape(-1)[0], size, dim),
        x,
        i,
        exact=True,
    )


@operation
def dynamic_update(a: Author) -> Line | None:
    x, i = a.pick(lambda t: t.rank > 0 and t.size > 0), a.pick(lambda t: t.dtype == "int32" and t.exact and t.size > 0)
    if x is None or i is None:
        return None
    dim = a.whole(0, a.values[x].rank - 1)
    size = a.whole(1, a.values[x].shape[dim])

    def update(v, k):
        part = lax.slice_in_dim(v, 0, size, axis=dim)
        return lax.dynamic_update_slice_in_dim(v, lax.rev(part, (dim,)), k.reshape(-1)[0], dim)

    return a.line(f"dynamic_update_slice {size} of {dim}", update, x, i, exact=True)


@operation
def scatter(a: Author) -> Line | None:
    x, i = a.pick(lambda t: t.rank > 0 and t.size > 0 and t.dtype == "float32"), _indices(a)
    if x is None or i is None:
        return None
    how = a.choose(("add", "max", "min", "multiply"))
    mode = a.choose(("drop", "clip"))

    def scattered(v, k):
        updates = jnp.full((*k.shape, *v.shape[1:]), 0.75, v.dtype)
        return getattr(v.at[k], how)(updates, mode=mode)

    return a.line(f"scatter {how} {mode}", scattered, x, i)


@operation
def embedding(a: Author) -> Line | None:
    x, i = a.pick(lambda t: t.rank == 2 and t.dtype == "float32" and t.size > 0), _indices(a)
    if x is None or i is None:
        return None
    return a.line("embedding gradient", jax.grad(lambda v, k: (jnp.sin(v[k % v.shape[0]]) ** 2).sum()), x, i)


@operation
def update_several(a: Author) -> Line | None:
    """A gather and a scatter over two indexed dims."""
    x = a.pick(lambda t: t.rank >= 2 and t.dtype == "float32" and t.size > 0)
    if x is None:
        return None

    def swap(v):
        i = jnp.arange(min(v.shape[:2]))
        return v.at[i, i].set(v[i[::-1], i] * 2)

    return a.line("diagonal update", swap, x, exact=True)


# Order


@operation
def sort(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0 and t.exact and (t.is_float or t.is_int))
    if x is None:
        return None
    dim, how = a.whole(0, a.values[x].rank - 1), a.choose(("sort", "argsort", "pairs", "descending"))
    functions = {
        "sort": lambda v: jnp.sort(v, axis=dim),
        "argsort": lambda v: jnp.argsort(v, axis=dim, stable=True),
        "pairs": lambda v: lax.sort((v, lax.rev(v, (dim,))), dimension=dim, num_keys=1, is_stable=True),
        "descending": lambda v: jnp.sort(v, axis=dim, descending=True),
    }
    return a.line(f"{how} {dim}", functions[how], x, exact=True)


@operation
def top_k(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0 and t.exact and t.dtype == "float32" and t.shape[-1] > 0)
    if x is None:
        return None
    k = a.whole(1, a.values[x].shape[-1])
    return a.line(f"top_k {k}", lambda v: tuple(lax.top_k(v, k)), x, exact=True)


@operation
def arg_extreme(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0 and t.exact and t.is_float and t.size > 0)
    if x is None:
        return None
    dim, name = a.whole(0, a.values[x].rank - 1), a.choose(("argmax", "argmin"))
    return a.line(f"{name} {dim}", lambda v: getattr(jnp, name)(v, axis=dim), x)


@operation
def one_hot(a: Author) -> Line | None:
    i, count = a.pick(lambda t: t.dtype == "int32" and t.rank <= 2 and t.exact), a.choose((3, 4, 8))
    return None if i is None else a.line(f"one_hot {count}", lambda k: jax.nn.one_hot(k, count), i, exact=True)


@operation
def iota(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0)
    if x is None:
        return None
    shape, dim = a.values[x].shape, a.whole(0, a.values[x].rank - 1)
    return a.line(f"iota {dim}", lambda v: lax.broadcasted_iota("int32", shape, dim), x)
