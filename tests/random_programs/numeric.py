"""Reductions, windows, contractions, transforms, linear algebra and random draws."""

from __future__ import annotations

import math

import jax
from jax import lax
import jax.numpy as jnp

from .author import Author, Line, operation

REDUCTIONS = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "logsumexp": jax.nn.logsumexp,
    "var": jnp.var,
    "prod": lambda x, axis: jnp.prod(jnp.tanh(x), axis=axis),
    "norm": lambda x, axis: jnp.sqrt((x * x).sum(axis) + 1),
}
EXACT_REDUCTIONS = {"max": jnp.max, "min": jnp.min}
SCANS = {
    "cumsum": lambda x, axis: lax.cumsum(x, axis) / x.shape[axis],
    "cumlogsumexp": lax.cumlogsumexp,
    "cumprod": lambda x, axis: lax.cumprod(jnp.tanh(x), axis),
    "cummax": lax.cummax,
    "cumsum reverse": lambda x, axis: lax.cumsum(x, axis, reverse=True) / x.shape[axis],
}


def _axes(a: Author, rank: int) -> tuple[int, ...]:
    first = a.whole(0, rank - 1)
    return a.choose(((first,), tuple(range(rank)), tuple(range(first, rank))))


@operation
def reduce(a: Author) -> Line | None:
    x = a.floats(1)
    if x is None or not a.values[x].size:
        return None
    name, axes = a.choose(sorted(REDUCTIONS)), _axes(a, a.values[x].rank)
    return a.line(f"{name} {axes}", lambda v: REDUCTIONS[name](v, axis=axes), x)


@operation
def reduce_exact(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0 and t.is_float and t.size > 0)
    if x is None:
        return None
    name, axes = a.choose(sorted(EXACT_REDUCTIONS)), _axes(a, a.values[x].rank)
    return a.line(f"{name} {axes}", lambda v: EXACT_REDUCTIONS[name](v, axis=axes), x, exact=True)


@operation
def reduce_logic(a: Author) -> Line | None:
    x = a.pick(lambda t: t.rank > 0 and t.dtype in ("bool", "int32") and t.exact and t.size > 0)
    if x is None:
        return None
    axes, name = _axes(a, a.values[x].rank), a.choose(("any", "all", "sum", "max"))
    return a.line(f"{name} {axes}", lambda v: getattr(jnp, name)(v, axis=axes), x)


@operation
def normalise(a: Author) -> Line | None:
    x = a.floats(1)
    if x is None or not a.values[x].size:
        return None
    name = a.choose(("softmax", "log_softmax", "standardize"))
    return a.line(
        name, lambda v: getattr(jax.nn, name)(v, axis=-1, **({"epsilon": 0.1} if name == "standardize" else {})), x
    )


@operation
def running(a: Author) -> Line | None:
    x = a.floats(1)
    if x is None or not a.values[x].size:
        return None
    name, dim = a.choose(sorted(SCANS)), a.whole(0, a.values[x].rank - 1)
    return a.line(f"{name} {dim}", lambda v: SCANS[name](v, dim), x)


@operation
def window(a: Author) -> Line | None:
    x = a.pick(lambda t: t.dtype == "float32" and t.rank >= 2 and min(t.shape[-2:]) >= 2)
    if x is None:
        return None
    rank, how = a.values[x].rank, a.choose(("max", "mean"))
    size, stride, padding = a.whole(2, 3), a.whole(1, 2), a.choose(("SAME", "VALID"))
    dims = (1,) * (rank - 1) + (size,)
    strides = (1,) * (rank - 1) + (stride,)

    def pooled(v):
        if how == "max":
            return lax.reduce_window(v, -jnp.inf, lax.max, dims, strides, padding)
        return lax.reduce_window(v, 0.0, lax.add, dims, strides, padding) / size

    return a.line(f"window {how} {size} by {stride} {padding}", pooled, x)


