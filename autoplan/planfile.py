"""Plans as files: strict, versioned JSON, with one record per line so that two plans can be compared by
`diff`.

The top level is an object: `"format": "autoplan-plan"`, `"version": 1`, then the fields of `Plan` in their
order. A record is an object with exactly its dataclass's fields; a tuple is an array; an infinite number is
the string "Infinity". Writing a plan that was read gives the same bytes.

Reading trusts nothing: it checks every value against the dataclasses' annotations, and each error says which
file, which value in it, what it found, what it expected and what to do.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
import types
import typing
from typing import TYPE_CHECKING, Any, TypeVar
import uuid

from .errors import PlanFileError, describe_array

if TYPE_CHECKING:
    from .plan import Plan
    from .trace import Leaf

FORMAT = "autoplan-plan"
VERSION = 2
REMEDY = "Make the plan again, with `step.plan(...).save(path)` or `autoplan plan ... --save PATH`"

_JSON_NAMES = {float: "a number", int: "a whole number", str: "a string", bool: "true or false"}

T = TypeVar("T")


def dumps(plan: "Plan") -> str:
    """The text of the plan's file."""
    fields = {"format": FORMAT} | _encode(plan)
    return "{\n" + ",\n".join(f"{_json(name)}: {_block(value)}" for name, value in fields.items()) + "\n}\n"


def loads(text: str, kind: type[T], where: str = "the text") -> T:
    """The plan of a file's text; `kind` is `Plan` and `where` names the text in errors.

    Raises:
      PlanFileError: the text is not that of a plan that this version can read.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        cut = ": the text may be cut off there" if at_end else ""
        problem = f"{error.msg!r} at line {error.lineno}, column {error.colno}{cut}"
        raise PlanFileError(f"{where}: a plan file must be JSON", got=problem, action=REMEDY) from None
    except (ValueError, RecursionError) as error:
        raise PlanFileError(
            f"{where}: a plan file must be strict JSON", got=str(error), action=REMEDY
        ) from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        got = _kind(value.get("format")) if isinstance(value, dict) and "format" in value else _kind(value)
        raise PlanFileError(
            f'{where}: a plan file must be an object with "format": "{FORMAT}"', got=got, action=REMEDY
        )
    if type(value.get("version")) is not int or value["version"] != VERSION:
        got = f"version {_kind(value.get('version'))}"
        raise PlanFileError(
            f"{where}: this autoplan reads plan files of version {VERSION}", got=got, action=REMEDY
        )
    del value["format"]
    try:
        return _decode(value, kind, "")
    except RecursionError:
        raise PlanFileError(f"{where}: arrays are nested too deeply for a plan file", action=REMEDY) from None
    except _Bad as error:
        raise PlanFileError(
            f"{where}: {error.rule}", got=error.got, action=f"Correct the file, or: {REMEDY}"
        ) from None


def write(path: str | os.PathLike, plan: "Plan") -> None:
    """Writes the plan's file, replacing an older one whole: a reader never sees half a plan.

    Raises:
      OSError: the file cannot be written; an older one is left as it was.
    """
    path = Path(os.path.realpath(path))
    data = dumps(plan).encode(errors="surrogatepass")
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with scratch.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def read(path: str | os.PathLike, kind: type[T]) -> T:
    """The plan in a file; `kind` is `Plan`.

    Raises:
      PlanFileError: see `loads`.
      OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_bytes().decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        got = f"another byte at {error.start}"
        raise PlanFileError(f"{os.fspath(path)}: a plan file must be UTF-8", got=got, action=REMEDY) from None
    return loads(text, kind, os.fspath(path))


def check_program(plan: "Plan", fingerprint: str, leaves: Sequence["Leaf"]) -> None:
    """Refuses a plan that was made for another program than the traced one.

    Args:
      fingerprint: of the traced program.
      leaves: its inputs; each has `path`, `shape` and `dtype`.

    Raises:
      PlanFileError: the programs differ; says where first.
    """
    now = [(leaf.path, describe_array(leaf.dtype, leaf.shape)) for leaf in leaves]
    planned = [(leaf.path, describe_array(leaf.dtype, leaf.shape)) for leaf in plan.inputs]
    if plan.fingerprint == fingerprint and planned == now:
        return
    raise PlanFileError(
        f"the plan of {plan.program} is for another program: {_first_difference(planned, now)}",
        action="Plan again for this program, or call the one that was planned, with the same arguments",
    )


