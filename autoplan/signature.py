"""How a step is called: the names of its parameters, and which of them are static or donated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
import inspect
from typing import Any

from .errors import PlanError

Names = str | Iterable[str] | None
Numbers = int | Iterable[int] | None


@dataclass(frozen=True)
class Signature:
    """How a function's arguments are named, and which are static or donated; built by `signature_of`."""

    fun: Callable[..., Any]
    name: str
    positional: tuple[str, ...]
    variadic: str | None
    static_argnums: frozenset[int]
    static_argnames: frozenset[str]
    donate_argnums: frozenset[int]
    donate_argnames: frozenset[str]

    @property
    def has_static(self) -> bool:
        return bool(self.static_argnums or self.static_argnames)

    def dynamic(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are not static."""
        return (
            tuple(arg for i, arg in enumerate(args) if i not in self.static_argnums),
            {key: value for key, value in kwargs.items() if key not in self.static_argnames},
        )

    def static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The static arguments, with their places and types (1, 1.0 and True are equal, but not the same).

        Raises:
          ValueError: one of them is not hashable.
        """
        named = sorted(key for key in kwargs if key in self.static_argnames)
        static = (
            tuple((i, type(arg), arg) for i, arg in enumerate(args) if i in self.static_argnums),
            tuple((key, type(kwargs[key]), kwargs[key]) for key in named),
        )
        try:
            hash(static)
        except TypeError as error:
            values = [*((self.argument_name(i), arg) for i, _, arg in static[0]), *((k, v) for k, _, v in static[1])]
            name, value = next((name, value) for name, value in values if not _is_hashable(value))
            raise ValueError(
                f"{name}: static arguments must be hashable; got {value!r} of type {type(value).__name__}. Pass a "
                "tuple for a list, or make the argument an array"
            ) from error
        return static

    def donated(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[bool, ...], dict[str, bool]]:
        """Which of the arguments that are not static are donated."""
        return (
            tuple(i in self.donate_argnums for i in range(len(args)) if i not in self.static_argnums),
            {key: key in self.donate_argnames for key in kwargs if key not in self.static_argnames},
        )

    def argument_name(self, position: int) -> str:
        """The name of positional argument `position`."""
        if position < len(self.positional):
            return self.positional[position]
        return f"{self.variadic or 'args'}[{position - len(self.positional)}]"

    def dynamic_names(self, num_args: int) -> list[str]:
        """The names of the positional arguments that are not static."""
        return [self.argument_name(i) for i in range(num_args) if i not in self.static_argnums]


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def signature_of(
    fun: Callable[..., Any],
    static_argnums: Numbers = None,
    static_argnames: Names = None,
    donate_argnums: Numbers = None,
    donate_argnames: Names = None,
) -> Signature:
    """The signature of `fun`; numbers and names are completed from each other, as `jax.jit` does.

    Raises:
      PlanError: a number or name is of no parameter.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (ValueError, TypeError):  # some builtins have none
        parameters = None
    for option, numbers, names in (
        ("static", static_argnums, static_argnames),
        ("donate", donate_argnums, donate_argnames),
    ):
        if parameters is not None:
            _check_numbers(f"{option}_argnums", _tuple(numbers), parameters)
            _check_names(f"{option}_argnames", _tuple(names), parameters)
    parameters = parameters or []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None)

    def resolve(numbers: Numbers, names: Names) -> tuple[frozenset[int], frozenset[str]]:
        found = {n + len(positional) if n < 0 else n for n in _tuple(numbers)}
        if numbers is None:
            found |= {positional.index(name) for name in _tuple(names) if name in positional}
        inferred = {positional[n] for n in found if n < len(positional)} if names is None else set()
        return frozenset(found), frozenset(_tuple(names)) | inferred

    static, donated = resolve(static_argnums, static_argnames), resolve(donate_argnums, donate_argnames)
    name = getattr(fun, "__name__", None) or type(fun).__name__
    return Signature(fun, name, tuple(positional), variadic, *static, *donated)


def _tuple(given: Names | Numbers) -> tuple[Any, ...]:
    return () if given is None else (given,) if isinstance(given, int | str) else tuple(given)


def _check_numbers(option: str, numbers: tuple[int, ...], parameters: list[inspect.Parameter]) -> None:
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return
    for number in numbers:
        if not -count <= number < count:
            raise PlanError(
                f"`{option}` are positions of the step's parameters",
                got=f"{number}, and there are {count} positional parameters",
                action=f"Give positions from 0 to {count - 1}",
            )


def _check_names(option: str, names: tuple[str, ...], parameters: list[inspect.Parameter]) -> None:
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return
    for name in names:
        if name not in known:
            raise PlanError(
                f"`{option}` are names of the step's parameters",
                got=repr(name),
                action=f"Give some of {', '.join(known)}",
            )
