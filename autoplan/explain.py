"""A plan in words: what its axes split, how its time and memory are made up, and why other layouts lost.

Functions from a `Plan` to a sentence, for reports of any kind; computed from the plan alone.
"""

from collections.abc import Sequence
import math
import re
from typing import TYPE_CHECKING

from .units import format_bytes, format_time

if TYPE_CHECKING:
    from .plan import Candidate, LeafLayout, MeshShape, Plan, Spec

SAME = 0.005
"""Relative differences below this are not worth a word."""

_PATH_STEP = re.compile(r"^[^.\[]+|\.[^.\[]+|\[[^\]]*\]")


def spec_text(spec: "Spec") -> str:
    """A spec as code: "P('x', None, ('y', 'z'))"."""
    entries = ("None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes) for axes in spec)
    return f"P({', '.join(entries)})"


def path_steps(path: str) -> list[str]:
    """The steps of a leaf's path: "state.params['w']" is "state", ".params", "['w']"."""
    return _PATH_STEP.findall(path)


def size_of_limit(size_bytes: float, limit_bytes: float) -> str:
    """ "21 GiB of 16 GiB", or only the size where there is no limit."""
    limit = f" of {format_bytes(limit_bytes)}" if math.isfinite(limit_bytes) else ""
    return format_bytes(size_bytes) + limit


# What is split over what.


def layout_in_words(plan: "Plan") -> str:
    """What the axes split, after the nearest classic layout: "like fsdp: batch and state split over x"."""
    if plan.mesh.num_devices == 1:
        return "one device, so nothing is split"
    name = nearest_classic(plan)
    asked = (
        f"{plan.layout} (as asked)"
        if plan.layout != "auto"
        else f"like {name}"
        if name
        else "none of the classic ones"
    )
    parts = {"batch": leaves_of(plan, "batch"), **state_parts(plan)}
    words: dict[str, list[str]] = {}
    for part, leaves in parts.items():
        if leaves:
            words.setdefault(_axes_in_words(plan.mesh, leaves), []).append(part)
    told = [f"{_and(names)} {axes}" for axes, names in words.items()]
    return f"{asked}: " + "; ".join(told + _inner_axes_in_words(plan))


def nearest_classic(plan: "Plan") -> str:
    """The classic layout that splits most of the batch and of the state over the same axes; "" if there is
    none.

    An axis that splits the batch is "data", the state "tensor", both "fsdp".
    """
    batch, state = leaves_of(plan, "batch"), leaves_of(plan, "state")
    split = {
        (_share(plan.mesh, batch, axis) > 0.5, _share(plan.mesh, state, axis) > 0.5)
        for axis, size in plan.mesh.items()
        if size > 1
    }
    words = {(True, False): "data", (True, True): "fsdp", (False, True): "tensor"}
    return "" if (False, False) in split else " x ".join(name for key, name in words.items() if key in split)


def leaves_of(plan: "Plan", role: str) -> list["LeafLayout"]:
    """The leaves of the arguments that have a role."""
    return [leaf for leaf in plan.inputs if leaf.role == role]


def state_parts(plan: "Plan") -> dict[str, list["LeafLayout"]]:
    """The leaves of the state by the first steps of their paths, such as `state.params` and
    `state.opt_state`.

    As many steps as tell 2 to 5 parts apart, counting only parts of some size; else one part, "state".
    """
    state = leaves_of(plan, "state")
    total = math.fsum(leaf.bytes_per_device for leaf in state)
    for steps in (1, 2, 3):
        parts: dict[str, list[LeafLayout]] = {}
        for leaf in state:
            parts.setdefault("".join(path_steps(leaf.path)[:steps]), []).append(leaf)
        large = {
            name: leaves
            for name, leaves in parts.items()
            if math.fsum(leaf.bytes_per_device for leaf in leaves) >= SAME * total
        }
        if len(large) > 1:
            return large if len(large) <= 5 else {"state": state}
    return {"state": state}


def _axes_in_words(mesh: "MeshShape", leaves: Sequence["LeafLayout"]) -> str:
    """ "split over x and y (96% of it)", or "replicated"."""
    words = []
    for axis, size in mesh.items():
        share = _share(mesh, leaves, axis)
        if size > 1 and share >= SAME:
            words.append(axis if share > 1 - SAME else f"{axis} ({share:.0%} of it)")
    return f"split over {_and(words)}" if words else "replicated"


def _inner_axes_in_words(plan: "Plan") -> list[str]:
    """What the axes are for that split none of the arguments."""
    of_arguments = {axis for leaf in plan.inputs for axes in leaf.spec for axis in axes}
    of_values = {axis for constraint in plan.constraints for axes in constraint.spec for axis in axes}
    rest = [axis for axis, size in plan.mesh.items() if size > 1 and axis not in of_arguments]
    inner, idle = (
        [axis for axis in rest if axis in of_values],
        [axis for axis in rest if axis not in of_values],
    )
    words = [f"only values inside the step split over {_and(inner)}"] if inner else []
    return words + ([f"nothing split over {_and(idle)}"] if idle else [])


def _share(mesh: "MeshShape", leaves: Sequence["LeafLayout"], axis: str) -> float:
    """The fraction of the leaves' bytes, on all devices but without copies, that an axis splits."""
    sizes = [leaf.bytes_per_device * leaf.shards(mesh) for leaf in leaves]
    split = [
        size for leaf, size in zip(leaves, sizes, strict=True) if any(axis in axes for axes in leaf.spec)
    ]
    return math.fsum(split) / math.fsum(sizes) if math.fsum(sizes) else 0.0


# How time and memory are made up.


def sources_in_words(plan: "Plan") -> str:
    """Which costs were measured, and where the others are written."""
    measured = [(figures, source) for figures, source in plan.cost_sources if source.startswith("profile of")]
    if not measured:
        return "data sheets and tables that come with autoplan (each is in `plan.cost_sources`)"
    return "; ".join(f"{figures}: {source}" for figures, source in measured) + "; the rest in `plan.cost_sources`"


def step_in_words(plan: "Plan") -> str:
    """ "412 ms = 310 ms compute + 102 ms communication (25%)"."""
    total, compute, communication = plan.step_time_s, plan.compute_time_s, plan.communication_time_s
    words = (
        f"{format_time(total)} = {format_time(compute)} compute + {format_time(communication)} communication"
    )
    overlap = compute + communication - total
    if overlap > SAME * total:
        return f"{words} - {format_time(overlap)} of it in parallel"
    return f"{words} ({communication / total:.0%})" if total else words


def memory_in_words(plan: "Plan") -> str:
    """The peak against the limit and, largest first, what fills it."""
    words = f"{size_of_limit(plan.peak_memory_bytes, plan.memory_limit_bytes)} per device"
    if 0 < plan.memory_limit_bytes < math.inf:
        words += f" ({plan.peak_memory_bytes / plan.memory_limit_bytes:.0%})"
    named = {**state_parts(plan), "batch": leaves_of(plan, "batch")}
    parts = {name: math.fsum(leaf.bytes_per_device for leaf in leaves) for name, leaves in named.items()}
    arguments = math.fsum(leaf.bytes_per_device for leaf in plan.inputs)
    parts["other arguments"] = arguments - math.fsum(parts.values())
    parts["activations, gradients and temporaries"] = plan.peak_memory_bytes - arguments
    told = [(name, size) for name, size in parts.items() if size > 1e-3 * plan.peak_memory_bytes]
    told.sort(key=lambda part: -part[1])
    return f"{words}: " + ", ".join(f"{format_bytes(size)} {name}" for name, size in told) if told else words


def search_in_words(plan: "Plan") -> str:
    """How sure the plan is, and how long it took."""
    gap = (
        f"at most {plan.gap:.1%} from the best"
        if math.isfinite(plan.gap)
        else "how far from the best is unknown"
    )
    words = {
        "OPTIMAL": "proved the best under the cost model" if plan.gap <= SAME else gap,
        "FEASIBLE": gap,
        "TIME_LIMIT": f"stopped at the time limit, {gap}",
    }.get(plan.status.upper(), "")
    words = f" ({words})" if words and plan.layout == "auto" else ""
    phases = ", ".join(f"{name} {format_time(time)}" for name, time in plan.phases_s)
    return f"{plan.status}{words} in {format_time(plan.planning_time_s)}" + (f": {phases}" if phases else "")


# Why this and not another.


def why(plan: "Plan") -> str:
    """The plan against the best classic layout; if a classic one was asked for, against the best of all."""
    others = [c for c in plan.candidates if c is not chosen(plan)]
    if not others:
        return "nothing else was considered" if plan.layout == "auto" else f"{plan.layout} was asked for"
    if plan.layout != "auto":
        best = min(others, key=rank)
        faster = best.fits and best.step_time_s < plan.step_time_s * (1 - SAME)
        return f"{plan.layout} was asked for; " + (
            _compared(plan, best) if faster else "nothing faster was seen"
        )
    classics = [c for c in others if c.name != "auto"]
    if not classics:
        return f"the best of {len(plan.candidates)} candidates"
    best = min(classics, key=rank)
    if best.fits:
        return f"the best classic layout, {_compared(plan, best)}"
    return f"no classic layout fits; the nearest, {_compared(plan, best)}"


def verdict(plan: "Plan", other: "Candidate") -> str:
    """Why a candidate lost, such as "1.80x slower: +4.1 ms communication" or "needs 21 GiB of 16 GiB"."""
    if not other.fits:
        if plan.memory_limit_bytes < other.peak_memory_bytes < math.inf:
            words = f"needs {size_of_limit(other.peak_memory_bytes, plan.memory_limit_bytes)}"
        else:
            words = "" if other.note else "does not fit"
    elif other.status.upper() == "CUTOFF":
        words = "cannot win, search cut short"
    elif not math.isfinite(other.step_time_s) or not plan.step_time_s:
        words = "" if other.note else "not searched"
    else:
        words = _speed_in_words(plan, other)
    return "; ".join(filter(None, (words, other.note)))


def chosen(plan: "Plan") -> "Candidate | None":
    """The candidate that became the plan."""
    matches = [c for c in plan.candidates if c.name == plan.layout and c.mesh == plan.mesh]
    return min(matches, key=lambda c: abs(c.step_time_s - plan.step_time_s), default=None)


def rank(candidate: "Candidate") -> tuple:
    """A key to sort candidates by: those that fit by their time, then the others by what they need."""
    fits = candidate.fits
    return (not fits, candidate.step_time_s if fits else 0.0, candidate.peak_memory_bytes, candidate.name)


def _compared(plan: "Plan", other: "Candidate") -> str:
    words = verdict(plan, other)
    verb = "" if words.startswith("needs") else "is "
    return f"{other.name} on {other.mesh}, {verb}{words}"


def _speed_in_words(plan: "Plan", other: "Candidate") -> str:
    ratio = other.step_time_s / plan.step_time_s
    if abs(ratio - 1) < SAME:
        more = other.peak_memory_bytes - plan.peak_memory_bytes
        if not math.isfinite(more) or abs(more) < SAME * plan.peak_memory_bytes:
            return "as fast"
        return f"as fast, {'+' if more > 0 else '-'}{format_bytes(abs(more))} memory"
    words = f"{_ratio(ratio)} slower" if ratio > 1 else f"{_ratio(1 / ratio)} faster"
    differences = [
        (other.communication_time_s - plan.communication_time_s, "communication"),
        (other.compute_time_s - plan.compute_time_s, "compute"),
    ]
    least = 0.1 * abs(other.step_time_s - plan.step_time_s)
    told = sorted((d for d in differences if least <= abs(d[0]) < math.inf), reverse=ratio > 1)
    reasons = [f"{'+' if time > 0 else '-'}{format_time(abs(time))} {what}" for time, what in told]
    return f"{words}: {', '.join(reasons)}" if reasons else words


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 9.995 else f"{ratio:,.0f}x"


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + list(names[-1:]))
