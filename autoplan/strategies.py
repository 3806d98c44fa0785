"""Strategies of a node: which factor each mesh axis splits, and the layouts that follow.

Each axis splits one factor of the node's rule or none. A split reduction factor leaves the results partial
on that axis. Additions may also carry a pending sum through (`CARRY`): both terms and the sum are partial.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import itertools

import numpy as np

from .layouts import PARTIAL, PARTIAL_OTHER, WHOLE
from .rules import Dims, Rule

NONE, CARRY = -1, -2

# Primitives whose reduction is a sum (others leave a partial maximum, argmax, ...).
SUMS = {"dot_general", "conv_general_dilated", "reduce_sum", "gather", "scatter-add", "ragged_dot",
        "ragged_dot_general", "cumsum", "psum", "reduce_window_sum", "scatter_add"}
# Additions: the compilers for TPU and GPU move an all-reduce across them (AllReduceReassociate in XLA).
ADDITIONS = {"add", "add_any", "sub"}


@dataclass(frozen=True)
class Strategies:
    """All strategies of a node; row s of every array belongs to strategy s.

    `choice[s, a]` is the factor that axis a splits (or NONE, CARRY); `operands[k][s]` and `results[k][s]`
    are layouts; `splits[s]` is in how many parts the work is divided.
    """

    choice: np.ndarray
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]
    splits: np.ndarray

    def __len__(self) -> int:
        return len(self.choice)

    def keep(self, mask: np.ndarray) -> Strategies:
        return Strategies(self.choice[mask], tuple(o[mask] for o in self.operands),
                          tuple(r[mask] for r in self.results), self.splits[mask])


def enumerate_strategies(rule: Rule, axis_sizes: Sequence[int], name: str = "", dtype: str = "float32",
                         carry: bool = True) -> Strategies:
    """Every strategy of a node with `rule` on a mesh; the unsplit one is first. `carry`: whether the compiler moves
    reductions across additions."""
    usable = [f for f, size in enumerate(rule.sizes) if size > 1 and f not in rule.blocked
              and not _twice(rule, f)]
    options = [NONE, *usable]
    if carry and name in ADDITIONS and "float" in dtype and _same_dims(rule):
        options.append(CARRY)
    choice = np.array(list(itertools.product(options, repeat=len(axis_sizes))), np.int16)
    choice = choice.reshape(-1, len(axis_sizes))
    choice = choice[_valid(rule, choice, axis_sizes)]
    partial = PARTIAL if name in SUMS else PARTIAL_OTHER
    operands = tuple(_layouts(dims, choice, frozenset(), partial) for dims in rule.operands)
    results = tuple(_layouts(dims, choice, rule.reduction, partial) for dims in rule.results)
    splits = np.where(choice >= 0, np.asarray(axis_sizes, np.int64), 1).prod(axis=1)
    return Strategies(choice, operands, results, splits)


def layout_strategies(layouts: np.ndarray, num_operands: int, num_results: int, axis_sizes: Sequence[int]
                      ) -> Strategies:
    """One strategy per layout, shared by all operands and results (inputs, outputs, views)."""
    splits = np.where(layouts >= 0, np.asarray(axis_sizes, np.int64), 1).prod(axis=1)
    return Strategies(layouts.astype(np.int16), (layouts,) * num_operands, (layouts,) * num_results, splits)


def _same_dims(rule: Rule) -> bool:
    return len(rule.operands) >= 2 and all(dims == rule.results[0] for dims in rule.operands)


def _twice(rule: Rule, factor: int) -> bool:
    """Whether a factor stands in two dims of one array (a diagonal): it cannot be split then."""
    return any(sum(factor in dim for dim in dims) > 1 for dims in (*rule.operands, *rule.results))


def _valid(rule: Rule, choice: np.ndarray, axis_sizes: Sequence[int]) -> np.ndarray:
    sizes = np.asarray(axis_sizes, np.int64)
    good = np.ones(len(choice), bool)
    parts = {}
    for f, size in enumerate(rule.sizes):
        parts[f] = np.where(choice == f, sizes, 1).prod(axis=1)
        good &= (parts[f] == 1) | ((size % parts[f] == 0) & (parts[f] <= size))
    if rule.together:
        idle = ((choice == NONE) & (sizes > 1)).any(axis=1)
        good &= ~(idle & np.isin(choice, list(rule.together)).any(axis=1))
    for dims in {*rule.operands, *rule.results}:
        for dim in dims:
            for major, minor in itertools.combinations(dim, 2):
                good &= _nested(choice, parts, rule.sizes, major, minor)
    return good


def _nested(choice, parts, sizes, major: int, minor: int) -> np.ndarray:
    """A minor factor of a dim may be split only below a fully split major one, by later axes."""
    uses_minor = (choice == minor).any(axis=1)
    full = parts[major] == sizes[major]
    last_major = np.where(choice == major, np.arange(choice.shape[1]), -1).max(axis=1)
    first_minor = np.where(choice == minor, np.arange(choice.shape[1]), choice.shape[1]).min(axis=1)
    return ~uses_minor | (full & (last_major < first_minor))


def _layouts(dims: Dims, choice: np.ndarray, reduction: frozenset[int], partial: int) -> np.ndarray:
    out = np.full(choice.shape, WHOLE, np.int8)
    for d, factors in enumerate(dims):
        for f in factors:
            out[choice == f] = d
    for f in reduction:
        out[choice == f] = partial
    out[choice == CARRY] = PARTIAL
    return out
