"""`parallelize`: a training step that plans itself and runs sharded.

A decorated step has the stages of `jax.jit`: `.trace(...)` gives a `Traced`, whose `.plan()` gives a `Plan`;
`.plan(...)` and `.compile(...)` go straight there; a call does all that once per abstract signature, and then
runs at jit speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import contextlib
from dataclasses import dataclass, replace
import functools
import types
from typing import Any
import warnings

import jax
from jax.sharding import Mesh, NamedSharding

from . import compat, devices, nnx
from .birth import born
from .compiled import Compiled
from .errors import PinError, PlanError
from .executable import Executable, OtherTypes, build
from .fallback import first_that_compiles
from .plan import Candidate, MeshShape, Plan
from .planfile import check_program
from .planner import AXIS_NAMES, BUDGET_S, LAYOUTS, make_plan
from .signature import Names, Numbers, Signature, signature_of
from .trace import Trace, trace_signature
from .units import parse_bytes
from .verification import plan_that_fits, verify

_OBJECTS = "objects"  # marks argument trees with NNX objects inside containers


@dataclass(frozen=True)
class Options:
    """What `parallelize` was asked for."""

    cluster: devices.ClusterLike = None
    memory_bytes: int | None = None
    mesh_shape: tuple[int, ...] | None = None
    layout: str = "auto"
    in_shardings: Any = None
    out_shardings: Any = None
    budget_s: float | None = BUDGET_S
    plan: Plan | None = None
    verify: bool = False


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    cluster: devices.ClusterLike = None,
    memory: str | int | float | None = None,
    mesh_shape: Iterable[int] | None = None,
    layout: str = "auto",
    static_argnums: Numbers = None,
    static_argnames: Names = None,
    donate_argnums: Numbers = None,
    donate_argnames: Names = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    budget_s: float | None = BUDGET_S,
    plan: Plan | None = None,
    verify: bool = False,
) -> Any:
    """Makes a step that is written for one device run on many; bare, or with options.

    Args:
      fun: the step. Arguments and results are pytrees of arrays, or flax NNX objects, which may be changed in
        place.
      cluster: what to plan for: a description ("v5e:4x4", "8xH100", "4x8xH100", "cpu:8"), a
        `jax.sharding.Mesh` (its axes are kept), a list of devices, or None for all of `jax.devices()`. A
        description needs no devices until the step runs.
      memory: the limit per device, such as "80GiB", "16GB" or a number of bytes; None is what the device has.
      mesh_shape: sizes of the mesh axes; None lets the planner choose.
      layout: "auto", or a classic layout to force: "data", "fsdp" or "tensor".
      static_argnums, static_argnames, donate_argnums, donate_argnames: as for `jax.jit`.
      in_shardings: layouts to keep, as for `jax.jit`: a pytree prefix of the positional arguments of
        `PartitionSpec`s (dims may be `PartitionSpec.UNCONSTRAINED`), `NamedSharding`s and None. They name the
        axes of the mesh that is given as `cluster` or by `NamedSharding`s; without one the axes are called x,
        y and z.
      out_shardings: the same for the result: a pytree prefix of what the step returns.
      budget_s: seconds after which planning takes the best plan found so far (soft; None: no limit). A plan that is
        reached before does not depend on it.
      plan: a plan to use instead of searching, for instance from `Plan.load`.
      verify: compile each plan ahead of time (`Plan.verify`) and take the best whose compiled program fits.

    Returns:
      A `Parallelized`, or a decorator if `fun` is None.

    Raises:
      PlanError: an option is wrong.

    >>> import jax, jax.numpy as jnp
    >>> @parallelize(cluster="cpu:1")
    ... def step(w, x):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    >>> step.plan(jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")).program
    'step'
    """
    if fun is None:
        return functools.partial(
            parallelize,
            cluster=cluster,
            memory=memory,
            mesh_shape=mesh_shape,
            layout=layout,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            budget_s=budget_s,
            plan=plan,
            verify=verify,
        )
    if not callable(fun):
        raise PlanError("parallelize takes a function", got=repr(fun), action="Decorate the step itself")
    options = _updated(
        Options(),
        cluster=cluster,
        memory=memory,
        mesh_shape=mesh_shape,
        layout=layout,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        budget_s=budget_s,
        plan=plan,
        verify=verify,
    )
    return Parallelized(
        signature_of(fun, static_argnums, static_argnames, donate_argnums, donate_argnames), options
    )


class Parallelized:
    """A step that plans itself; made by `parallelize`, called like the function that it wraps."""

    def __init__(self, signature: Signature, options: Options) -> None:
        functools.update_wrapper(self, signature.fun)
        self._signature, self._options = signature, options
        self._executables: dict[Any, list[Executable] | str] = {}
        self._plans: dict[str, Plan] = {}
        self._latest: Plan | None = options.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; plans and compiles first if it has not for such arguments.

        Under `jax.disable_jit` the step itself runs, operation by operation on one device.
        """
        if jax.config.jax_disable_jit:
            return self._signature.fun(*args, **kwargs)
        if nnx.any_object(args):
            return self._call_with_objects(args, kwargs)
        key, leaves = self._flatten(args, kwargs, (args, kwargs))
        known = self._executables.get(key)
        if known is None and nnx.has_objects((args, kwargs)):
            known = self._executables[key] = _OBJECTS
        if known is _OBJECTS:
            return self._call_with_objects(args, kwargs)
        executable, outputs = self._run(key, leaves, args, kwargs)
        if executable.trace.has_objects:  # made by the step
            return nnx.merge(executable.trace.out_tree.unflatten(outputs), tagged=False)
        return executable.trace.out_tree.unflatten(outputs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<parallelized {self._signature.name}>"

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces the step for arrays or `ShapeDtypeStruct`s.

        Raises:
          StateError: donated state comes back in another form.
          PinError: `in_shardings` does not match the arguments, or `out_shardings` the result.
        """
        return Traced(
            trace_signature(
                self._signature, args, kwargs, self._options.in_shardings, self._options.out_shardings
            ),
            self._options,
        )

    def plan(self, *args: Any, verify: bool | None = None, **kwargs: Any) -> Plan:
        """Plans the step for arrays or `ShapeDtypeStruct`s; needs no devices if the cluster is a description.

        With `verify`, plans are compiled ahead of time until one fits; None is as `parallelize` was told. A parameter
        of the step that is itself called `verify` must be passed by position.

        Raises:
          PlanError: there is no plan, or the given one is for another program; or, to verify, what the platform needs
            is not installed.
          MemoryLimitError: nothing fits.
        """
        if verify is None or verify == self._options.verify:
            return self._plan(self.trace(*args, **kwargs))
        step = self.with_options(verify=verify)
        self._latest = step.plan(*args, **kwargs)
        self._plans[self._latest.fingerprint] = self._latest
        return self._latest

    def compile(self, *args: Any, plan: Plan | None = None, **kwargs: Any) -> Compiled:
        """Compiles the step ahead of time for arrays or `ShapeDtypeStruct`s. `plan` is used if given.

        A parameter of the step that is itself called `plan` must be passed by position.

        Raises:
          PlanError: there is no plan, or it cannot run on the devices that are there.
        """
        step = self if plan is None else self.use_plan(plan)
        executable = step._build(step.trace(*args, **kwargs))
        self._latest = executable.plan
        return Compiled(step._signature, executable, step._signature.static(args, kwargs))

    def with_options(self, **options: Any) -> Parallelized:
        """The same step with some other options: `cluster`, `memory`, `mesh_shape`, `layout`, `in_shardings`,
        `out_shardings`, `budget_s`, `plan` or `verify`, as for `parallelize`.

        Raises:
          PlanError: an option is wrong.
        """
        return Parallelized(self._signature, _updated(self._options, **options))

    def use_plan(self, plan: Plan) -> Parallelized:
        """The same step with a given plan, for instance a loaded one, instead of a search.

        Raises:
          PlanError: it is no plan. That it fits program and devices is checked when they are known.
        """
        return self.with_options(plan=plan)

    def init(self, make_state: Callable[..., Any], *args: Any) -> Any:
        """The result of `make_state(*args)`, born in the layout that the latest plan gives to the step's
        arguments.

        The result must be what the step takes as one of its arguments, or a tuple of what it takes as
        several. No device ever holds it whole. NNX objects may be made too. Arrays among `args` are inputs of
        the compiled program; other values are constants.

        Raises:
          PlanError: there is no plan yet, or the result matches no argument.
        """
        if self._latest is None:
            raise PlanError(
                f"{self._signature.name}.init lays the state out by a plan",
                got="no plan yet",
                action=f"Call {self._signature.name}.plan(...) first. Arguments may be ShapeDtypeStructs, "
                "for instance from jax.eval_shape(make_state, ...)",
            )
        mesh = devices.run_mesh(devices.resolve(self._options.cluster), self._latest.mesh)
        return born(make_state, args, self._latest, mesh, self._signature.positional)

    def _flatten(self, args: Any, kwargs: Any, arguments: Any) -> tuple[Any, list[Any]]:
        """What executables are kept by, and the leaves of `arguments`, which are `(args, kwargs)` with NNX
        objects split."""
        if self._signature.has_static:
            static = self._signature.static(args, kwargs)
            leaves, tree = jax.tree.flatten(self._signature.dynamic(*arguments))
            return (tree, static, compat.trace_context()), leaves
        leaves, tree = jax.tree.flatten(arguments)
        return (tree, compat.trace_context()), leaves

    def _call_with_objects(self, args: Any, kwargs: Any) -> Any:
        with nnx.context():
            key, leaves = self._flatten(args, kwargs, nnx.split((args, kwargs)))
            executable, outputs = self._run(key, leaves, args, kwargs)
            return nnx.merge(executable.trace.out_tree.unflatten(outputs), inner=False)[2]

    def _run(self, key: Any, leaves: list[Any], args: Any, kwargs: Any) -> tuple[Executable, list[Any]]:
        """The executable that takes the leaves, made if there is none, and its outputs."""
        known = self._executables.get(key)
        if known is not None:
            fitting = known if len(known) == 1 else [e for e in known if e.types == e.types_of(leaves)]
            for executable in fitting:
                with contextlib.suppress(OtherTypes):
                    return executable, executable.run(leaves)
        executable = self._build(self.trace(*args, **kwargs))
        self._executables.setdefault(key, []).append(executable)
        try:
            return executable, executable.run(leaves)
        except OtherTypes:
            raise AssertionError(
                f"compiled for {executable.types}, called with {executable.types_of(leaves)}"
            ) from None

    def _plan(self, traced: Traced) -> Plan:
        known = self._plans.get(traced.trace.fingerprint)
        self._latest = self._plans[traced.trace.fingerprint] = known or traced.plan()
        return self._latest

    def _build(self, traced: Traced) -> Executable:
        plan, executable = traced.compiled(self._plan(traced))
        self._latest = self._plans[traced.trace.fingerprint] = plan
        return executable


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
            return options.plan.with_trace(self.trace)
        if not options.verify:
            return self._replan()
        plan = plan_that_fits(self._replan, lambda plan: verify(plan, self.trace), self.trace)
        return plan.with_trace(self.trace)

    def compiled(self, plan: Plan) -> tuple[Plan, Executable]:
        """The plan's program, compiled for its devices; if the compiler refuses it and the plan is not one that was
        given, the next plan and its program.

        Raises:
          CompilerError: the compiler refuses the given plan, or all that were tried.
          PlanError: it cannot run on the devices that are there.
        """
        target = devices.resolve(self.options.cluster)

        def executable(plan: Plan) -> Executable:
            mesh = devices.run_mesh(target, plan.mesh)
            return build(self.trace, plan, mesh, target.mesh, target.cluster.device)

        if self.options.plan is not None:
            return plan, executable(plan)
        made, program = first_that_compiles(plan, executable, self._replan, self.trace)
        if made is not plan:
            warnings.warn(f"{self.trace.name}: {made.notes[-1]}", stacklevel=5)  # the line that calls the step
            program.plan = made.with_trace(self.trace)
        return program.plan, program

    def _replan(
        self,
        *,
        memory_bytes: float | None = None,
        like: Candidate | None = None,
        whole: frozenset[str] = frozenset(),
    ) -> Plan:
        """See `fallback.Replan`."""
        options = self.options
        target = devices.resolve(options.cluster)
        mesh = _mesh_of_program(self.trace, target, options) or target.fixed_mesh
        if mesh is None:
            _check_pinned_axes(self.trace)
        if like is not None:
            mesh = like.mesh
        return make_plan(
            self.trace,
            target.cluster,
            memory_bytes=options.memory_bytes if memory_bytes is None else memory_bytes,
            mesh_shape=mesh.axis_sizes if mesh else options.mesh_shape,
            layout=options.layout if like is None else like.name,
            budget_s=options.budget_s,
            axis_names=mesh.axis_names if mesh else None,
            whole=whole,
        ).with_trace(self.trace)

    def __str__(self) -> str:
        return str(self.trace.jaxpr)

    def __repr__(self) -> str:
        trace = self.trace
        return f"<Traced {trace.name}: {len(trace.inputs)} inputs, {len(trace.outputs)} outputs>"


def _mesh_of_program(trace: Trace, target: devices.Target, options: Options) -> MeshShape | None:
    """The mesh that constraints and `shard_map`s in the step name, if they do; no other can be planned for."""
    if not trace.mesh_axes:
        return None
    names, sizes = zip(*trace.mesh_axes, strict=True)
    own, given = MeshShape(names, sizes), target.fixed_mesh
    fits = own.num_devices == target.cluster.num_devices and options.mesh_shape in (None, sizes)
    if not fits or given not in (None, own):
        raise PinError(
            "constraints, `shard_map`s and planned steps inside a step name the mesh that it is planned for",
            got=f"({own}) in the step, and {f'({given})' if given else target.cluster.name} to plan for",
            action="Pass that mesh as `cluster=`, or a cluster of as many devices and no mesh_shape; plan inner steps "
            "for the same mesh, or leave them plain",
            source=trace.source,
        )
    return own


def _updated(options: Options, **changes: Any) -> Options:
    """Options with some changed, given as users give them, and checked."""
    if "cluster" in changes:
        devices.check_cluster(changes["cluster"])
    if "memory" in changes:
        memory = changes.pop("memory")
        changes["memory_bytes"] = None if memory is None else parse_bytes(memory)
    if "mesh_shape" in changes:
        changes["mesh_shape"] = _checked_shape(changes["mesh_shape"])
    if "budget_s" in changes:
        changes["budget_s"] = _checked_budget(changes["budget_s"])
    if not isinstance(changes.get("verify", False), bool):
        raise PlanError("`verify` is True or False", got=repr(changes["verify"]), action="Give one of them")
    if "plan" in changes:
        changes["plan"] = _checked_plan(changes["plan"])
    if changes.get("layout", "auto") not in LAYOUTS:
        raise PlanError(
            f"`layout` is one of {', '.join(map(repr, LAYOUTS))}",
            got=repr(changes["layout"]),
            action="Leave it out to let the planner choose",
        )
    options = replace(options, **changes)
    pinned = _pinned_mesh((options.in_shardings, options.out_shardings))
    if options.cluster is None:
        return replace(options, cluster=pinned)
    if pinned is not None and options.cluster != pinned:
        raise PinError(
            "NamedShardings among the pins are on the mesh that the step runs on",
            got=f"one on {pinned} and cluster={options.cluster!r}",
            action="Leave `cluster` out, or pass that mesh, or pin with PartitionSpecs",
        )
    return options


def _checked_plan(plan: Any) -> Plan | None:
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(
            "`plan` is an autoplan.Plan", got=repr(plan), action="Read a plan file with Plan.load(path)"
        )
    return plan


def _checked_shape(mesh_shape: Iterable[int] | None) -> tuple[int, ...] | None:
    if mesh_shape is None:
        return None
    shape = tuple(mesh_shape) if isinstance(mesh_shape, Iterable) else ()
    if not shape or not all(isinstance(size, int) and size >= 1 for size in shape):
        raise PlanError(
            "`mesh_shape` is a tuple of the sizes of the mesh axes",
            got=repr(mesh_shape),
            action="Write, for instance, mesh_shape=(4, 2)",
        )
    if len(shape) > len(AXIS_NAMES):
        raise PlanError(
            f"a mesh has up to {len(AXIS_NAMES)} axes",
            got=f"mesh_shape={shape}",
            action="Join axes, or leave out those of size 1",
        )
    return shape


def _checked_budget(budget_s: float | None) -> float | None:
    if budget_s is not None and not (isinstance(budget_s, int | float) and budget_s > 0):
        raise PlanError(
            "`budget_s` is a number of seconds above 0, or None for no limit",
            got=repr(budget_s),
            action="Leave it out for the default",
        )
    return budget_s


def _pinned_mesh(shardings: Any) -> Mesh | None:
    """The mesh of the `NamedSharding`s among the pins, if there is one."""
    pins = jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, jax.sharding.Sharding))
    meshes = {pin.mesh for pin in pins if isinstance(pin, NamedSharding)}
    if len(meshes) > 1:
        raise PinError(
            "the layouts in in_shardings and out_shardings are on one mesh",
            got=", ".join(map(str, meshes)),
            action="Use the same mesh for all",
        )
    mesh = meshes.pop() if meshes else None
    return mesh if isinstance(mesh, Mesh) else None


def _check_pinned_axes(trace: Trace) -> None:
    """Refuses pins that name axes which no mesh of the planner has."""
    for leaf in (*trace.inputs, *trace.outputs):
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
