"""The plan: a frozen value that says how a step is laid out on a mesh, what that costs, and why.

A `Plan` needs neither devices nor the traced program: it can be printed, compared, hashed, saved, loaded and
sent by mail. `planner.make_plan` builds it, `emit.emit` turns it into shardings, `report` prints it and
`planfile` keeps it.

All quantities are SI: `_s` is seconds, `_bytes` is bytes; whatever is "per device" says so. NaN is refused
everywhere; infinity means "unknown" or "no limit", and only where a field says so.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
import math
import os
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from . import planfile, records, report, units
from .errors import PlanError, describe_array

if TYPE_CHECKING:
    from .verification import Verification

Spec = tuple[tuple[str, ...], ...]
"""The layout of a value: for each dim the mesh axes that split it, major first; `()` is a whole dim."""

ROLES = ("state", "batch", "input", "output")
SITES = ("operand", "result", "input", "output")

_TIMES = ("step_time_s", "compute_time_s", "communication_time_s")


def to_partition_spec(spec: Spec) -> PartitionSpec:
    """The `jax.sharding.PartitionSpec` of a spec, one entry per dim: `(("x",), ())` is `P('x', None)`."""
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec))


def spec_axes(spec: Spec) -> tuple[str, ...]:
    """The mesh axes that a spec uses, in the order of its dims."""
    return tuple(axis for axes in spec for axis in axes)


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the axes of a mesh, without devices; printed as `x=4, y=2`."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        records.freeze(self, axis_names=records.names("axis_names", self.axis_names))
        records.freeze(
            self, axis_sizes=tuple(records.integer("axis_sizes", size, least=1) for size in self.axis_sizes)
        )
        if len(self.axis_names) != len(self.axis_sizes):
            raise ValueError(
                f"a mesh needs one size per axis: got axes {self.axis_names} and sizes {self.axis_sizes}"
            )
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"the axes of a mesh need different names: got {self.axis_names}")

    @property
    def num_devices(self) -> int:
        return math.prod(self.axis_sizes)

    def items(self) -> Iterator[tuple[str, int]]:
        """(name, size) of each axis, major first."""
        return iter(zip(self.axis_names, self.axis_sizes, strict=True))

    def size(self, axes: str | Iterable[str]) -> int:
        """The number of ways that an axis, or several together, split a dim."""
        sizes = dict(self.items())
        return math.prod(sizes[axis] for axis in ([axes] if isinstance(axes, str) else axes))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.items()) or "one device"


@dataclass(frozen=True)
class LeafLayout:
    """The layout of one leaf of the step's arguments or results.

    `bytes_per_device` is what one device holds of it, padding included. `dtype` is a name such as "bfloat16"
    or "key<fry>". A "state" leaf goes in and comes out again in the same layout, a "batch" leaf is data;
    other leaves are "input" or "output".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    bytes_per_device: float
    role: str

    def __post_init__(self) -> None:
        records.text("path", self.path)
        records.text("dtype", self.dtype)
        records.freeze(
            self,
            shape=tuple(records.integer("shape", size) for size in self.shape),
            spec=_spec("spec", self.spec),
        )
        records.freeze_numbers(self, "bytes_per_device")
        records.one_of("role", self.role, ROLES)
        if len(self.spec) != len(self.shape):
            raise ValueError(
                f"{self.path}: a spec needs one entry per dim: got {self.spec} for shape {self.shape}"
            )

    @property
    def partition_spec(self) -> PartitionSpec:
        return to_partition_spec(self.spec)

    def shards(self, mesh: MeshShape) -> int:
        """In how many different parts the mesh holds the leaf; 1 is replicated."""
        return mesh.size(spec_axes(self.spec))


@dataclass(frozen=True)
class Collective:
    """A collective that the plan needs.

    `kind` is "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute"; `axes` the
    mesh axes that it runs over. `wire_bytes` (what one device sends), `time_s` and `hidden_s` (the part of it that runs
    beside computing, for which the step does not wait) are of one execution; `count` is the number of executions in a
    step, loops' trip counts included. `source` is the user's line as "file:line (function)", or ""; `op` says what it
    is for, such as "dot_general -> add" or "state.params['w']".
    """

    kind: str
    axes: tuple[str, ...]
    wire_bytes: float
    count: float
    time_s: float
    source: str = ""
    op: str = ""
    hidden_s: float = 0.0

    def __post_init__(self) -> None:
        records.text("kind", self.kind)
        records.freeze(self, axes=records.names("axes", self.axes))
        records.freeze_numbers(self, "wire_bytes", "count", "time_s", "hidden_s")
        records.text("source", self.source, empty=True)
        records.text("op", self.op, empty=True)


