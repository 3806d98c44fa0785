"""A plan against its compiled program: what `Plan.verify` returns.

The partitioner is free to communicate otherwise than planned. What it does is set off against the plan, in bytes on
the wire per device and step: first against planned collectives of the same kind, axes and size, then of the same kind
and axes, then of the same kind on some of the axes (a gather over two axes is planned as two), and last against the
planned collectives that it stands in for (`STANDS_FOR`). What is left over is unplanned.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from dataclasses import dataclass
import functools
import json
import math

from .. import records
from ..cost_models import parse_cluster
from ..plan import Collective, MeshShape, Plan
from . import report
from .ahead import Compilation, compile_plan
from .flops import step_flops
from .hlo import parse
from .replay import step_time_s
from .traffic import CompiledCollective, collectives_of

MAX_UNPLANNED = 0.01
"""The share of the traffic that may be unplanned: loop counters, losses and norms that no plan prices."""

SPMD_WARNING = "Involuntary full rematerialization"
"""What XLA's partitioner says of an array that it gathers whole to lay it out anew."""

STANDS_FOR = {
    "all-reduce": ("reduce-scatter", "all-gather"),
    "reduce-scatter": ("all-reduce",),
    "all-gather": ("all-reduce", "all-to-all"),
    "collective-permute": ("all-to-all", "all-gather", "reduce-scatter"),
    "all-to-all": ("collective-permute",),
}
"""What the partitioner and the backends do instead of what was planned: XLA:CPU, for instance, makes an all-reduce of
every reduce-scatter, and windowed einsums gather by permutes."""


@dataclass(frozen=True)
class Unplanned:
    """Traffic that the plan does not have: a compiled collective, or what it sends beyond the plan.

    `excess_bytes` is what a device sends of it in a step, `share` its part of all that the compiled step sends.
    """

    kind: str
    axes: tuple[str, ...]
    excess_bytes: float
    share: float
    count: float
    source: str
    op: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Verification:
    """What the compiler made of a plan, beside what was planned; `print` shows a report.

    Attributes:
      program, cluster, mesh: of the plan.
      predicted_memory_bytes, memory_limit_bytes, predicted_step_time_s: the plan's; memory is per device.
      planned: the plan's collectives.
      peak_memory_bytes: the compiler's, per device: arguments + outputs - aliased + temporaries.
      collectives: the compiler's.
      unplanned: what the plan does not have of them, largest first.
      step_time_s: replay of the compiled schedule; None where the compiler gives none (all but TPUs).
      flops: of matmuls and convolutions, per device and step.
      rematerialised: arrays that the partitioner gathered whole to lay them out anew, as its log says; None where the
        log is not seen (compiled in this process).
      unknown_loops: loops whose trip count cannot be told; their bodies count once.
      compile_time_s: how long compiling took.
    """

    program: str
    cluster: str
    mesh: MeshShape
    predicted_memory_bytes: float
    memory_limit_bytes: float
    predicted_step_time_s: float
    planned: tuple[Collective, ...]
    peak_memory_bytes: float
    collectives: tuple[CompiledCollective, ...]
    unplanned: tuple[Unplanned, ...]
    step_time_s: float | None
    flops: float
    unknown_loops: int
    rematerialised: int | None = None
    compile_time_s: float = dataclasses.field(compare=False)

    def __post_init__(self) -> None:
        records.freeze_numbers(self, "predicted_memory_bytes", "peak_memory_bytes", "predicted_step_time_s", "flops")
        records.freeze_numbers(self, "memory_limit_bytes", infinite=True)

    @property
    def memory_error(self) -> float:
        """(predicted - compiled) / compiled peak memory."""
        return relative_error(self.predicted_memory_bytes, self.peak_memory_bytes)

    @property
    def step_time_error(self) -> float | None:
        """(predicted - replayed) / replayed step time."""
        return None if self.step_time_s is None else relative_error(self.predicted_step_time_s, self.step_time_s)

    @property
    def collectives_error(self) -> dict[str, float]:
        """By kind: (planned - compiled) / compiled bytes on the wire; infinite if none were compiled."""
        return {kind: relative_error(*both) for kind, both in sorted(self.wire_bytes_by_kind.items())}

    @property
    def wire_bytes_by_kind(self) -> dict[str, tuple[float, float]]:
        """By kind: bytes that a device sends in a step, (planned, compiled)."""
        kinds = dict.fromkeys(c.kind for c in (*self.planned, *self.collectives))
        return {
            kind: (
                math.fsum(c.wire_bytes * c.count for c in self.planned if c.kind == kind),
                math.fsum(c.total_bytes for c in self.collectives if c.kind == kind),
            )
            for kind in kinds
        }

    @property
    def wire_bytes(self) -> float:
        """What a device sends in a compiled step."""
        return math.fsum(c.total_bytes for c in self.collectives)

    @property
    def fits(self) -> bool:
        return self.peak_memory_bytes <= self.memory_limit_bytes

    @property
    def unplanned_share(self) -> float:
        """The part of the compiled traffic that was not planned."""
        return math.fsum(u.share for u in self.unplanned)

    @property
    def ok(self) -> bool:
        """Whether the program fits and communicates as planned, but for a hundredth (`MAX_UNPLANNED`)."""
        return self.fits and self.unplanned_share <= MAX_UNPLANNED

    def to_json(self) -> str:
        """All fields and errors as JSON; infinite numbers are the string "Infinity"."""
        values = dataclasses.asdict(self)
        derived = ("memory_error", "step_time_error", "collectives_error", "unplanned_share", "fits", "ok")
        values |= {name: getattr(self, name) for name in derived}
        return json.dumps(_finite(values), indent=1) + "\n"

    def __str__(self) -> str:
        return report.text(self)

    def __repr__(self) -> str:
        word = "as planned" if self.ok else f"{self.unplanned_share:.0%} unplanned" if self.fits else "does not fit"
        return f"<Verification of {self.program} on {self.cluster}: {word}>"


