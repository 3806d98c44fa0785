"""What users are told when something cannot be done.

Every error is a `PlanError`, which is a `ValueError`. Its message has one form: where (the path, shape, dim
and axis concerned), the rule that was broken, what was got instead, what to do next, and the user's source
line:

    batch['x'] (float32[10, 4]), dim 0, axis 'x': the size of a dim must be a multiple of the axes that split
    it; got size 10 over 8 devices. Pad the dim to 16, or take 'x' off it [train.py:12 (step)]
"""

from __future__ import annotations

from collections.abc import Sequence
import math
import re
from typing import Any

__all__ = [
    "ClusterError",
    "CompilerError",
    "DeviceError",
    "MemoryLimitError",
    "PinError",
    "PlanError",
    "PlanFileError",
    "ShardingError",
    "StateError",
]


# Characters of a compiler's message that are shown.
_SUMMARY = 600


def describe_array(dtype: Any, shape: Sequence[int]) -> str:
    """The type of an array in words, such as `float32[8, 16]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


class PlanError(ValueError):
    """A step cannot be planned or run as asked.

    Args:
      rule: what must hold; alone, the whole message.
      got: what was found instead.
      action: what to do next, as a command without a full stop.
      path: the leaf concerned, such as `state.params['w']`.
      shape, dtype: of that leaf.
      dim: the dim concerned.
      axis: the mesh axis concerned, or several.
      source: the user's line, as "file:line (function)".

    All are kept as attributes.
    """

    def __init__(
        self,
        rule: str,
        *,
        got: str | None = None,
        action: str | None = None,
        path: str | None = None,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
        dim: int | None = None,
        axis: str | Sequence[str] | None = None,
        source: str | None = None,
    ) -> None:
        self.rule, self.got, self.action = rule, got, action
        self.path, self.dim, self.axis, self.source, self.dtype = path, dim, axis, source, dtype
        self.shape = None if shape is None else tuple(shape)
        super().__init__(self._message())

    def _message(self) -> str:
        text = self.rule
        if where := self._where():
            text = f"{where}: {text}"
        if self.got:
            text += f"; got {self.got}"
        if self.action:
            text += f". {self.action}"
        return f"{text} [{self.source}]" if self.source else text

    def _where(self) -> str:
        parts = []
        if self.path is not None:
            array = "" if self.shape is None else f" ({describe_array(self.dtype or 'array', self.shape)})"
            parts.append(self.path + array)
        if self.dim is not None:
            parts.append(f"dim {self.dim}")
        if self.axis is not None:
            axes = [self.axis] if isinstance(self.axis, str) else self.axis
            parts.append(f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(repr, axes))}")
        return ", ".join(parts)


class ClusterError(PlanError):
    """The cluster is unknown, or what was given is no cluster."""


class CompilerError(PlanError):
    """The compiler refuses the program of a plan.

    Args:
      said: its message, or its log from the error on.

    Attributes:
      said: the same.
      summary: the line of it that says why.
      out_of_memory: whether the program takes more memory than the devices have.
    """

    def __init__(self, said: str, *, source: str | None = None) -> None:
        self.said = said.strip()
        self.out_of_memory = "RESOURCE_EXHAUSTED" in said
        errors = re.findall(r"^[\w.]*(?:Error|Exception|error): .*$", said, re.MULTILINE)
        lines = self.said.splitlines() or ["nothing"]
        self.summary = (lines[0] if self.out_of_memory or not errors else errors[-1])[:_SUMMARY]
        super().__init__(
            "the compiled program must fit the memory" if self.out_of_memory else "the program of a plan must compile",
            got=self.summary,
            action="Plan with a smaller `memory`, or for more devices" if self.out_of_memory else
            "Try another `layout` or `mesh_shape`; if jax.jit compiles the step, report the plan as a fault",
            source=source,
        )  # fmt: skip


class DeviceError(PlanError):
    """The devices are too few, or not those that the mesh or the plan asks for."""


class MemoryLimitError(PlanError):
    """No layout fits the memory. `smallest_bytes` per device would do, if it is known (else None)."""

    def __init__(self, rule: str, *, smallest_bytes: float | None = None, **fields: Any) -> None:
        self.smallest_bytes = smallest_bytes
        super().__init__(rule, **fields)


class ShardingError(PlanError):
    """A layout that was asked for cannot be had, for instance because a size does not divide."""


class PinError(ShardingError):
    """`in_shardings` does not match the arguments, or asks for what cannot be had."""


class StateError(PlanError):
    """A step returns a state of another structure, shape or dtype than it took."""


class PlanFileError(PlanError):
    """A plan file is broken, of another version, or of another program."""


def check_divisible(
    path: str,
    shape: Sequence[int],
    dtype: Any,
    spec: Sequence[Any],
    sizes: dict[str, int],
    kind: type[PlanError] = ShardingError,
    source: str | None = None,
) -> None:
    """Refuses a layout that splits a dim unevenly, or names an axis that the mesh lacks.

    Args:
      spec: per dim an axis name, a tuple of them, or something else (ignored), as in a `PartitionSpec`; may
        be shorter than `shape`.
      sizes: of the mesh axes, by name.

    Raises:
      PlanError (`kind`): names the leaf, dim, axes and sizes.
    """
    where = {"path": path, "shape": shape, "dtype": dtype, "source": source}
    if len(spec) > len(shape):
        raise kind(
            "a layout has at most one entry per dim",
            got=f"{tuple(spec)} for {len(shape)} dims",
            action="Shorten the PartitionSpec",
            **where,
        )
    used: set[str] = set()
    for dim, entry in enumerate(spec):
        axes = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
        if not axes:
            continue
        if unknown := [axis for axis in axes if axis not in sizes]:
            raise kind(
                "a layout may only name axes of the mesh",
                got=f"a mesh with axes {sizes}",
                action="Rename the axis, or pass the mesh that has it as `cluster=`",
                dim=dim,
                axis=unknown,
                **where,
            )
        if twice := [axis for i, axis in enumerate(axes) if axis in used or axis in axes[:i]]:
            rule = "a mesh axis splits one dim of an array at most, and once"
            raise kind(rule, got=f"{tuple(spec)}", action="Name each axis once", dim=dim, axis=twice, **where)
        used.update(axes)
        ways = math.prod(sizes[axis] for axis in axes)
        if shape[dim] % ways:
            padded = -(-shape[dim] // ways) * ways
            raise kind(
                "the size of a dim must be a multiple of the number of ways it is split",
                got=f"size {shape[dim]} split {ways} ways",
                dim=dim,
                axis=axes,
                action=f"Pad the dim to {padded}, or split another dim",
                **where,
            )
