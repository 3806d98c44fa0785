"""Layouts: how a value lies over the axes of a mesh.

A layout has one code per mesh axis: `d >= 0` if the axis splits dim `d`, `WHOLE` if the value is the same on
every device along the axis, `PARTIAL` if the devices along the axis hold terms of a sum that is still
pending, `PARTIAL_OTHER` if they hold terms of another pending reduction (max, min, ...). A dim split over
several axes is split in mesh order, first axis major. Sets of layouts are int8 arrays `[n, axes]`.
"""
from __future__ import annotations

from collections.abc import Sequence
import itertools
import math

import numpy as np

WHOLE, PARTIAL, PARTIAL_OTHER = -1, -2, -3

Layout = tuple[int, ...]
Spec = tuple[tuple[str, ...], ...]


def all_layouts(shape: Sequence[int], axis_sizes: Sequence[int]) -> np.ndarray:
    """Every layout of a value of `shape` that splits each dim evenly; int8 `[n, axes]`, the whole one first."""
    codes = np.array(list(itertools.product(range(-1, len(shape)), repeat=len(axis_sizes))), np.int8)
    return codes[divides(shape, codes, axis_sizes)]


def divides(shape: Sequence[int], codes: np.ndarray, axis_sizes: Sequence[int]) -> np.ndarray:
    """Which of `codes` `[n, axes]` split every dim of `shape` evenly; bool `[n]`."""
    good = np.ones(len(codes), bool)
    for dim, size in enumerate(shape):
        parts = split_factor(codes, axis_sizes, dim)
        good &= (parts <= max(size, 1)) & (size % parts == 0)
    return good


def split_factor(codes: np.ndarray, axis_sizes: Sequence[int], dim: int) -> np.ndarray:
    """In how many parts each layout splits `dim`; int64 `[n]`."""
    return np.where(codes == dim, np.asarray(axis_sizes, np.int64), 1).prod(axis=1)


def parts(codes: np.ndarray, axis_sizes: Sequence[int]) -> np.ndarray:
    """In how many distinct parts each layout splits the value over the devices; int64 `[n]`."""
    return np.where(codes >= 0, np.asarray(axis_sizes, np.int64), 1).prod(axis=1)


def local_bytes(shape: Sequence[int], itemsize: float, codes: np.ndarray, axis_sizes: Sequence[int]) -> np.ndarray:
    """Bytes per device under each layout; float64 `[n]`. A partial sum is held whole."""
    return math.prod(shape) * itemsize / parts(codes, axis_sizes)


def held_bytes(shape: Sequence[int], itemsize: float, codes: np.ndarray, axis_sizes: Sequence[int],
               tile: tuple[int, int] | None) -> np.ndarray:
    """Bytes per device of an array in memory, where arrays lie in tiles of (rows, columns); float64 `[n]`.

    Two dims are padded to whole tiles (few rows to a power of two): those that need least padding.
    """
    size = local_bytes(shape, itemsize, codes, axis_sizes)
    if tile is None or len(shape) < 2 or not math.prod(shape):
        return size
    local = np.stack([dim / split_factor(codes, axis_sizes, d) for d, dim in enumerate(shape)], axis=-1)
    rows = np.minimum(tile[0], 2 ** np.ceil(np.log2(local)))
    as_row, as_column = (np.ceil(local / unit) * unit / local for unit in (rows, tile[1]))
    pairs = itertools.permutations(range(len(shape)), 2)
    return size * np.min([as_row[:, i] * as_column[:, j] for i, j in pairs], axis=0)


def unique(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct layouts in order of first appearance, index of each row among them)."""
    _, first, inverse = np.unique(codes, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return codes[np.sort(first)], rank[inverse.reshape(-1)]


def to_spec(layout: Sequence[int], rank: int, axis_names: Sequence[str]) -> Spec:
    """Per dim the names of the axes that split it, major first; pending sums are not part of a spec."""
    return tuple(tuple(name for name, code in zip(axis_names, layout) if code == dim) for dim in range(rank))


def from_spec(spec: Sequence, axis_names: Sequence[str]) -> Layout:
    """The layout of a PartitionSpec-like sequence (None, a name, or names per dim)."""
    layout = [WHOLE] * len(axis_names)
    for dim, entry in enumerate(spec):
        for name in (entry,) if isinstance(entry, str) else tuple(entry or ()):
            layout[axis_names.index(name)] = dim
    return tuple(layout)


def show(layout: Sequence[int], axis_names: Sequence[str]) -> str:
    """A layout for people: "x:dim 0, y:partial sum"."""
    words = {WHOLE: None, PARTIAL: "partial sum", PARTIAL_OTHER: "partial reduction"}
    said = [f"{n}:{words.get(c, f'dim {c}')}" for n, c in zip(axis_names, layout) if words.get(c, 1)]
    return ", ".join(said) or "whole"
