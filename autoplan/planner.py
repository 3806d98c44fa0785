"""The planner: mesh shapes, classic layouts and the search, from a trace to a plan.

On the first mesh shape the classic layouts are scored first, as restrictions of the choice problem; the best that
fits is the incumbent. The whole problem is then solved with the incumbent as cutoff, so a shape that cannot
win is given up as soon as its bound says so; the classic layouts of one that does win are scored after, to be compared.
If the best choice does not fit, the problem is solved again with
a memory row for every program point that can be the peak.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
import math
import time

import numpy as np

from .assemble import Scored, collectives, constraints, input_leaves, output_leaves
from .classics import Roles, batched_inputs, named_parts, restrict, roles_of
from .cost_models import Cluster
from .errors import DeviceError, MemoryLimitError, check_divisible
from .folding import Folded, fold
from .graph import build_graph
from .memory import MemoryModel, memory_model
from .pins import left_whole, pinned_leaves, pins_possible, undivided, wanted_strategies
from .plan import Candidate, LeafLayout, MeshShape, Plan
from .problem import ClassProblem, build_problem, leaning_to_links
from .reshard import Machine
from .search import Problem, Solution, Status, solve
from .trace import Trace
from .units import format_bytes

LAYOUTS = ("auto", "data", "fsdp", "tensor")
AXIS_NAMES = ("x", "y", "z")
# Seconds after which a user gets the best plan found so far. Only tight memory limits come near it.
BUDGET_S = 60.0
# A gap below this is a proof of optimality. Problems of few strategies are solved that far.
PROVED_GAP, FEW_STRATEGIES = 1e-4, 4000
# Larger ones stop at this relative gap: costs are known less well, and the last percent of proof can take longer
# than all before it.
SEARCH_GAP = 2e-2
# A mesh of more axes must be better than one of fewer by more than this.
WORTHWHILE = 1e-2
# A classic layout this many times slower than the best so far is not worked out further.
HOPELESS = 1.5
# Weights of links against computing, where a step is bound by its links.
LEANINGS = (0.5, 0.9)
# A limit counts as held up to this share of it (sums of many floats).
MEMORY_TOLERANCE = 1e-9


class Phases:
    """Seconds spent by phase, in order of first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._mark
        self._mark = now


@dataclass(frozen=True)
class Setting:
    """What stays the same over all mesh shapes."""

    trace: Trace
    folded: Folded
    roles: Roles
    cluster: Cluster
    limit_bytes: float
    deadline_s: float  # time.perf_counter() value; inf for none
    whole: frozenset[str]
    phases: Phases = field(compare=False)

    @property
    def left_s(self) -> float | None:
        """Seconds left of the budget, None without one."""
        return None if math.isinf(self.deadline_s) else max(self.deadline_s - time.perf_counter(), 0.0)


@dataclass(frozen=True)
class Outcome:
    """One candidate: a named layout (or "auto") on one mesh. `scored` is None if no choice was found."""

    name: str
    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    scored: Scored | None
    solution: Solution
    fits: bool
    smallest: Scored | None = None  # where nothing fits: the choice that needs least memory

    @property
    def cost_s(self) -> float:
        return self.scored.step_time_s if self.scored is not None and self.fits else math.inf


def make_plan(trace: Trace, cluster: Cluster, *, memory_bytes: float | None = None,
              mesh_shape: tuple[int, ...] | None = None, layout: str = "auto", budget_s: float | None = None,
              axis_names: tuple[str, ...] | None = None, whole: frozenset[str] = frozenset()) -> Plan:
    """The best plan of a traced step on a cluster.

    Args:
      memory_bytes: per device; None is the device's memory.
      mesh_shape: sizes of the mesh axes; None lets the planner choose among up to three axes.
      layout: "auto", or the classic layout to be used on every axis.
      budget_s: wall-clock seconds for the search; None is no limit.
      axis_names: of a fixed mesh; by default x, y, z.
      whole: lines of the step ("file:line") whose operations are not to be split.

    Raises:
      MemoryLimitError: nothing fits; says the smallest limit that would do, and what fills the memory.
      PinError: a pinned layout is impossible on the mesh.
      DeviceError: `mesh_shape` is not that of the cluster.
    """
    started = time.perf_counter()
    phases = Phases()
    platform = cluster.device.platform
    graph = build_graph(trace, narrow=platform == "tpu", wide=platform == "cpu")
    phases.end("graph and rules")
    folded = fold(graph, trace)
    roles = roles_of(folded, trace)
    phases.end("fold")
    limit = float(memory_bytes if memory_bytes is not None else cluster.device.usable_memory_bytes)
    deadline = math.inf if budget_s is None else started + budget_s
    setting = Setting(trace, folded, roles, cluster, limit, deadline, whole, phases)
    outcomes: list[Outcome] = []
    for shape in _shapes(cluster, mesh_shape, layout):
        names = axis_names or AXIS_NAMES[:len(shape)]
        if pins_possible(trace, names, fixed=mesh_shape is not None):
            outcomes += _solve_shape(setting, shape, names, layout, outcomes, mesh_shape is not None)
    best = min(outcomes, key=lambda o: o.cost_s * (1 + WORTHWHILE) ** len(o.shape), default=None)
    if best is None or math.isinf(best.cost_s):
        raise _nothing_fits(setting, outcomes)
    return _plan(setting, best, outcomes, layout, started)


