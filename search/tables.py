"""Compressed matrices: an edge's matrix as distinct rows x distinct columns.

A resharding matrix of 200 x 200 strategies has often only 20 x 20 distinct entries, because strategies that
lay a tensor out in the same way share a row. Every pass of the search works on the small core.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Odd multipliers for the row hash; any fixed numbers do, equality is always checked afterwards.
_MULTIPLIERS = np.random.default_rng(0x5EED).integers(0, 2**63, size=4096, dtype=np.uint64) | np.uint64(1)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """matrix[a, b] == core[rows[a], cols[b]]; rows: [S_u] and cols: [S_v] class numbers, core: [R, C]."""

    rows: np.ndarray
    cols: np.ndarray
    core: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.cols)

    @property
    def T(self) -> Table:
        return Table(self.cols, self.rows, self.core.T)

    def dense(self) -> np.ndarray:
        """The full matrix [S_u, S_v]."""
        return self.core[self.rows[:, None], self.cols]

    def row(self, a: int) -> np.ndarray:
        """Row `a` of the matrix, [S_v]."""
        return self.core[self.rows[a]][self.cols]


def compress(matrix: np.ndarray) -> Table:
    """The table of a dense matrix [S_u, S_v]."""
    return tidy(np.arange(matrix.shape[0]), np.arange(matrix.shape[1]), np.asarray(matrix, dtype=np.float64))


def tidy(rows: np.ndarray, cols: np.ndarray, core: np.ndarray) -> Table:
    """A table whose classes are all used and all different."""
    row_first, row_class = _used(rows, len(core))
    core = core[row_first]
    col_first, col_class = _used(cols, core.shape[1])
    core = core[:, col_first]
    kept, merged = distinct_rows(core)
    if len(kept) < len(core):
        core, row_class = core[kept], merged[row_class]
    kept, merged = distinct_rows(core.T)
    if len(kept) < core.shape[1]:
        core, col_class = core[:, kept], merged[col_class]
    return Table(row_class, col_class, np.ascontiguousarray(core))


def _used(classes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The classes in use, and `classes` renumbered to them."""
    seen = np.zeros(count, dtype=bool)
    seen[classes] = True
    if seen.all():
        return np.arange(count), classes
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[classes]


def distinct_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index of the first of each kind of row, kind of every row), kinds numbered by first occurrence."""
    count, width = matrix.shape
    if count == 1 or width == 0:
        return np.zeros(1, dtype=np.int64), np.zeros(count, dtype=np.int64)
    bits = np.ascontiguousarray(matrix + 0.0).view(np.uint64)  # + 0.0 turns -0.0 into 0.0
    bits = (bits ^ (bits >> np.uint64(32))) * _multipliers(width)
    hashes = (bits ^ (bits >> np.uint64(29))).sum(axis=1)
    ordered = np.sort(hashes)
    if (ordered[1:] != ordered[:-1]).all():
        return np.arange(count), np.arange(count)
    first, kind = _renumber(np.unique(hashes, return_index=True, return_inverse=True))
    if len(first) < count and not np.array_equal(matrix[first[kind]], matrix):  # two rows with one hash
        first, kind = _renumber(np.unique(matrix + 0.0, axis=0, return_index=True, return_inverse=True))
    return first, kind


def _multipliers(width: int) -> np.ndarray:
    return _MULTIPLIERS[:width] if width <= len(_MULTIPLIERS) else np.resize(_MULTIPLIERS, width)


def _renumber(unique: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    _, first, kind = unique
    order = np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[kind.reshape(-1)]


def joint_classes(parts: list[np.ndarray], sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Classes of equal tuples (parts[0][s], parts[1][s], ...): (a member of each class, class of every s)."""
    key = parts[0].astype(np.int64)
    for part, size in zip(parts[1:], sizes[1:], strict=True):
        key = _renumber(np.unique(key * size + part, return_index=True, return_inverse=True))[1]
    return _renumber(np.unique(key, return_index=True, return_inverse=True))


def align(tables: list[Table]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Common rows and cols for tables of one shape, and the core of each over them."""
    if len(tables) == 1:
        return tables[0].rows, tables[0].cols, [tables[0].core]
    row_first, rows = joint_classes([t.rows for t in tables], [t.core.shape[0] for t in tables])
    col_first, cols = joint_classes([t.cols for t in tables], [t.core.shape[1] for t in tables])
    return rows, cols, [t.core[t.rows[row_first][:, None], t.cols[col_first]] for t in tables]


def add(a: Table, b: Table) -> Table:
    """Sum of two tables of one shape."""
    rows, cols, cores = align([a, b])
    return tidy(rows, cols, cores[0] + cores[1])


def take(table: Table, rows: np.ndarray | None, cols: np.ndarray | None) -> Table:
    """The tidy table of some rows and columns (index or mask; None keeps all) of a tidy one."""
    some_rows = table.rows if rows is None else table.rows[rows]
    some_cols = table.cols if cols is None else table.cols[cols]
    row_first, _ = _used(some_rows, len(table.core))
    col_first, _ = _used(some_cols, table.core.shape[1])
    if (len(row_first), len(col_first)) == table.core.shape:  # all classes are still there: nothing to merge
        return Table(some_rows, some_cols, table.core)
    return tidy(some_rows, some_cols, table.core)


def min_plus(left: np.ndarray, middle: np.ndarray, right: np.ndarray, block: int = 1 << 18) -> np.ndarray:
    """out[r, c] = min_k left[r, k] + middle[k] + right[k, c], in blocks of about `block` numbers."""
    rows, inner = left.shape
    right_t = np.ascontiguousarray((middle[:, None] + right).T)  # [C, K]
    out = np.empty((rows, right.shape[1]))
    step = max(1, block // max(1, inner * right.shape[1]))
    for start in range(0, rows, step):
        out[start : start + step] = (left[start : start + step, None, :] + right_t[None]).min(axis=2)
    return out
