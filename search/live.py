"""Who is live when, where every buffer is live in one stretch of the rows: two numbers per buffer.

A program of 30,000 tensors has rows with thousands of live ones each: as a matrix that is 5e7 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Intervals:
    """Buffer b is live at the rows start[b] <= r < stop[b]; start, stop: int64 [B]; rows: how many there are.

    Serves as the `live` matrix [R, B] of a Problem. Raises ValueError for stretches that are not within the rows.
    """

    start: np.ndarray
    stop: np.ndarray
    rows: int

    def __post_init__(self) -> None:
        start, stop = (np.asarray(x, dtype=np.int64).reshape(-1) for x in (self.start, self.stop))
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "stop", stop)
        if start.shape != stop.shape:
            raise ValueError(f"intervals need a stop for every start, got {len(start)} starts, {len(stop)} stops")
        bad = np.flatnonzero((start < 0) | (start > stop) | (stop > self.rows))
        if len(bad):
            b = int(bad[0])
            raise ValueError(f"buffer {b} is live at rows {start[b]}..{stop[b]}, of which there are {self.rows}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, len(self.start)

    def __matmul__(self, sizes: np.ndarray) -> np.ndarray:
        """Sums [R] of what is live at every row, of sizes [B]. Exact for whole numbers below 2**53."""
        change = np.zeros(self.rows + 1)
        np.add.at(change, self.start, sizes)
        np.subtract.at(change, self.stop, sizes)
        return np.cumsum(change[:-1])

    def weigh(self, price: np.ndarray) -> np.ndarray:
        """Sums [B] over each buffer's rows, of prices [R]."""
        before = np.concatenate([[0.0], np.cumsum(price)])
        return before[self.stop] - before[self.start]

    def dense(self, rows: np.ndarray) -> np.ndarray:
        """The matrix's rows `rows`, float64 [A, B]."""
        rows = np.asarray(rows)[:, None]
        return ((self.start <= rows) & (rows < self.stop)).astype(np.float64)

    def part(self, rows: np.ndarray, buffers: np.ndarray) -> Intervals:
        """Some rows (ascending) and buffers only."""
        start, stop = (np.searchsorted(rows, x[buffers]) for x in (self.start, self.stop))
        return Intervals(start, stop, len(rows))


def maximal_rows(start: np.ndarray, stop: np.ndarray) -> Intervals:
    """Intervals in time -> the same over those moments only whose live sets lie in no other moment's.

    start, stop: [B], half open, of any ordered numbers; an empty interval (stop <= start) is live nowhere. A moment
    matters when something starts at it and the next change is an end.
    """
    start, stop = np.asarray(start), np.asarray(stop)
    used = stop > start
    begins, ends = np.unique(start[used]), np.unique(stop[used])
    # Of the starts between two ends only the last sees all that started before it.
    upto = np.searchsorted(ends, begins, side="right")
    moments = begins[np.append(upto[1:] != upto[:-1], True)] if len(begins) else begins
    first = np.searchsorted(moments, start, side="left")
    last = np.searchsorted(moments, stop, side="left")
    return Intervals(np.where(used, first, 0), np.where(used, np.maximum(first, last), 0), len(moments))