def _first_difference(planned: list[tuple[str, str]], now: list[tuple[str, str]]) -> str:
    for (path, array), (new_path, new_array) in zip(planned, now, strict=False):
        if path != new_path:
            return f"where it has the argument {path}, this program has {new_path}"
        if array != new_array:
            return f"{path} is {array} in the plan and {new_array} in this program"
    if len(planned) != len(now):
        longer = max(planned, now, key=len)
        has, lacks = ("the plan", "this program") if longer is planned else ("this program", "the plan")
        path = longer[min(len(planned), len(now))][0]
        return f"{has} has the argument {path}, {lacks} does not ({len(planned)} leaves then, {len(now)} now)"
    return "it takes the same arguments, but its operations differ"


# Encoding: records to objects, tuples to arrays, infinity to a string; all else stands for itself.


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {item.name: _encode(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "Infinity"
    return value


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _block(value: Any) -> str:
    """A list of records, or of lists or texts, with one item per line; anything else on one line."""
    if isinstance(value, list) and value and not isinstance(value[0], int | float):
        return "[\n" + ",\n".join(f" {_json(item)}" for item in value) + "\n]"
    return _json(value)


# Decoding, led by the annotations of the dataclasses.


class _Bad(Exception):
    """A value that is not what it should be: where, the rule, and what is there instead."""

    def __init__(self, where: str, rule: str, got: str | None = None) -> None:
        super().__init__(where, rule, got)
        self.rule, self.got = f"{where or 'top level'}: {rule}", got


def _decode(value: Any, kind: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_record(value, kind, where)
    if typing.get_origin(kind) is types.UnionType:
        inner = [option for option in typing.get_args(kind) if option is not types.NoneType]
        return None if value is None else _decode(value, inner[0], where)
    if typing.get_origin(kind) is tuple:
        return _decode_tuple(value, typing.get_args(kind), where)
    if kind is float and value == "Infinity":
        return math.inf
    if kind is float and type(value) in (int, float):
        return _finite(value, where)
    if type(value) is not kind:
        raise _Bad(where, f"must be {_JSON_NAMES[kind]}", _kind(value))
    return value


def _decode_record(value: Any, kind: type, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(value, dict):
        raise _Bad(where, f"must be an object with the fields of a {kind.__name__}", _kind(value))
    if missing := [name for name in hints if name not in value]:
        raise _Bad(where, f"the field {missing[0]!r} of the {kind.__name__} is missing")
    if unknown := [name for name in value if name not in hints]:
        raise _Bad(where, f"a {kind.__name__} has only the fields {', '.join(hints)}", repr(unknown[0]))
    prefix = f"{where}." if where else ""
    fields = {name: _decode(value[name], hint, prefix + name) for name, hint in hints.items()}
    try:
        return kind(**fields)
    except ValueError as error:
        raise _Bad(where, str(error)) from None


def _decode_tuple(value: Any, items: tuple[Any, ...], where: str) -> tuple:
    if not isinstance(value, list):
        raise _Bad(where, "must be an array", _kind(value))
    if items[-1] is Ellipsis:
        items = items[:1] * len(value)
    if len(value) != len(items):
        raise _Bad(where, f"must be an array of {len(items)}", _kind(value))
    return tuple(
        _decode(item, kind, f"{where}[{i}]") for i, (item, kind) in enumerate(zip(value, items, strict=True))
    )


def _finite(value: int | float, where: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise _Bad(where, 'must be within the range of a double (write infinity as "Infinity")', _kind(value))
    return number


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the field {next(n for n in names if names.count(n) > 1)!r} appears twice in an object"
        )
    return fields


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: Any) -> str:
    """A value as an error shows it."""
    if isinstance(value, dict):
        return f"an object with {len(value)} fields"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = str(value) if isinstance(value, float) else _json(value)
    return text if len(text) <= 60 else text[:57] + "..."