def _shapes(cluster: Cluster, mesh_shape, layout: str) -> tuple[tuple[int, ...], ...]:
    if mesh_shape is not None and math.prod(mesh_shape) != cluster.num_devices:
        raise DeviceError(f"a mesh takes all devices of its cluster: {cluster.name} has {cluster.num_devices}",
                          got=f"mesh_shape={tuple(mesh_shape)}, which is {math.prod(mesh_shape)} devices",
                          action=f"Give sizes whose product is {cluster.num_devices}, or another cluster")
    if mesh_shape is not None:
        return (tuple(mesh_shape),)
    return cluster.mesh_shapes(1 if layout != "auto" else 3)


def _solve_shape(setting: Setting, shape, names, layout: str, before: Sequence[Outcome], fixed: bool
                 ) -> list[Outcome]:
    """Candidates of one mesh shape: the classic layouts, then the search if it may still win."""
    machine = Machine(setting.cluster.device, setting.cluster.mesh(shape))
    graph = setting.folded.graph
    wanted = wanted_strategies(graph, machine, names) | left_whole(setting.folded, setting.whole, shape)
    shell = build_problem(setting.folded, machine, pinned_leaves(setting.trace, graph, machine, names), wanted)
    memory = memory_model(shell, setting.trace)
    setting.phases.end("problem")
    named = named_parts(len(shape))
    if not fixed and len(shape) > 1:  # one part on all axes is what the one-axis mesh already scored
        named = {name: parts for name, parts in named.items() if len(set(parts)) > 1}
    if layout != "auto":
        _check_batch(setting, shape, names, named[layout])
        masks = restrict(shell, setting.roles, named[layout])
        forced = _solve(setting, shell, memory, layout, names, masks=masks)
        setting.phases.end("search")
        return [forced]
    best = min((o.cost_s for o in before), default=math.inf)
    if any(len(o.shape) < len(shape) for o in before):
        best *= 1 - WORTHWHILE
    if not fixed and math.isfinite(best):
        free = _solve(setting, shell, memory, "auto", names, cutoff=best)
        setting.phases.end("search")
        if free.solution.status is Status.CUTOFF:  # then no classic layout of this shape can win either
            return [free]
        return [*_classics(setting, shell, memory, named, names, min(best, free.cost_s)), free]
    classics = _classics(setting, shell, memory, named, names, best)
    start = min(classics, key=lambda o: o.cost_s, default=None)
    initial = start.scored.choice if start is not None and start.scored is not None else None
    cutoff = min((o.cost_s for o in [*before, *classics]), default=math.inf)
    free = _solve(setting, shell, memory, "auto", names, cutoff=cutoff, initial=initial)
    setting.phases.end("search")
    return [*classics, free]


def _classics(setting: Setting, shell: ClassProblem, memory: MemoryModel, named: dict[str, tuple[str, ...]], names,
              best: float) -> list[Outcome]:
    """The classic layouts of one mesh shape, worked out as far as they are not hopeless beside the best."""
    outcomes: list[Outcome] = []
    for name, parts in named.items():
        if _uneven_batch(setting, shell.machine.shape, parts):
            continue
        best = min([best, *(o.cost_s for o in outcomes)])
        outcomes.append(_solve(setting, shell, memory, name, names, masks=restrict(shell, setting.roles, parts),
                               cutoff=HOPELESS * best, compared_only=True))
    setting.phases.end("classic layouts")
    return outcomes


