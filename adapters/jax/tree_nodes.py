"""Finds, replaces and reads the nodes of a tree by their kind or path.

A user's state nests optimizer states in any way: chains, masks, partitions, dataclasses. healcore
finds its own states in it by their class, and reaches them again by their path.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import jax
from jax.tree_util import FlattenedIndexKey, default_registry

from healcore.jax.array_leaves import PyTree

Tree = TypeVar("Tree")
Path = tuple[Any, ...]
"""Keys of `jax.tree_util` that lead from the root of a tree to a node."""
Kind = type | tuple[type, ...] | Callable[[Any], bool]
"""A class, a tuple of classes, or a predicate of nodes."""


def nodes(kind: Kind, tree: PyTree) -> list[tuple[Path, PyTree]]:
    """Finds every node of a kind in a tree, such as every HealState.

    The search does not enter a node that it has found.

    Args:
        kind: the nodes to find.
        tree: any pytree, such as a TrainState.

    Returns:
        Path and node of each, in the order of the tree.
    """
    matches = _matching(kind)
    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=matches):
        if matches(node):
            found.append((path, node))
    return found


def map_nodes(kind: Kind, change: Callable[[PyTree], PyTree], tree: Tree) -> Tree:
    """Replaces every node of a kind, such as every HealState.

    Args:
        kind: the nodes to replace.
        change: makes the new node of an old one.
        tree: any pytree, which is not changed.

    Returns:
        The tree with the new nodes; all other leaves are the same objects.
    """
    matches = _matching(kind)

    def changed(node: PyTree) -> PyTree:
        if matches(node):
            return change(node)
        return node

    return jax.tree.map(changed, tree, is_leaf=matches)


def _matching(kind: Kind) -> Callable[[PyTree], bool]:
    """The predicate of a kind of nodes."""
    if isinstance(kind, type | tuple):
        return lambda node: isinstance(node, kind)
    return kind


def node_at(root: PyTree, path: Path) -> PyTree:
    """The node at a path.

    Args:
        root: the tree.
        path: keys of `jax.tree_util`, as `nodes` returns them.

    Raises:
        AttributeError, LookupError, TypeError: the tree has no node at this path.
    """
    return node_getter(path)(root)


def node_getter(path: Path) -> Callable[[PyTree], PyTree]:
    """Makes a function that returns the node at a path, for a node that every step reads.

    `node_at` finds out the kind of each key at each call. This function does it only once.

    Args:
        path: keys of `jax.tree_util`, as `nodes` returns them.

    Returns:
        A function of a tree, which raises the errors of `node_at`.
    """
    getters = [_getter_of(key) for key in path]

    def get(root: PyTree) -> PyTree:
        for getter in getters:
            root = getter(root)
        return root

    return get


def _getter_of(key: Any) -> Callable[[Any], Any]:
    """A function that takes one key of a path from a node."""
    if isinstance(key, FlattenedIndexKey):  # a class registered without keys
        return lambda node: default_registry.flatten_one_level(node)[0][key.key]
    if hasattr(key, "name"):
        return attrgetter(key.name)
    if hasattr(key, "key"):
        return itemgetter(key.key)
    return itemgetter(key.idx)