@dataclass(frozen=True)
class Candidate:
    """A layout that was considered, and its predicted cost.

    `name` is "auto" for a searched layout, else the classic one: "data", "fsdp", "tensor", "data x tensor",
    "fsdp x tensor". With status "CUTOFF" the search stopped because the candidate could not win, and
    `step_time_s` is a lower bound. Infinite times or memory are unknown. `note` is one more reason, in words,
    or "".
    """

    name: str
    mesh: MeshShape
    step_time_s: float
    compute_time_s: float
    communication_time_s: float
    peak_memory_bytes: float
    fits: bool
    status: str
    note: str = ""

    def __post_init__(self) -> None:
        records.text("name", self.name)
        records.instance("mesh", self.mesh, MeshShape)
        records.freeze_numbers(self, "peak_memory_bytes", *_TIMES, infinite=True)
        records.freeze(self, fits=bool(self.fits))
        records.text("status", self.status)
        records.text("note", self.note, empty=True)


@dataclass(frozen=True)
class Constraint:
    """A layout that `emit` puts on an operand or a result of an equation.

    `site` is a path of equation indices into nested jaxprs. `way` are the layouts to be taken on before `spec`,
    one after another. `again` is said of a reshard that is to be done again rather than shared with an earlier
    one.
    """

    site: tuple[int, ...]
    where: str
    index: int
    spec: Spec
    way: tuple[Spec, ...] = ()
    again: bool = False

    def __post_init__(self) -> None:
        records.freeze(self, site=tuple(records.integer("site", index) for index in self.site))
        records.one_of("where", self.where, SITES)
        records.freeze(self, index=records.integer("index", self.index), spec=_spec("spec", self.spec))
        records.freeze(self, way=tuple(_spec("way", spec) for spec in self.way), again=bool(self.again))


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """How a step runs on a mesh, what that is predicted to cost, and what else was considered.

    Plans are equal if they decide and predict the same; how long planning took does not count. `print(plan)`
    shows the report.

    Attributes:
      version: of the plan file's format.
      program: the name of the step.
      fingerprint: of the traced program, `Trace.fingerprint`.
      cluster: its description, such as "v5e:4x4".
      mesh: the axes of the mesh that was chosen.
      layout: "auto", or the name of the classic layout that was asked for.
      status: of the search, such as "OPTIMAL" or "FEASIBLE".
      gap: of `step_time_s` to the best bound, as a fraction; 0 is proved optimal, infinite is unknown.
      planning_time_s: from trace to plan.
      phases_s: (phase, seconds) in order; given as a mapping or pairs. `dict(plan.phases_s)` looks one up.
      step_time_s, compute_time_s, communication_time_s: predicted, per step.
      peak_memory_bytes, memory_limit_bytes: per device; the limit is infinite if there is none.
      inputs, outputs: the layout of every leaf of the arguments and results, in leaf order.
      state_pairs: (index in `inputs`, index in `outputs`) of each leaf of the state.
      collectives, candidates: see there.
      constraints: what `emit` puts inside the program.
      cost_sources: pairs of (figures, where they come from), such as ("memory bandwidth", "the data sheet of ...").
      notes: what the user should know, such as a large tensor that is replicated for want of a rule.

    Raises:
      ValueError: the fields contradict each other, or a value is of the wrong type or range.
    """

    version: int = planfile.VERSION
    program: str
    fingerprint: str
    cluster: str
    mesh: MeshShape
    layout: str
    status: str
    gap: float
    planning_time_s: float = field(compare=False)
    phases_s: tuple[tuple[str, float], ...] = field(compare=False)
    step_time_s: float
    compute_time_s: float
    communication_time_s: float
    peak_memory_bytes: float
    memory_limit_bytes: float
    inputs: tuple[LeafLayout, ...]
    outputs: tuple[LeafLayout, ...]
    state_pairs: tuple[tuple[int, int], ...]
    collectives: tuple[Collective, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    cost_sources: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    _trace = None  # the Trace that the plan is for; see `with_trace`. No annotation: it is no field

    def __post_init__(self) -> None:
        if self.version != planfile.VERSION:
            raise ValueError(f"version: expected {planfile.VERSION}, got {self.version!r}")
        for name in ("program", "fingerprint", "cluster", "layout", "status"):
            records.text(name, getattr(self, name))
        records.instance("mesh", self.mesh, MeshShape)
        records.freeze_numbers(self, "planning_time_s", "peak_memory_bytes", *_TIMES)
        records.freeze_numbers(self, "gap", "memory_limit_bytes", infinite=True)
        phases = self.phases_s.items() if isinstance(self.phases_s, Mapping) else self.phases_s
        phases = tuple(
            (records.text("phases_s", name), records.number("phases_s", time)) for name, time in phases
        )
        records.freeze(self, phases_s=phases)
        for name, kind in _RECORDS.items():
            records.freeze(
                self, **{name: tuple(records.instance(name, item, kind) for item in getattr(self, name))}
            )
        pairs = tuple(tuple(records.integer("state_pairs", i) for i in pair) for pair in self.state_pairs)
        records.freeze(self, state_pairs=pairs)
        pairs = ((records.text("cost_sources", a), records.text("cost_sources", b)) for a, b in self.cost_sources)
        records.freeze(self, cost_sources=tuple(pairs))
        records.freeze(self, notes=tuple(records.text("notes", note) for note in self.notes))
        _check_axes(self)
        _check_leaves(self)

    @property
    def in_shardings(self) -> tuple[PartitionSpec, ...]:
        """A `PartitionSpec` per leaf of the arguments, in leaf order (`inputs[i].path` names leaf i)."""
        return tuple(leaf.partition_spec for leaf in self.inputs)

    @property
    def out_shardings(self) -> tuple[PartitionSpec, ...]:
        """A `PartitionSpec` per leaf of the results, in leaf order (`outputs[i].path` names leaf i)."""
        return tuple(leaf.partition_spec for leaf in self.outputs)

    def partition_specs(self) -> dict[str, PartitionSpec]:
        """The arguments' layouts as plain JAX values, by leaf path: what you need to leave autoplan."""
        return {leaf.path: leaf.partition_spec for leaf in self.inputs}

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan as versioned JSON; an existing file is replaced whole or not at all.

        Raises:
          OSError: the file cannot be written.
        """
        planfile.write(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Plan":
        """Reads a plan that `save` wrote.

        Raises:
          PlanFileError: it is not a plan file, is broken, or is of another version.
          OSError: the file cannot be read.
        """
        return planfile.read(path, cls)

    def verify(self, *, full: bool = False, timeout_s: float = 600) -> "Verification":
        """Compiles the plan's program for its cluster, which need not be there, and compares.

        Simulated CPU devices need nothing; TPUs need libtpu (the extra `tpu-aot`), GPUs JAX's CUDA plugin
        (`gpu-aot`), and neither needs the hardware.

        Args:
          full: let the compiler generate code too, which takes far longer and tells no more.
          timeout_s: after which compiling is given up.

        Raises:
          PlanError: the plan comes from a file and has no program, the compiler is not installed, or it refuses
            the program.
        """
        from .verification import verify  # needs this module

        if self._trace is None:
            raise PlanError(
                "verifying compiles the program that the plan is for",
                got="a plan without its program, such as one from a file",
                action="Call step.use_plan(plan).plan(...).verify(), with the step and its arguments",
            )
        return verify(self, self._trace, full=full, timeout_s=timeout_s)

    def with_trace(self, trace: Any) -> "Plan":
        """This plan, which from now on knows the `Trace` that it is for; no part of its value, and not saved."""
        object.__setattr__(self, "_trace", trace)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_trace"}

    def to_json(self) -> str:
        """The text that `save` writes."""
        return planfile.dumps(self)

    def __str__(self) -> str:
        return report.text(self)

    def __repr__(self) -> str:
        cost = (
            f"{units.format_time(self.step_time_s)}, {units.format_bytes(self.peak_memory_bytes)} per device"
        )
        return (
            f"<Plan of {self.program} on {self.cluster}: {self.layout} on {self.mesh}, {cost}, {self.status}>"
        )


_RECORDS = {
    "inputs": LeafLayout,
    "outputs": LeafLayout,
    "collectives": Collective,
    "candidates": Candidate,
    "constraints": Constraint,
}


def _check_axes(plan: Plan) -> None:
    known = set(plan.mesh.axis_names)
    used = [(leaf.path, spec_axes(leaf.spec)) for leaf in plan.inputs + plan.outputs]
    used += [(f"constraint at {c.site}", spec_axes(s)) for c in plan.constraints for s in (*c.way, c.spec)]
    used += [(f"{c.kind} for {c.op or c.source}", c.axes) for c in plan.collectives]
    for what, axes in used:
        if not known.issuperset(axes):
            raise ValueError(f"{what} uses axes {axes}, which are not all in the mesh ({plan.mesh})")


def _check_leaves(plan: Plan) -> None:
    paths = [leaf.path for leaf in plan.inputs]
    if len(set(paths)) != len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"inputs: two leaves have the path {twice!r}")
    for pair in plan.state_pairs:
        if len(pair) != 2 or pair[0] >= len(plan.inputs) or pair[1] >= len(plan.outputs):
            counts = f"{len(plan.inputs)} inputs and {len(plan.outputs)} outputs"
            raise ValueError(f"state_pairs: expected (input index, output index) among {counts}; got {pair}")
        before, after = plan.inputs[pair[0]], plan.outputs[pair[1]]
        if (before.shape, before.dtype, before.spec) != (after.shape, after.dtype, after.spec):
            raise ValueError(
                f"a state must come out as it goes in: {_typed(before)} goes in, {_typed(after)} out"
            )


def _typed(leaf: LeafLayout) -> str:
    return f"{leaf.path} ({describe_array(leaf.dtype, leaf.shape)}) in {leaf.partition_spec}"


def _spec(name: str, value: Any) -> Spec:
    spec = tuple(records.names(name, axes) for axes in value)
    axes = spec_axes(spec)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: an axis can split one dim only: got {spec}")
    return spec
