"""`Compiled`: the last stage of a step, compiled for one abstract signature and one plan."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from . import nnx
from .errors import PlanError
from .executable import Executable, OtherTypes
from .plan import Plan
from .signature import Signature


class Compiled:
    """A step compiled for one abstract signature and one plan; called like the step."""

    def __init__(self, signature: Signature, executable: Executable, static: Any) -> None:
        self._signature, self._executable, self._static = signature, executable, static

    @property
    def plan(self) -> Plan:
        return self._executable.plan

    @property
    def mesh(self) -> Mesh:
        """The devices that the step runs on."""
        return self._executable.mesh

    @property
    def input_shardings(self) -> dict[str, NamedSharding]:
        """The layout of every leaf of the arguments, by path; for instance to restore a checkpoint."""
        return dict(zip((leaf.path for leaf in self.plan.inputs), self._executable.in_shardings, strict=True))

    def memory_analysis(self) -> Any:
        """What the compiler says of memory per device, as `jax.stages.Compiled.memory_analysis`."""
        return self._executable.compiled.memory_analysis()

    def as_text(self) -> str:
        """The compiled program, as `jax.stages.Compiled.as_text`."""
        return self._executable.compiled.as_text()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
          PlanError: the arguments have another structure, shapes or dtypes than it was compiled for.
        """
        trace = self._executable.trace
        if self._signature.static(args, kwargs) != self._static:
            raise PlanError(
                "a compiled step takes the static arguments that it was compiled for",
                got=f"{self._signature.static(args, kwargs)} instead of {self._static}",
                action="Call the step itself, or compile it for these too",
            )
        dynamic = self._signature.dynamic(args, kwargs)
        objects = nnx.has_objects(dynamic)
        with nnx.context(objects):
            leaves, tree = jax.tree.flatten(nnx.split(dynamic) if objects else dynamic)
            outputs = self._run(leaves, tree)
            result = trace.out_tree.unflatten(outputs)
            if objects:
                return nnx.merge(result, inner=False)[2]
            return nnx.merge(result, tagged=False) if trace.has_objects else result

    def __repr__(self) -> str:
        return f"<Compiled {self._signature.name} on ({self.plan.mesh})>"

    def _run(self, leaves: list[Any], tree: Any) -> list[Any]:
        action = "Call the step itself, which compiles for every structure and type, or compile it for these"
        if tree != self._executable.trace.in_tree:
            raise PlanError(
                "a compiled step takes arguments of the structure that it was compiled for",
                got=f"{tree} instead of {self._executable.trace.in_tree}",
                action=action,
            )
        try:
            return self._executable.run(leaves)
        except OtherTypes:
            pass
        leaves = self._executable.types_of(leaves)
        for leaf, now, then in zip(self._executable.trace.inputs, leaves, self._executable.types):
            if now != then:
                weak = " (weakly typed)" * now[2]
                raise PlanError(
                    "a compiled step takes the shapes and dtypes that it was compiled for",
                    path=leaf.path,
                    shape=leaf.shape,
                    dtype=leaf.dtype,
                    got=f"{now[1]}{list(now[0])}{weak}",
                    action=action,
                )
        raise AssertionError("types differ, yet none does")