def _uneven_batch(setting: Setting, shape, parts: Sequence[str]) -> list[int]:
    """The batch inputs that the parts of the axes would split unevenly."""
    ways = math.prod(size for size, part in zip(shape, parts) if part in ("data", "fsdp"))
    trace = setting.trace
    return [i for i in batched_inputs(trace, setting.roles.inputs) if trace.inputs[i].shape[0] % ways]


def _check_batch(setting: Setting, shape, names, parts: Sequence[str]) -> None:
    """A classic layout that was asked for must be possible: nothing falls back silently."""
    axes = tuple(name for name, part in zip(names, parts) if part in ("data", "fsdp"))
    for i in _uneven_batch(setting, shape, parts):
        leaf = setting.trace.inputs[i]
        check_divisible(leaf.path, leaf.shape, leaf.dtype, (axes,), dict(zip(names, shape)),
                        source=setting.trace.source)


def _whole_batch_notes(setting: Setting, inputs: Sequence[LeafLayout]) -> list[str]:
    """Batches that lie whole on every device because no axis divides them."""
    found = [inputs[i] for i in batched_inputs(setting.trace, setting.roles.inputs)]
    devices = setting.cluster.num_devices
    return [f"{leaf.path} is whole on every device: its batch of {leaf.shape[0]} is no multiple of the {devices} "
            f"devices; pad it to {-(-leaf.shape[0] // devices) * devices} to split it"
            for leaf in found if not any(leaf.spec) and leaf.shape[0] % devices]


def _solve(setting: Setting, shell: ClassProblem, memory: MemoryModel, name: str, axis_names, *,
           masks: Sequence[np.ndarray] | None = None, cutoff: float = math.inf, initial=None,
           compared_only: bool = False) -> Outcome:
    """The best choice, or if that does not fit, the best that does. `compared_only`: a good choice is enough, and it
    need not fit."""
    def allowed(problem: Problem) -> Problem:
        if masks is None:
            return problem
        costs = tuple(np.where(mask, cost, np.inf) for mask, cost in zip(masks, problem.node_costs))
        return replace(problem, node_costs=costs)

    problem, limit = allowed(shell.problem), setting.limit_bytes
    few = sum(int(np.isfinite(cost).sum()) for cost in problem.node_costs) <= FEW_STRATEGIES
    effort = {"cutoff": cutoff, "initial": initial, "gap": PROVED_GAP / 2 if few else SEARCH_GAP}

    def outcome(solution: Solution) -> Outcome:
        if solution.choice is None:
            return Outcome(name, tuple(axis_names), shell.machine.shape, None, solution, False)
        scored = Scored(shell, memory, solution.choice)
        return Outcome(name, tuple(axis_names), shell.machine.shape, scored, solution,
                       scored.peak_memory_bytes <= limit * (1 + MEMORY_TOLERANCE))

    rows: dict = {}

    def better(found: Outcome) -> Outcome:
        """The best of an outcome and, where its gathers have too little to hide behind, what leans to fewer of them."""
        if found.scored is None or found.scored.excess_s <= SEARCH_GAP * found.cost_s or compared_only:
            return found
        bound = found.solution.bound
        for weight in LEANINGS:
            leaning = replace(allowed(leaning_to_links(shell, weight)), **rows)
            other = outcome(solve(leaning, budget_s=setting.left_s, gap=SEARCH_GAP))
            bound = max(bound, other.solution.bound)
            found = min(found, other, key=lambda o: o.cost_s)
        return replace(found, solution=replace(found.solution, bound=min(bound, found.cost_s)))

    free = better(outcome(solve(problem, budget_s=setting.left_s, prove=not compared_only, **effort)))
    if free.fits or free.scored is None or compared_only:
        return free
    live = memory.rows()
    rows |= {"buffers": memory.buffers, "live": live, "limits": np.full(live.shape[0], limit)}
    bound = better(outcome(solve(replace(problem, **rows), budget_s=setting.left_s, **effort)))
    why = bound.solution.infeasibility
    if why is None or why.choice is None:
        return bound
    return replace(bound, smallest=Scored(shell, memory, why.choice))


# ---------------------------------------------------------------------------------------------------------
# The plan