@operation
def window_gradient(a: Author) -> Line | None:
    x = a.pick(lambda t: t.dtype == "float32" and t.rank == 2 and t.exact and min(t.shape) >= 2)
    if x is None:
        return None

    def loss(v):
        return (lax.reduce_window(v, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID") ** 2).sum()

    return a.line("max pool gradient", jax.grad(loss), x)


@operation
def convolution(a: Author) -> Line | None:
    """Over the last dim of [batch, features, positions], or the last two."""
    x = a.pick(lambda t: t.dtype == "float32" and t.rank in (3, 4) and min(t.shape[2:]) >= 2)
    if x is None:
        return None
    shape = a.values[x].shape
    space, channels = len(shape) - 2, shape[1]
    groups = a.choose(sorted({1, channels, math.gcd(channels, 2)}))
    outputs = groups * a.choose((1, 2, 4))
    size, stride = a.whole(1, 3), a.whole(1, 2)
    dilation, expand = a.choose(((1, 1), (2, 1), (1, 2)))
    padding = a.choose(("SAME", "VALID")) if expand == 1 else "SAME"
    window = size if padding == "SAME" else min(size, *(s for s in shape[2:]))
    if padding == "VALID":
        dilation = 1

    def convolve(v):
        count = outputs * (channels // groups) * window**space
        kernel = jnp.sin(jnp.arange(count, dtype=v.dtype)).reshape(outputs, channels // groups, *(window,) * space)
        kernel = kernel / math.sqrt(count) + 0 * v.sum()
        return lax.conv_general_dilated(
            v,
            kernel,
            (1 if expand > 1 else stride,) * space,
            padding if expand == 1 else [(1, 1)] * space,
            lhs_dilation=(expand,) * space,
            rhs_dilation=(dilation,) * space,
            feature_group_count=groups,
        )

    text = f"conv {outputs}x{window} groups {groups} stride {stride} dilation {dilation} expand {expand} {padding}"
    function = convolve
    if a.flip():
        text, function = text + ", gradient", jax.grad(lambda v: (convolve(v) ** 2).sum())
    return a.line(text, function, x)


@operation
def matmul(a: Author) -> Line | None:
    """With itself transposed, or with another value: sums over a shared dim, with batch dims where sizes agree."""
    x = a.pick(lambda t: t.rank >= 1 and t.dtype in ("float32", "bfloat16") and t.size > 0)
    if x is None:
        return None
    mine, dim = a.values[x], a.whole(0, a.values[x].rank - 1)
    y = a.pick(lambda t: t.dtype == mine.dtype and mine.shape[dim] in t.shape)
    other = a.values[y]
    to = a.choose([d for d, s in enumerate(other.shape) if s == mine.shape[dim]])
    batch = (
        [
            (d, e)
            for d, s in enumerate(mine.shape)
            for e, r in enumerate(other.shape)
            if s == r and d != dim and e != to
        ][:1]
        if a.flip()
        else []
    )
    numbers = (((dim,), (to,)), (tuple(d for d, _ in batch), tuple(e for _, e in batch)))
    scale = 1 / math.sqrt(mine.shape[dim])
    return a.line(
        f"dot_general {numbers}", lambda v, w: lax.dot_general(v, w, numbers) * jnp.asarray(scale, v.dtype), x, y
    )


@operation
def attention(a: Author) -> Line | None:
    x = a.pick(lambda t: t.dtype == "float32" and t.rank == 3 and t.size > 0)
    if x is None:
        return None
    shape = a.values[x].shape
    heads = a.choose([h for h in (1, 2, 3, 4) if shape[2] % h == 0])

    def attend(v):
        q = v.reshape(*v.shape[:2], heads, -1)
        return jax.nn.dot_product_attention(q, q, 0.5 * q, is_causal=True).reshape(v.shape)

    return a.line(f"attention {heads}", attend, x)


@operation
def ragged(a: Author) -> Line | None:
    x = a.pick(lambda t: t.dtype == "float32" and t.rank == 2 and t.size > 0)
    if x is None:
        return None
    rows, width = a.values[x].shape

    def grouped(v):
        weights = jnp.sin(jnp.arange(3 * width * 4, dtype=v.dtype)).reshape(3, width, 4) / math.sqrt(width)
        return lax.ragged_dot(v, weights, jnp.array([rows // 2, 0, rows - rows // 2], jnp.int32))

    return a.line("ragged_dot", grouped, x)


@operation
def fourier(a: Author) -> Line | None:
    x = a.floats(1)
    if x is None or not a.values[x].size:
        return None
    name = a.choose(("rfft", "fft", "ifft"))
    return a.line(name, lambda v: jnp.abs(getattr(jnp.fft, name)(v)) / math.sqrt(v.shape[-1]), x)


@operation
def linear_algebra(a: Author) -> Line | None:
    x = a.pick(
        lambda t: (
            t.dtype == "float32" and t.rank in (2, 3) and 1 <= t.shape[-1] <= 12 and t.shape[-2] <= 24 and t.size > 0
        )
    )
    if x is None:
        return None
    name = a.choose(("cholesky", "qr", "eigh", "solve", "triangular", "slogdet", "svd", "inverse"))

    def gram(v):
        return v.swapaxes(-1, -2) @ v / v.shape[-2] + 2 * jnp.eye(v.shape[-1])

    functions = {
        "cholesky": lambda v: jnp.linalg.cholesky(gram(v)),
        "qr": lambda v: jnp.abs(jnp.linalg.qr(gram(v))[1]),
        "eigh": lambda v: jnp.linalg.eigh(gram(v))[0],
        "slogdet": lambda v: jnp.linalg.slogdet(gram(v))[1],
        "solve": lambda v: jnp.linalg.solve(gram(v), v.swapaxes(-1, -2)),
        "inverse": lambda v: jnp.linalg.inv(gram(v)),
        "triangular": lambda v: lax.linalg.triangular_solve(jnp.tril(gram(v)), v, lower=True),
        "svd": lambda v: jnp.linalg.svd(gram(v), compute_uv=False),
    }
    return a.line(name, functions[name], x)


# Random draws, from a raw key: two words


@operation
def random_draw(a: Author) -> Line | None:
    key = a.pick(lambda t: t.dtype == "uint32" and t.shape == (2,) and t.exact)
    x = a.pick(lambda t: t.rank > 0)
    if key is None or x is None:
        return None
    shape = a.values[x].shape
    name = a.choose(("uniform", "normal", "bernoulli", "randint", "permutation", "gumbel", "split", "dropout"))
    functions = {
        "uniform": lambda k: jax.random.uniform(k, shape),
        "normal": lambda k: jax.random.normal(k, shape),
        "bernoulli": lambda k: jax.random.bernoulli(k, 0.5, shape),
        "gumbel": lambda k: jax.random.gumbel(k, shape),
        "randint": lambda k: jax.random.randint(k, shape, 0, 9),
        "permutation": lambda k: jax.random.permutation(k, 12),
        "split": lambda k: jax.random.split(k, 3)[1],
    }
    if name == "dropout":
        return a.line(
            name,
            lambda k, v: jnp.where(
                jax.random.bernoulli(jax.random.wrap_key_data(k), 0.5, v.shape), v, jnp.zeros_like(v)
            ),
            key,
            x,
            exact=True,
        )
    return a.line(name, functions[name], key, exact=name in ("uniform", "bernoulli"))
