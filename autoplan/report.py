"""The report of a plan, for people: what was chosen, how fast, does it fit, and why not something else.

Everything here is computed from the `Plan` alone, so a loaded plan prints like a fresh one. What repeats is
folded: collectives and tensors that differ only in numbers (the layers of a model) share a row with their
count, and their names have `*` where they differ; moments that lie alike share a row. What
is left out is summed up in a last row. The text is plain ASCII but for the user's own names, and the same
wherever it is printed.
"""

from collections.abc import Callable, Hashable, Iterable
import io
import math
from pathlib import PurePath
import re
from typing import TYPE_CHECKING, TypeVar

from rich.box import Box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from . import explain
from .units import format_bytes, format_time

if TYPE_CHECKING:
    from .plan import Candidate, Collective, LeafLayout, Plan

MAX_COLLECTIVES = 12
MAX_TENSORS = 10
MAX_OTHER_MESHES = 3

WORTH_A_ROW = 1e-3
"""The least share of the whole that is not left to the last row."""

_BOX = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
_NUMBER = re.compile(r"(\d+)")
_BREAK = re.compile(r"(?<=\s)|(?=\[)|(?=\.[\w<])")
_SHORT_DTYPES = [("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")]

T = TypeVar("T")


def text(plan: "Plan", width: int = 100) -> str:
    """The report as plain text, at most `width` columns wide where names allow."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, height=100, color_system=None, force_terminal=False, force_jupyter=False,
        force_interactive=False, legacy_windows=False, markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    console.print(renderable(plan))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def renderable(plan: "Plan") -> RenderableType:
    """The report as a rich renderable."""
    sections = [_summary(plan), _candidates(plan), _communication(plan), _tensors(plan), _notes(plan)]
    title = Text(
        f"{plan.program} on {plan.cluster}: {format_time(plan.step_time_s)} per step predicted, "
        f"{explain.size_of_limit(plan.peak_memory_bytes, plan.memory_limit_bytes)} per device"
    )
    return Group(title, *(Group(Text(""), section) for section in sections if section is not None))


def _summary(plan: "Plan") -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row("Layout", explain.layout_in_words(plan))
    devices = plan.mesh.num_devices
    grid.add_row("Mesh", str(plan.mesh) + (f" ({devices} devices)" if devices > 1 else ""))
    grid.add_row("Step", explain.step_in_words(plan))
    if plan.cost_sources:
        grid.add_row("Costs", explain.sources_in_words(plan))
    grid.add_row("Memory", explain.memory_in_words(plan))
    grid.add_row("Why", explain.why(plan))
    grid.add_row("Search", explain.search_in_words(plan))
    return Padding(grid, (0, 0, 0, 2), expand=False)


# What else was considered.


def _candidates(plan: "Plan") -> RenderableType | None:
    if not plan.candidates:
        return None
    chosen, shown = explain.chosen(plan), _shown_candidates(plan)
    table = table_of("", "layout", "mesh", ">step", ">memory", "fits", "verdict")
    for candidate in shown:
        table.add_row(*_candidate_row(plan, candidate, candidate is chosen))
    left = len(plan.candidates) - len(shown)
    more = f"and {left} more that rank lower, in plan.candidates" if left else ""
    return _section("Candidates", table, more)


def _candidate_row(plan: "Plan", candidate: "Candidate", is_chosen: bool) -> list[str]:
    words = explain.verdict(plan, candidate)
    bound = ""
    if is_chosen:
        words = "; ".join(filter(None, ("this plan", candidate.note)))
    elif candidate.status.upper() == "CUTOFF" and math.isfinite(candidate.step_time_s):
        bound = ">= "
    return [
        "*" if is_chosen else "",
        candidate.name,
        str(candidate.mesh).replace(",", ""),
        bound + _known(candidate.step_time_s, format_time),
        _known(candidate.peak_memory_bytes, format_bytes),
        "no" if not candidate.fits else "yes" if math.isfinite(candidate.peak_memory_bytes) else "-",
        words,
    ]


def _shown_candidates(plan: "Plan") -> list["Candidate"]:
    """The chosen one, the best mesh of every other layout, a few more of the search; best first."""
    chosen = explain.chosen(plan)
    shown, room = [], {"auto": MAX_OTHER_MESHES}
    for candidate in sorted(plan.candidates, key=lambda c: (c is not chosen, *explain.rank(c))):
        left = room.get(candidate.name, 1)
        if candidate is chosen or left > 0:
            shown.append(candidate)
        if candidate is not chosen:
            room[candidate.name] = left - 1
    return shown


def _known(value: float, show: Callable[[float], str]) -> str:
    return show(value) if math.isfinite(value) else "-"


# What it communicates.


def _communication(plan: "Plan") -> RenderableType:
    if not plan.collectives:
        return Text("Communication: none")
    groups = _grouped(plan.collectives, lambda c: (c.kind, c.axes, c.source, _NUMBER.sub("*", c.op)))
    groups.sort(key=lambda group: (-_time_s(group), -_wire_bytes(group)))
    shown, left = _largest(groups, MAX_COLLECTIVES, _time_s)
    table = table_of("kind", "axis", ">count", ">sent", ">time", "for", "source")
    for group in shown:
        first = group[0]
        table.add_row(
            first.kind, " ".join(first.axes), _count(group), format_bytes(_wire_bytes(group)),
            format_time(_time_s(group)), _Name(_folded(c.op for c in group)),
            _Name(_short_source(first.source)),
        )  # fmt: skip
    more = (
        f"and {_count(left)} more: {format_bytes(_wire_bytes(left))}, {format_time(_time_s(left))}"
        if left
        else ""
    )
    by_axes = sorted(_grouped(plan.collectives, lambda c: c.axes), key=_wire_bytes, reverse=True)
    axes = ", ".join(
        f"{format_bytes(_wire_bytes(group))} over {' and '.join(group[0].axes)}" for group in by_axes
    )
    hidden_s = math.fsum(c.hidden_s * c.count for c in plan.collectives)
    hidden = f" ({format_time(hidden_s)} beside computing)" if hidden_s else ""
    heading = f"Communication per step: {format_time(_time_s(plan.collectives))}{hidden}; each device sends {axes}"
    return _section(heading, table, more)


def _count(collectives: Iterable["Collective"]) -> str:
    count = math.fsum(c.count for c in collectives)
    return f"{count:,.0f}" if count == round(count) else f"{count:,.1f}"


def _wire_bytes(collectives: Iterable["Collective"]) -> float:
    return math.fsum(c.wire_bytes * c.count for c in collectives)


def _time_s(collectives: Iterable["Collective"]) -> float:
    return math.fsum(c.time_s * c.count for c in collectives)


def _short_source(source: str) -> str:
    """Without the folder: "gpt.py:12 (attend)"."""
    file, colon, rest = source.rpartition(":")
    return PurePath(file).name + colon + rest


# What is big, and what is replicated.


def _tensors(plan: "Plan") -> RenderableType | None:
    paired = {index for _, index in plan.state_pairs}
    leaves = [*plan.inputs, *(leaf for index, leaf in enumerate(plan.outputs) if index not in paired)]
    if not leaves:
        return None
    moments = _moments(plan)
    groups = _grouped(leaves, lambda leaf: _tensor_key(leaf, moments))
    groups.sort(key=lambda group: -_held_bytes(group))
    shown, left = _largest(groups, MAX_TENSORS, _held_bytes)
    table = table_of(">on a device", ">ways", ">count", "layout", "type", "tensor")
    for group in shown:
        first = group[0]
        parts = _grouped(group, lambda leaf: moments.get(leaf.path, ("", ""))[1])
        parts.sort(key=lambda part: part[0].path in moments)  # the parameter first, wherever the state has it
        others = [moments[part[0].path][1] for part in parts[1:]]
        table.add_row(
            format_bytes(_held_bytes(group)), str(first.shards(plan.mesh)), str(len(group)),
            explain.spec_text(first.spec), _short_type(first),
            _Name(_folded(leaf.path for leaf in parts[0]) + "".join(f" +{other}" for other in others)),
        )  # fmt: skip
    more = [f"and {len(left)} more: {format_bytes(_held_bytes(left))}"] if left else []
    whole = [leaf for leaf in leaves if leaf.shards(plan.mesh) == 1]
    if whole and plan.mesh.num_devices > 1:
        largest = max(whole, key=lambda leaf: leaf.bytes_per_device)
        more.append(
            f"replicated: {len(whole)} of {len(leaves)} tensors, {format_bytes(_held_bytes(whole))} on every "
            f"device; the largest is {largest.path}, {format_bytes(largest.bytes_per_device)}"
        )
    return _section("Largest tensors", table, "\n".join(more))


def _tensor_key(leaf: "LeafLayout", moments: dict[str, tuple[str, str]]) -> Hashable:
    parameter, _ = moments.get(leaf.path, (leaf.path, ""))
    return _NUMBER.sub("*", parameter), leaf.shape, leaf.dtype, leaf.spec


def _moments(plan: "Plan") -> dict[str, tuple[str, str]]:
    """For each leaf of the state that belongs to a parameter: the parameter's path, and what it is of it.

    `state.opt_state[0].mu['w']` is the "mu" of `state.params['w']`: a parameter's path, less the name of its
    part of the state, is the end of the moment's path, and their shapes are the same.
    """
    parts = sorted(explain.state_parts(plan).items(), key=lambda part: len(part[1]))
    ends: dict[Hashable, tuple[str, str]] = {}
    moments = {}
    for part, leaves in parts:
        root = len(explain.path_steps(part))
        for leaf in leaves:
            steps = explain.path_steps(leaf.path)
            for start in range(1, len(steps)):
                other, parameter = ends.get((*steps[start:], leaf.shape), (part, ""))
                if other != part:
                    moments[leaf.path] = (parameter, steps[start - 1].strip(".[]'"))
                    break
            else:
                ends.setdefault((*steps[root:], leaf.shape), (part, leaf.path))
    return moments


def _short_type(leaf: "LeafLayout") -> str:
    """As XLA writes it: "bf16[8192,1024]"."""
    name = leaf.dtype
    for long, short in _SHORT_DTYPES:
        if re.fullmatch(long + r"\d+", name):
            name = short + name.removeprefix(long)
            break
    return f"{name}[{','.join(map(str, leaf.shape))}]"


def _held_bytes(leaves: Iterable["LeafLayout"]) -> float:
    return math.fsum(leaf.bytes_per_device for leaf in leaves)


def _notes(plan: "Plan") -> RenderableType | None:
    if not plan.notes:
        return None
    grid = Table.grid(padding=(0, 1))
    for group in _grouped(plan.notes, lambda note: _NUMBER.sub("*", note)):
        times = f" ({len(group)} times)" if len(group) > 1 else ""
        grid.add_row(" -", _folded(group) + times)
    return Group(Text("Notes"), grid)


# Folding and layout.


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Items with equal keys, in the order of their first ones."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _largest(
    groups: list[list[T]], most: int, size: Callable[[list[T]], float]
) -> tuple[list[list[T]], list[T]]:
    """The first groups that are worth a row, and the items of the others; `groups` fall in size."""
    total = math.fsum(map(size, groups))
    rows = max(1, sum(size(group) >= WORTH_A_ROW * total for group in groups[:most]))
    return groups[:rows], [item for group in groups[rows:] for item in group]


def _folded(names: Iterable[str]) -> str:
    """Names that differ in numbers only, as one with `*` where they differ."""
    pieces = zip(*(_NUMBER.split(name) for name in names), strict=True)
    return "".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces)


class _Name:
    """A cell that wraps where a path has its steps: before "[" and ".", and after spaces."""

    def __init__(self, name: str) -> None:
        self.pieces = [piece for piece in _BREAK.split(name) if piece]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for piece in self.pieces:
            if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > options.max_width:
                lines.append("  ")
            lines[-1] += piece
        for line in lines:
            yield Text(line.rstrip(), overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        whole, widest = sum(map(len, self.pieces)), max(map(len, self.pieces), default=0)
        return Measurement(min(widest + 2, options.max_width), min(whole, options.max_width))


def table_of(*columns: str) -> Table:
    """A table with a ruled header; a column whose name starts with ">" is aligned right, never wraps."""
    table = Table(box=_BOX, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            name.removeprefix(">"), justify="right" if right else "left", overflow="fold", no_wrap=right
        )
    return table


def _section(heading: str, table: Table, more: str) -> RenderableType:
    parts: list[RenderableType] = [Text(heading), Padding(table, (0, 0, 0, 2), expand=False)]
    if more:
        parts.append(Padding(Text(more), (0, 0, 0, 2)))
    return Group(*parts)