def _plan(setting: Setting, best: Outcome, outcomes: Sequence[Outcome], layout: str, started: float) -> Plan:
    trace, scored, names = setting.trace, best.scored, best.axis_names
    inputs = input_leaves(scored, trace, setting.roles, names)
    outputs = output_leaves(scored, trace, inputs, names)
    moved = collectives(scored, names)
    placed = constraints(scored, names)
    bound = min((o.solution.bound for o in outcomes if o.name == best.name or layout == "auto" and o.name == "auto"),
                default=best.cost_s)
    gap = max(0.0, (best.cost_s - bound) / best.cost_s) if best.cost_s > 0 else 0.0
    gap = gap if gap > PROVED_GAP else 0.0
    candidates = tuple(map(_candidate, outcomes))
    communication_s = min(scored.communication_time_s, scored.step_time_s)
    setting.phases.end("plan")
    return Plan(
        program=trace.name, fingerprint=trace.fingerprint, cluster=setting.cluster.name,
        mesh=MeshShape(names, best.shape), layout=layout,
        status=Status.OPTIMAL.name if gap == 0 else Status.FEASIBLE.name, gap=gap,
        planning_time_s=time.perf_counter() - started, phases_s=setting.phases.seconds,
        step_time_s=scored.step_time_s, compute_time_s=scored.step_time_s - communication_s,
        communication_time_s=communication_s, peak_memory_bytes=scored.peak_memory_bytes,
        memory_limit_bytes=setting.limit_bytes, inputs=inputs, outputs=outputs, state_pairs=trace.state_pairs,
        collectives=moved, candidates=candidates, constraints=placed, cost_sources=setting.cluster.describe_sources(),
        notes=(*trace.notes, *setting.folded.graph.notes, *_whole_batch_notes(setting, inputs),
               *dict.fromkeys(undivided(setting.folded.graph, dict(zip(names, best.shape))))))


def _candidate(outcome: Outcome) -> Candidate:
    mesh = MeshShape(outcome.axis_names, outcome.shape)
    status, scored = outcome.solution.status, outcome.scored
    if scored is None or status is Status.CUTOFF:
        note = "cannot beat the best so far" if status is Status.CUTOFF else outcome.solution.message
        return Candidate(outcome.name, mesh, max(outcome.solution.bound, 0.0), math.inf, math.inf, math.inf, False,
                         status.name, note)
    communication_s = min(scored.communication_time_s, scored.step_time_s)
    return Candidate(outcome.name, mesh, scored.step_time_s, scored.step_time_s - communication_s, communication_s,
                     scored.peak_memory_bytes, outcome.fits, status.name)


def _nothing_fits(setting: Setting, outcomes: Sequence[Outcome]) -> MemoryLimitError:
    source, limit = setting.trace.source, format_bytes(setting.limit_bytes)
    best = min((o.smallest for o in outcomes if o.smallest is not None), key=lambda s: s.peak_memory_bytes,
               default=None)
    if any(o.solution.status is Status.TIME_LIMIT for o in outcomes):
        return MemoryLimitError("no layout that fits was found within the time for planning",
                                got=f"{limit} per device on {setting.cluster.name}",
                                action="Raise `budget_s` or `memory`", source=source)
    if best is None:
        return MemoryLimitError("no layout is allowed by the pins and the memory limit",
                                got=f"{limit} per device on {setting.cluster.name}",
                                action="Loosen in_shardings, or raise `memory`", source=source)
    smallest = math.ceil(best.peak_memory_bytes * (1 - MEMORY_TOLERANCE))
    return MemoryLimitError(
        "the step must fit the memory of each device", smallest_bytes=smallest,
        got=f"a limit of {limit} ({setting.limit_bytes:.0f} bytes); the smallest that works on {setting.cluster.name} "
            f"is {format_bytes(smallest)} ({smallest} bytes; {_largest(best)})",
        action="Raise `memory`, use more devices, a smaller batch, or jax.checkpoint", source=source)


def _largest(scored: Scored) -> str:
    """What fills the memory at the peak of a choice, in words."""
    memory, edge_nodes = scored.memory, scored.shell.problem.edge_nodes
    peak = int(np.argmax(memory.profile(scored.choice, edge_nodes)))
    total: dict[str, float] = {}
    for label, size in zip(memory.labels, memory.at(peak) * memory.sizes(scored.choice, edge_nodes)):
        total[label] = total.get(label, 0.0) + size
    top = sorted(total.items(), key=lambda item: -item[1])[:3]
    return "at the peak: " + ", ".join(f"{format_bytes(size)} of {label}" for label, size in top)