def verify(plan: Plan, trace, *, full: bool = False, timeout_s: float = 600) -> Verification:
    """Compiles a plan's program for its cluster and compares; see `Plan.verify`.

    Raises:
      PlanError: it cannot be compiled here.
    """
    return compared(plan, compile_plan(trace, plan, full=full, timeout_s=timeout_s))


def compared(plan: Plan, compilation: Compilation) -> Verification:
    """A plan beside what the compiler made of it."""
    module, cluster, sizes = parse(compilation.text), parse_cluster(plan.cluster), dict(plan.mesh.items())
    collectives, unknown = collectives_of(module, sizes)
    platform = cluster.device.platform
    return Verification(
        program=plan.program,
        cluster=plan.cluster,
        mesh=plan.mesh,
        predicted_memory_bytes=plan.peak_memory_bytes,
        memory_limit_bytes=plan.memory_limit_bytes,
        predicted_step_time_s=plan.step_time_s,
        planned=plan.collectives,
        peak_memory_bytes=compilation.peak_memory_bytes,
        collectives=collectives,
        unplanned=unplanned(plan.collectives, collectives, platform),
        step_time_s=step_time_s(module, cluster, sizes) if platform == "tpu" else None,
        flops=step_flops(module),
        unknown_loops=unknown,
        rematerialised=None if compilation.log is None else compilation.log.count(SPMD_WARNING),
        compile_time_s=compilation.compile_time_s,
    )


def relative_error(predicted: float, compiled: float) -> float:
    if compiled:
        return (predicted - compiled) / compiled
    return math.inf if predicted else 0.0


def unplanned(
    planned: tuple[Collective, ...], compiled: tuple[CompiledCollective, ...], platform: str
) -> tuple[Unplanned, ...]:
    """What the compiled program sends beyond the plan, largest first; see the module's text."""
    budget = [c.wire_bytes * c.count for c in planned]
    left = [c.total_bytes for c in compiled]
    # An all-reduce in place of a reduce-scatter sends twice the bytes. That is how XLA:CPU does every one, and no
    # fault of the plan; elsewhere the other half is in excess.
    doubled = platform == "cpu"
    for match in _MATCHES:
        for i, have in enumerate(compiled):
            for j, want in enumerate(planned):
                if left[i] > 0 and budget[j] > 0 and match(have, want):
                    factor = 2.0 if doubled and (have.kind, want.kind) == ("all-reduce", "reduce-scatter") else 1.0
                    taken = min(left[i], factor * budget[j])
                    left[i] -= taken
                    budget[j] -= taken / factor
    total = math.fsum(c.total_bytes for c in compiled)
    found = [
        Unplanned(c.kind, c.axes, excess, excess / total, c.count, c.source or _planned_source(c, planned), c.op)
        for c, excess in zip(compiled, left, strict=True)
        if excess > 1e-6 * total
    ]
    return tuple(sorted(found, key=lambda u: -u.excess_bytes))


def _same_size(have: CompiledCollective, want: Collective) -> bool:
    return _same_axes(have, want) and math.isclose(have.wire_bytes, want.wire_bytes, rel_tol=0.01)


def _same_axes(have: CompiledCollective, want: Collective) -> bool:
    return have.kind == want.kind and set(have.axes) == set(want.axes)


def _some_axes(have: CompiledCollective, want: Collective) -> bool:
    return have.kind == want.kind and not set(have.axes).isdisjoint(want.axes)


def _stands_for(have: CompiledCollective, want: Collective) -> bool:
    return want.kind in STANDS_FOR.get(have.kind, ()) and not set(have.axes).isdisjoint(want.axes)


def _same_line(have: CompiledCollective, want: Collective) -> bool:
    return _same_size(have, want) and have.source == want.source


_MATCHES: tuple[Callable[[CompiledCollective, Collective], bool], ...] = (
    _same_line, _same_size, _same_axes, _some_axes, _stands_for,
)  # fmt: skip


def _planned_source(have: CompiledCollective, planned: tuple[Collective, ...]) -> str:
    """For a collective whose line the compiler lost: that of the planned one most like it, if there is one."""
    for match in (_same_size, _same_axes):
        if sources := {want.source for want in planned if match(have, want)}:
            return sources.pop() if len(sources) == 1 else ""
    return ""


@functools.singledispatch
def _finite(value):
    return value


@_finite.register
def _(value: float):
    return "Infinity" if math.isinf(value) else value


@_finite.register
def _(value: dict):
    return {name: _finite(item) for name, item in value.items()}


@_finite.register(list)
@_finite.register(tuple)
def _(value):
    return [_finite(item) for item in value]
