"""A planned step, compiled: takes and returns the step's own trees, and is compiled once.

The program is compiled ahead of time for flat leaves, so it can never be traced or compiled again behind the
user's back. Leaves that are committed elsewhere are moved to their planned place; those that were once, are
looked after from then on. Calls that fit cost one flatten, one dispatch and one unflatten.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from . import compat
from .cost_models import DeviceSpec
from .emit import emit
from .errors import CompilerError, DeviceError, PlanError, check_divisible
from .plan import Plan
from .trace import Trace

_WEAK_SCALARS = (int, float, complex)  # bool is strongly typed


class OtherTypes(Exception):
    """The leaves have other types than the program was compiled for: no error, but a call for another one."""


class Executable:
    """A compiled program on flat leaves; built by `build`.

    `types` are the leaf types that it takes; see `leaf_types`.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        mesh: Mesh,
        jitted: Any,
        compiled: Any,
        in_shardings: Sequence[NamedSharding],
        labels: Sequence[NamedSharding] = (),
    ) -> None:
        self.trace, self.plan, self.mesh, self.jitted, self.compiled = trace, plan, mesh, jitted, compiled
        self.in_shardings = tuple(in_shardings)
        num_args = len(trace.inputs) - len(trace.consts)
        self.consts = tuple(
            jax.device_put(value, sharding)
            for value, sharding in zip(trace.consts, self.in_shardings[num_args:], strict=True)
        )
        state = {i for i, _ in trace.state_pairs}
        avals = trace.jaxpr.in_avals[:num_args]
        self.types = tuple(
            (tuple(aval.shape), aval.dtype, i not in state and _is_weak(aval)) for i, aval in enumerate(avals)
        )
        # State may come weakly or strongly typed. Other leaves are checked: they decide result types.
        self._weak = tuple((i, self.types[i][2]) for i in range(num_args) if i not in state)
        self._state = frozenset(state)
        # What passes through is put in place once and for all; other leaves join when they come misplaced.
        self._placed = {i for i in trace.kept if i is not None}
        self._keeps = bool(self._placed)
        self._labels = list(labels)

    def types_of(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        """`leaf_types` of leaves, state counted as strongly typed."""
        return tuple(
            (shape, dtype, weak and i not in self._state)
            for i, (shape, dtype, weak) in enumerate(leaf_types(leaves))
        )

    def run(self, leaves: list[Any]) -> list[Any]:
        """The leaves of `trace.out_tree`. Changes the list `leaves`, whose arrays may be donated.

        Raises:
          OtherTypes: the program is not for such leaves.
        """
        for i, weak in self._weak:
            if _is_weak(leaves[i]) != weak:
                raise OtherTypes
        for i in self._placed:
            leaves[i] = self._place(i, leaves[i])
        try:
            outputs = self.compiled(*leaves, *self.consts)
        except (TypeError, ValueError) as error:
            outputs = self._run_unusual(leaves, error)
        except Exception as error:
            if type(error).__name__ == "InternalFloatingPointError":  # `jax.debug_nans`; JAX's class is private
                raise FloatingPointError(
                    f"the step {self.trace.name} made a NaN or an infinity; run it under jax.disable_jit() to see where"
                ) from error
            raise
        if self._labels and not any(isinstance(x, jax.core.Tracer) for x in outputs):
            outputs = jax.device_put(outputs, self._labels)
        return self._with_kept(outputs, leaves) if self._keeps else outputs

    def _run_unusual(self, leaves: list[Any], error: Exception) -> Sequence[Any]:
        """Runs leaves that the compiled program refused: tracers, or arrays that are committed elsewhere."""
        try:
            fits = self.types_of(leaves) == self.types
        except TypeError:  # some leaf is no array
            fits = False
        if not fits:
            raise OtherTypes from None
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._run_traced(leaves)
        misplaced = {
            i for i, leaf in enumerate(leaves) if _is_misplaced(leaf, self.in_shardings[i])
        } - self._placed
        if not misplaced:
            raise error
        self._placed |= misplaced
        for i in misplaced:
            leaves[i] = self._place(i, leaves[i])
        return self.compiled(*leaves, *self.consts)

    def _run_traced(self, leaves: list[Any]) -> Sequence[Any]:
        """Runs leaves some of which are tracers, of `jax.grad`, `jax.vmap`, an outer `jax.jit` and the like.

        What a tracer stands for may lie on other devices, which it does not tell: it is moved when JAX refuses it; to
        every device whole, for under `jax.vmap` it has a dim that is not known here.
        """
        placed = [x if isinstance(x, jax.core.Tracer) else self._place(i, x) for i, x in enumerate(leaves)]
        try:
            return self._transform(placed, self.plan.out_shardings)
        except ValueError as error:
            whole = NamedSharding(self.mesh, PartitionSpec())
            moved = [jax.device_put(x, whole) if isinstance(x, jax.core.Tracer) else x for x in placed]
            try:
                return self._transform(moved, [PartitionSpec()] * len(self.plan.outputs))
            except ValueError:
                raise error from None

    def _transform(self, leaves: list[Any], explicit: Sequence[PartitionSpec]) -> Sequence[Any]:
        """`explicit`: layouts of the results, of which types speak under a mesh with explicit axes."""
        call = self._transformable
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            call = jax.sharding.auto_axes(call, out_sharding=list(explicit))
        return call(*leaves, *self.consts)

    @functools.cached_property
    def _transformable(self) -> Any:
        """The step with its layouts as constraints: those of `jax.jit` refuse what transformations pass them, such as
        cotangents that lie otherwise."""
        program = jex_core.jaxpr_as_fun(emit(self.trace, self.plan, self.mesh))
        inputs = [NamedSharding(self.mesh, spec) for spec in self.plan.in_shardings]
        outputs = _out_shardings(self.trace, self.plan, self.mesh)

        def step(*leaves: Any) -> list[Any]:
            leaves = map(jax.lax.with_sharding_constraint, leaves, inputs)
            return list(map(jax.lax.with_sharding_constraint, program(*leaves), outputs))

        step.__name__ = step.__qualname__ = self.trace.name
        return jax.jit(step)

    def _place(self, i: int, leaf: Any) -> Any:
        sharding = self.in_shardings[i]
        if isinstance(leaf, jax.Array) and (isinstance(leaf, jax.core.Tracer) or leaf.sharding is sharding):
            return leaf
        return jax.device_put(leaf, sharding)

    def _with_kept(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        remaining = iter(outputs)
        return [next(remaining) if i is None else leaves[i] for i in self.trace.kept]


def build(
    trace: Trace, plan: Plan, mesh: Mesh, given: Mesh | None = None, device: DeviceSpec | None = None
) -> Executable:
    """Compiles a traced step for its plan, on a mesh of automatic axes.

    Args:
      device: what is known of the mesh's devices, so that the compiler keeps to the plan's memory limit.
      given: the mesh that the user gave. If its axes are explicit, results say so, without being moved.

    Raises:
      ShardingError: the plan splits a leaf of the arguments or results unevenly.
      CompilerError: the compiler refuses the program.
      DeviceError: `jax.set_mesh` has set a mesh of other devices.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context.size != mesh.size:
        raise DeviceError(
            f"the plan runs on {mesh.size} devices",
            got=f"a context mesh of {context.size}, set by `jax.set_mesh`",
            action="Call the step outside it, or pass that mesh as `cluster=`",
        )
    sizes = dict(mesh.shape)
    for leaf in (*plan.inputs, *plan.outputs):
        check_divisible(
            leaf.path, leaf.shape, leaf.dtype, tuple(leaf.partition_spec), sizes, source=trace.source
        )
    with compat.automatic_mesh():
        jitted, avals = jit_step(trace, plan, mesh)
        try:
            lowered = jitted.lower(*avals)
        except ValueError as error:
            if "ordered effects" not in str(error):
                raise
            raise PlanError(
                "the effects of a step on several devices are not ordered", got=str(error),
                action="Leave `ordered=True` out of jax.debug.print and the like", source=trace.source,
            ) from error  # fmt: skip
        try:
            compiled = lowered.compile(compiler_options(plan, device) if device else None)
        except jax.errors.JaxRuntimeError as error:
            raise CompilerError(str(error), source=trace.source) from error
    in_shardings = tuple(NamedSharding(mesh, spec) for spec in plan.in_shardings)
    explicit = given is not None and given.axis_types != mesh.axis_types
    labels = [NamedSharding(given, spec) for spec in plan.out_shardings] if explicit else ()
    return Executable(trace, plan, mesh, jitted, compiled, in_shardings, labels)


def compiler_options(plan: Plan, device: DeviceSpec) -> dict[str, str]:
    """What the compiler is told besides the program: to keep to a memory limit that is below the device's own.

    XLA:TPU takes what memory there is, to gather ahead of time and to keep what it could make again; programs that
    take twice as much as they need are common. GPUs' and CPUs' compilers cannot be told.
    """
    if device.platform != "tpu" or plan.memory_limit_bytes >= device.usable_memory_bytes:
        return {}
    return {"xla_tpu_max_hbm_size_mib": str(max(1, int(plan.memory_limit_bytes / 2**20)))}


def jit_step(
    trace: Trace, plan: Plan, mesh: Mesh | AbstractMesh, *, donate: bool = True
) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """The emitted step on flat leaves, to be lowered (`jax.jit`), and what it takes."""
    program = jex_core.jaxpr_as_fun(emit(trace, plan, mesh))

    def step(*leaves: Any) -> list[Any]:
        return program(*leaves)

    step.__name__ = step.__qualname__ = trace.name
    jitted = jax.jit(
        step,
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in plan.in_shardings),
        out_shardings=_out_shardings(trace, plan, mesh),
        donate_argnums=tuple(i for i, leaf in enumerate(trace.inputs) if donate and leaf.donated),
    )
    avals = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=_is_weak(aval))
        for aval in trace.jaxpr.in_avals
    ]
    return jitted, avals


def _out_shardings(trace: Trace, plan: Plan, mesh: Mesh | AbstractMesh) -> list[NamedSharding]:
    """Of the results, in the memory that the step puts them in."""
    outputs = zip(plan.out_shardings, trace.jaxpr.out_avals, strict=True)
    return [NamedSharding(mesh, spec, memory_kind=compat.memory_kind(aval)) for spec, aval in outputs]


def leaf_types(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """(shape, dtype, weakly typed) of each leaf, as JAX takes it (64 bits become 32 where they are off).

    Raises:
      TypeError: a leaf is no array or scalar.
    """
    return tuple(_leaf_type(leaf) for leaf in leaves)


def _leaf_type(leaf: Any) -> tuple[Any, ...]:
    aval = leaf if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else jax.typeof(leaf)
    return tuple(aval.shape), aval.dtype, _is_weak(aval)


def _is_weak(x: Any) -> bool:
    return type(x) in _WEAK_SCALARS or bool(getattr(x, "weak_type", False))


def _is_misplaced(leaf: Any, sharding: NamedSharding) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and leaf.committed
        and not sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    )
