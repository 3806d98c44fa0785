"""Random JAX programs: a grammar of primitives and regions, drawn with hypothesis.

    author    the value types, what a program is, and the pen that writes one
    arrays    elementwise work, shapes, indexing, sorting, dtypes
    numeric   reductions, windows, contractions, linear algebra, random draws
    regions   loops, branches, calls, derivatives, callbacks

A program is a function of flat arrays. Where an operation is discontinuous (sorting, comparing, rounding), its operands
are *exact*: they are the same bits whatever the order of sums, so results of two runs can be compared.
"""

from . import arrays, numeric, regions  # noqa: F401  (they fill the grammar)
from .author import OPERATIONS, Program, Type, inputs_of, programs

__all__ = ["OPERATIONS", "Program", "Type", "inputs_of", "programs"]
