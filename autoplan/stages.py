"""The stages of a step between tracing and running: `Traced`, which plans, and `Compiled`, which runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from . import devices, nnx
from .errors import PinError, PlanError
from .executable import Executable, OtherTypes
from .plan import Plan
from .planfile import check_program
from .planner import AXIS_NAMES, make_plan
from .signature import Signature
from .trace import Trace


@dataclass(frozen=True)
class Options:
    """What `parallelize` was asked for."""

    cluster: devices.ClusterLike = None
    memory_bytes: int | None = None
    mesh_shape: tuple[int, ...] | None = None
    layout: str = "auto"
    in_shardings: Any = None
    budget_s: float | None = None
    plan: Plan | None = None


@dataclass(frozen=True, repr=False)
class Traced:
    """A traced step: `print` shows its program, `plan` plans it."""

    trace: Trace
    options: Options

    @property
    def jaxpr(self) -> Any:
        """The program on flat leaves, a `ClosedJaxpr`."""
        return self.trace.jaxpr

    def plan(self) -> Plan:
        """The plan: the one that was given if it is for this program, else the best that the search finds.

        Raises:
          PlanError: there is none, or the given plan is for another program.
        """
        options = self.options
        if options.plan is not None:
            check_program(options.plan, self.trace.fingerprint, self.trace.inputs)
            return options.plan
        target = devices.resolve(options.cluster)
        mesh = target.fixed_mesh
        if mesh is None:
            _check_pinned_axes(self.trace)
        return make_plan(
            self.trace,
            target.cluster,
            memory_bytes=options.memory_bytes,
            mesh_shape=mesh.axis_sizes if mesh else options.mesh_shape,
            layout=options.layout,
            budget_s=options.budget_s,
            **({"axis_names": mesh.axis_names} if mesh else {}),
        )

    def __str__(self) -> str:
        return str(self.trace.jaxpr)

    def __repr__(self) -> str:
        trace = self.trace
        return f"<Traced {trace.name}: {len(trace.inputs)} inputs, {len(trace.outputs)} outputs>"


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


def _check_pinned_axes(trace: Trace) -> None:
    """Refuses pins that name axes which no mesh of the planner has."""
    for leaf in trace.inputs:
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in leaf.spec or ()]
        axes = [axis for entry in entries for axis in entry if isinstance(axis, str)]
        if unknown := [axis for axis in axes if axis not in AXIS_NAMES]:
            raise PinError(
                "a layout names axes of a mesh",
                got=f"{leaf.spec} and no mesh that has them",
                path=leaf.path,
                shape=leaf.shape,
                dtype=leaf.dtype,
                axis=unknown,
                source=trace.source,
                action="Pass the mesh as `cluster=jax.make_mesh(...)`, or use NamedShardings; without a "
                f"mesh, axes are called {', '.join(AXIS_NAMES)}",
            )
