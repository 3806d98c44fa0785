"""Flax NNX objects as pytrees of arrays, and back.

A step may take and change NNX modules, optimizers, Rngs and Variables. As in `flax.nnx.jit`, objects are
split into a static graph and arrays outside the traced function, merged inside it, split again after the
user's code has changed them, and merged outside into the very objects that the caller holds. One
`flax.nnx.update_context` spans all four, so aliases survive: an optimizer that refers to its model, a
Variable that two layers share, an object that is returned.

Flax is optional: it is used if the user has imported it, and never imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import sys
from types import ModuleType
from typing import Any

import jax
from jax import tree_util

Keys = tuple[str, ...]
"""A leaf's path: parts such as ".params", "['w']" and "[0]"."""

_TAG = "autoplan"


def _flax() -> ModuleType | None:
    return sys.modules.get("flax.nnx")


@tree_util.register_pytree_node_class
class Node:
    """One NNX object as a pytree: its arrays, with its graph as static data."""

    __slots__ = ("graph", "values")

    def __init__(self, graph: Any, values: Sequence[Any]) -> None:
        self.graph, self.values = graph, values

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.values, self.graph

    @classmethod
    def tree_unflatten(cls, graph: Any, values: Sequence[Any]) -> Node:
        return cls(graph, list(values))


def is_object(x: Any) -> bool:
    """Whether `x` is an NNX object: a module, an optimizer, Rngs or a Variable."""
    flax = _flax()
    return flax is not None and (isinstance(x, flax.Variable) or flax.graphlib.is_graph_node(x))


def any_object(args: Sequence[Any]) -> bool:
    """Whether one of the arguments is itself an NNX object; cheap enough for every call."""
    flax = _flax()
    if flax is None:
        return False
    kinds = (flax.Pytree, flax.Variable)
    return any(isinstance(arg, kinds) for arg in args)


def has_nodes(tree: Any) -> bool:
    """Whether a pytree holds NNX objects that were split."""
    return any(
        isinstance(leaf, Node) for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Node))
    )


def has_objects(tree: Any) -> bool:
    """Whether an NNX object is anywhere in a pytree."""
    if _flax() is None:
        return False
    return any(is_object(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_object))


def only_objects(tree: Any) -> Any:
    """The pytree with None for all that is no NNX object."""
    return jax.tree.map(lambda x: x if is_object(x) else None, tree, is_leaf=is_object)


@contextlib.contextmanager
def context(active: bool = True) -> Iterator[None]:
    """Spans outer `split`, inner `merge`, inner `split` and outer `merge`; nothing if not `active`."""
    if not active:
        yield
        return
    with _flax().update_context(_TAG):
        yield


def split(tree: Any, *, tagged: bool = True) -> Any:
    """The pytree with a `Node` for each NNX object. `tagged` objects belong to the surrounding `context`."""
    with _flax().split_context(_TAG if tagged else None) as ctx:

        def convert(x: Any) -> Any:
            return Node(*ctx.flatten(x, with_paths=False)) if is_object(x) else x

        return jax.tree.map(convert, tree, is_leaf=is_object)


def merge(tree: Any, *, inner: bool | None = None, tagged: bool = True) -> Any:
    """The reverse of `split`: an NNX object for each `Node`; `inner` is whether this is inside the trace."""
    with _flax().merge_context(_TAG if tagged else None, inner if tagged else None) as ctx:

        def convert(x: Any) -> Any:
            return ctx.unflatten(x.graph, list(x.values)) if isinstance(x, Node) else x

        return jax.tree.map(convert, tree, is_leaf=lambda x: isinstance(x, Node))


def split_with_keys(tree: Any, *, tagged: bool = True) -> tuple[Any, list[Keys]]:
    """`split`, and the path of every leaf of its result. Works without flax too, on plain pytrees."""
    if not has_objects(tree):
        paths = tree_util.tree_flatten_with_path(tree)[0]
        return tree, [_plain_keys(path) for path, _ in paths]
    found, treedef = tree_util.tree_flatten_with_path(tree, is_leaf=is_object)
    pure, keys = [], []
    with _flax().split_context(_TAG if tagged else None) as ctx:
        for path, x in found:
            root = _plain_keys(path)
            if not is_object(x):
                pure.append(x)
                keys.append(root)
                continue
            graph, state = ctx.flatten(x)
            values = [_raw(leaf) for leaf in state.leaves]
            pure.append(Node(graph, values))
            for parts, value in zip(state.paths, values, strict=True):
                inside = tree_util.tree_flatten_with_path(value)[0]
                keys += [root + tuple(map(_part, parts)) + _plain_keys(sub) for sub, _ in inside]
    return jax.tree.unflatten(treedef, pure), keys


def _raw(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, _flax().Variable) else leaf


def _plain_keys(path: Sequence[Any]) -> Keys:
    return tuple(tree_util.keystr((key,)) for key in path)


def _part(part: Any) -> str:
    return f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]"
