"""Which results of a step are the new values of which arguments.

The state of a training step goes in and comes out: `state` and `new_state`, or `params, opt_state` and their
new values. Leaves are paired so that planning gives both ends the same layout.

Arguments and results are taken as trees of paths. A subtree of the arguments is paired with one of the
results that has the same paths below it with the same shapes and dtypes, the largest first. Among equals,
names decide, then positions. A single array needs more evidence than its shape: to be donated; or to have the
argument's name, or its position (all arguments before it are paired too), and be a key, or computed from the
argument element by element, or be the first where no argument is a container. Weak types do not count.

What comes back in another form is no state. Of a donated argument that is refused: its memory would be given away for
nothing, and a second call would take other types. Of others it is noted, where it looks like an oversight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
import heapq
from typing import Any

from .errors import StateError, describe_array

Keys = tuple[str, ...]
_SHOWN = 5


@dataclass(frozen=True)
class Entry:
    """A leaf: its path as parts (the argument's name first; "result" for a result), and its type."""

    keys: Keys
    shape: tuple[int, ...]
    dtype: Any
    donated: bool = False

    @property
    def path(self) -> str:
        return "".join(self.keys)

    def __str__(self) -> str:
        return describe_array(self.dtype, self.shape)


@dataclass(eq=False)
class _Node:
    """A subtree: leaves `start` to `stop`, and a number that is equal for subtrees of the same form."""

    keys: Keys
    start: int
    stop: int = 0
    children: list[_Node] = field(default_factory=list)
    form: int = -1

    @property
    def size(self) -> int:
        return self.stop - self.start

    def walk(self) -> Iterator[_Node]:
        yield self
        for child in self.children:
            yield from child.walk()


def find_pairs(
    inputs: Sequence[Entry], outputs: Sequence[Entry], is_update: Callable[[int, int], bool]
) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """Pairs (index of an input, index of an output) of state leaves, in the order of the inputs, each used once; and
    notes on arguments that look like state and come back in another form.

    Args:
      is_update: whether an output is computed from an input element by element.

    Raises:
      StateError: an argument that is donated comes back with other paths, shapes or dtypes.
    """
    forms: dict[Any, int] = {}
    arguments = _tree((), inputs, forms).children
    result = _tree((), outputs, forms)
    result = result.children[0] if len(result.children) == 1 else result
    partner, in_parts = _match(arguments, result, inputs, is_update)
    notes = [
        note
        for position, argument in enumerate(arguments)
        if argument.start in in_parts
        for note in _check_returned(position, argument, result, inputs, outputs, partner)
    ]
    return tuple(sorted(partner.items())), tuple(notes)


def check_kept(before: Sequence[Entry], after: Sequence[Entry]) -> None:
    """Refuses leaves of `after` that have another shape or dtype than those at the same place in `before`.

    Raises:
      StateError: names them.
    """
    changed = [(a, b) for a, b in zip(before, after, strict=True) if (a.shape, a.dtype) != (b.shape, b.dtype)]
    if changed:
        _refuse([f"{a.path} went in as {a} and came out as {b}" for a, b in changed], changed[0][0])


def _tree(keys: Keys, entries: Sequence[Entry], forms: dict[Any, int], start: int = 0) -> _Node:
    """The tree of `entries`, which are those from leaf `start` on, and all have the path prefix `keys`."""
    node = _Node(keys, start, start + len(entries))
    depth = len(keys)
    if len(entries) == 1 and len(entries[0].keys) == depth:
        node.form = forms.setdefault((entries[0].shape, entries[0].dtype), len(forms))
        return node
    first = 0
    while first < len(entries):
        key = entries[first].keys[depth]
        last = first
        while last < len(entries) and entries[last].keys[depth] == key:
            last += 1
        node.children.append(_tree((*keys, key), entries[first:last], forms, start + first))
        first = last
    form = tuple((child.keys[-1], child.form) for child in node.children)
    node.form = forms.setdefault(form, len(forms))
    return node


def _match(
    arguments: Sequence[_Node], result: _Node, inputs: Sequence[Entry], is_update: Callable[[int, int], bool]
) -> tuple[dict[int, int], set[int]]:
    """The pairs found, and the first leaves of those arguments that have no partner as a whole."""
    by_form: dict[int, list[_Node]] = {}
    for node in result.walk():
        by_form.setdefault(node.form, []).append(node)
    positions = {id(argument): position for position, argument in enumerate(arguments)}
    partner: dict[int, int] = {}
    used: set[int] = set()
    in_parts: set[int] = set()
    heap = [(-node.size, node.start, id(node), node) for node in arguments]
    heapq.heapify(heap)
    while heap:
        *_, node = heapq.heappop(heap)
        position = positions.get(id(node))
        free = [other for other in by_form.get(node.form, ()) if other.start not in used]
        if node.size == 1:
            entry = inputs[node.start]
            sure = (
                entry.donated
                or (position == 0 and all(argument.size == 1 for argument in arguments))
                or _is_key(entry)
            )
            free = [
                o
                for o in free
                if entry.donated
                or (
                    (_common_names(node.keys, o.keys) or _same_position(position, o, arguments, partner))
                    and (sure or is_update(node.start, o.start))
                )
            ]
        if free:
            best = max(
                free, key=lambda o: (_common_names(node.keys, o.keys), _index(o.keys) == position, -o.start)
            )
            partner.update(zip(range(node.start, node.stop), range(best.start, best.stop), strict=True))
            used.update(range(best.start, best.stop))
        else:
            if position is not None:
                in_parts.add(node.start)
            for child in node.children:
                heapq.heappush(heap, (-child.size, child.start, id(child), child))
    return partner, in_parts


def _is_key(entry: Entry) -> bool:
    """Whether a leaf is a random key, typed or raw."""
    return str(entry.dtype).startswith("key<") or (str(entry.dtype) == "uint32" and entry.shape == (2,))


def _same_position(
    position: int | None, output: _Node, arguments: Sequence[_Node], partner: dict[int, int]
) -> bool:
    """Whether the output stands where argument `position` does, and the arguments before it are paired."""
    if position is None or _index(output.keys) != position:
        return False
    return all(leaf in partner for a in arguments[:position] for leaf in range(a.start, a.stop))


def _index(keys: Keys) -> int | None:
    """The position of a result in the tuple of results; a single result is the first."""
    if len(keys) == 1:
        return 0
    name = _name(keys[1])
    return int(name) if len(keys) == 2 and name.isdigit() else None


def _name(key: str) -> str:
    return key.strip(".[]'\"")


def _common_names(a: Keys, b: Keys) -> int:
    """How many names two paths have in common at their ends; a position in a sequence alone is no name."""
    count = 0
    for left, right in zip(reversed(a), reversed(b)):
        if _name(left) != _name(right):
            break
        count += 1
    return 0 if count == 1 and _name(a[-1]).isdigit() else count


def _check_returned(
    position: int,
    argument: _Node,
    result: _Node,
    inputs: Sequence[Entry],
    outputs: Sequence[Entry],
    partner: dict[int, int],
) -> Iterator[str]:
    """Notes on an argument that evidently comes back as some result, in another form; a StateError if it is donated."""
    before = {inputs[i].keys[1:]: inputs[i] for i in range(argument.start, argument.stop)}
    taken = set(partner.values()) - {partner.get(i) for i in range(argument.start, argument.stop)}
    for node in [result, *result.children]:
        if node.start in taken or not node.size:
            continue
        depth = len(node.keys)
        after = {outputs[i].keys[depth:]: outputs[i] for i in range(node.start, node.stop)}
        if not _is_evident(position, node, before, after):
            continue
        problems, first = _differences(before, after, "".join(node.keys))
        if problems and any(entry.donated for entry in before.values()):
            _refuse(problems, first)
        if problems:
            name = inputs[argument.start].keys[0]
            yield f"{name} comes back in another form: {_some(problems)}; if it is state, each form is planned anew"


def _is_evident(position: int, node: _Node, before: dict[Keys, Entry], after: dict[Keys, Entry]) -> bool:
    common = before.keys() & after.keys()
    most = max(len(before), len(after))
    if not common or 2 * len(common) < most:
        return False
    in_place = _index(node.keys) == position
    if any(entry.donated for entry in before.values()):
        return in_place or len(common) == most > 1
    if all(
        keys and keys[0].startswith(".") for keys in before
    ):  # fields: a class of its own, such as TrainState
        return True
    if not in_place or after.keys() - before.keys():
        return False
    same = sum((before[k].shape, before[k].dtype) == (after[k].shape, after[k].dtype) for k in common)
    same_shapes = len(common) == most > 1 and all(before[k].shape == after[k].shape for k in common)
    return 2 * same >= most or same_shapes


def _differences(before: dict[Keys, Entry], after: dict[Keys, Entry], root: str) -> tuple[list[str], Entry | None]:
    """What differs, in words, and the first leaf concerned."""
    problems = [f"{before[k].path} is not in {root}" for k in before if k not in after]
    problems += [f"{after[k].path} was not in the argument" for k in after if k not in before]
    problems += [
        f"{before[k].path} went in as {before[k]} and came back as {after[k]} in {after[k].path}"
        for k in before
        if k in after and str(before[k]) != str(after[k])
    ]
    first = next((before[k] for k in before if k not in after or str(before[k]) != str(after[k])), None)
    return problems, first


def _some(problems: Sequence[str]) -> str:
    shown = "; ".join(problems[:_SHOWN])
    return shown if len(problems) <= _SHOWN else f"{shown}; and {len(problems) - _SHOWN} more"


def _refuse(problems: Sequence[str], first: Entry | None) -> None:
    where = {} if first is None else {"path": first.path, "shape": first.shape, "dtype": first.dtype}
    raise StateError(
        "a step must return its state with the structure, shapes and dtypes that it took",
        got=_some(problems),
        action="Return every leaf under its own path, cast back with `.astype` where its dtype changed",
        **where,
    )
