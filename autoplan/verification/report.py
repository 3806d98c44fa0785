"""The report of a verification, for people: does it fit, does it communicate as planned, and what does not."""

from __future__ import annotations

import io
import math
from pathlib import PurePath
import re
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..report import table_of
from ..units import format_bytes, format_time

if TYPE_CHECKING:
    from .result import Unplanned, Verification

MAX_UNPLANNED_ROWS = 12

_NUMBER = re.compile(r"\d+")


def text(verification: Verification, width: int = 100) -> str:
    """The report as plain text, at most `width` columns wide."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, height=100, color_system=None, force_terminal=False, force_jupyter=False,
        force_interactive=False, legacy_windows=False, markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    console.print(renderable(verification))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def renderable(verification: Verification) -> RenderableType:
    """The report as a rich renderable."""
    v = verification
    title = f"{v.program} on {v.cluster}, compiled in {format_time(v.compile_time_s)}: {_verdict(v)}"
    parts: list[RenderableType] = [Text(title), Text(""), _figures(v), Text(""), _unplanned(v)]
    if v.rematerialised:
        parts.append(Text(f"{v.rematerialised} arrays were gathered whole to be laid out anew"))
    if v.unknown_loops:
        parts.append(Text(f"{v.unknown_loops} loops of an unknown number of rounds are counted once"))
    return Group(*parts)


def _verdict(v: Verification) -> str:
    if not v.fits:
        return f"does not fit: {format_bytes(v.peak_memory_bytes)} of {format_bytes(v.memory_limit_bytes)} per device"
    if v.ok:
        return "fits, and communicates as planned"
    return f"fits, but {v.unplanned_share:.1%} of what it sends was not planned"


def _figures(v: Verification) -> RenderableType:
    table = table_of("per device", ">planned", ">compiled", ">error")
    rows = [("memory", format_bytes, v.predicted_memory_bytes, v.peak_memory_bytes, v.memory_error)]
    if v.step_time_s is not None:
        rows.append(("step time", format_time, v.predicted_step_time_s, v.step_time_s, v.step_time_error))
    for kind, (planned, compiled) in sorted(v.wire_bytes_by_kind.items(), key=lambda row: -max(row[1])):
        rows.append((f"{kind} sent", format_bytes, planned, compiled, v.collectives_error[kind]))
    for name, shown, planned, compiled, error in rows:
        table.add_row(name, shown(planned), shown(compiled), "-" if math.isinf(error) else f"{error:+.1%}")
    return Padding(table, (0, 0, 0, 2), expand=False)


def _unplanned(v: Verification) -> RenderableType:
    if not v.unplanned:
        return Text("Unplanned: nothing")
    groups: dict[tuple, list[Unplanned]] = {}
    for u in v.unplanned:
        groups.setdefault((u.kind, u.axes, u.source, _NUMBER.sub("*", _short_op(u.op))), []).append(u)
    ordered = sorted(groups.items(), key=lambda item: -sum(u.excess_bytes for u in item[1]))
    shown = ordered[:MAX_UNPLANNED_ROWS]
    table = table_of("kind", "axis", ">count", ">excess", ">share", "for", "source")
    for (kind, axes, source, op), items in shown:
        table.add_row(
            kind, " ".join(axes), f"{sum(u.count for u in items):,.0f}",
            format_bytes(sum(u.excess_bytes for u in items)), f"{sum(u.share for u in items):.2%}",
            op, _short_source(source),
        )  # fmt: skip
    parts: list[RenderableType] = [
        Text(f"Unplanned: {v.unplanned_share:.2%} of {format_bytes(v.wire_bytes)} that each device sends"),
        Padding(table, (0, 0, 0, 2), expand=False),
    ]
    if left := len(ordered) - len(shown):
        parts.append(Text(f"  and {left} more, in verification.unplanned"))
    return Group(*parts)


def _short_op(op: str) -> str:
    """JAX's name without the calls around the operation."""
    return op.rpartition("/")[2]


def _short_source(source: str) -> str:
    file, colon, rest = source.rpartition(":")
    return PurePath(file).name + colon + rest
