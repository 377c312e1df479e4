"""Pytrees of a program: nodes found by their kind or path, and arrays without static leaves.

A user's state nests optimizer states in any way: chains, masks, partitions, dataclasses. healcore
finds its own states in it by their class, and reaches them again by their path.

The fields of an Equinox module are leaves, and its activation functions are among them. `jit`
raises an error for such a tree, a checkpoint cannot hold a function, and optax has no moment for
it. So a tree is split: its arrays go through JAX, and everything else stays as the program has
written it.

    arrays = arrays_of(model)  # as equinox.filter(model, equinox.is_inexact_array_like)
    model = with_arrays(model, new_arrays)  # as equinox.combine(new_arrays, model)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import FlattenedIndexKey, default_registry, keystr, tree_leaves_with_path

from healcore.console import first_of

Tree = TypeVar("Tree")
PyTree = Any
"""A pytree of arrays and other leaves, for which JAX has no type."""
Leaf = Any
"""A leaf of a pytree: an array, traced or not, a number or any object."""
Path = tuple[Any, ...]
"""Keys of `jax.tree_util` that lead from the root of a tree to a node."""
Kind = type | tuple[type, ...] | Callable[[Any], bool]
"""A class, a tuple of classes, or a predicate of nodes."""


# -- nodes -----------------------------------------------------------------------------------------


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
    for key in path:
        if isinstance(key, FlattenedIndexKey):  # a class registered without keys
            root = default_registry.flatten_one_level(root)[0][key.key]
        elif hasattr(key, "name"):
            root = getattr(root, key.name)
        else:
            root = root[key.key if hasattr(key, "key") else key.idx]
    return root


# -- leaves ----------------------------------------------------------------------------------------


def is_number(leaf: Leaf) -> bool:
    """Whether a leaf is a Python number or bool.

    A compiled step returns such a leaf as an array, and a checkpoint stores it as one.

    Args:
        leaf: a leaf of any pytree.
    """
    return type(leaf) in (bool, int, float, complex)


def is_array(leaf: Leaf) -> bool:
    """Whether a leaf is an array, a traced array or a number of NumPy.

    A class such as `jnp.float32` has a dtype too, and is not an array.

    Args:
        leaf: a leaf of any pytree.
    """
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and not isinstance(leaf, type)


def is_static(leaf: Leaf) -> bool:
    """Whether a leaf is neither an array nor a number, so that no checkpoint holds it.

    Such leaves are functions, names and objects. They stay as the program has made them.

    Args:
        leaf: a leaf of any pytree.
    """
    return not (is_array(leaf) or is_number(leaf))


def arrays_of(tree: Tree) -> Tree:
    """Replaces each static leaf by None. All other leaves keep their paths.

    Args:
        tree: any pytree.

    Returns:
        The tree that `jit`, a checkpoint and optax accept. The same object if no leaf is static.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not any(map(is_static, leaves)):
        return tree
    return structure.unflatten([None if is_static(leaf) else leaf for leaf in leaves])


def with_arrays(tree: Tree, arrays: PyTree) -> Tree:
    """Combines the static leaves of a tree with other arrays; the inverse of `arrays_of`.

    Args:
        tree: the tree whose static leaves are kept.
        arrays: a tree of the form of `arrays_of(tree)`, such as the result of a compiled step.

    Returns:
        A tree of the form of `tree`. `arrays` itself if no leaf is static.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not any(map(is_static, leaves)):
        return arrays
    new: Iterator[Leaf] = iter(jax.tree.leaves(arrays))
    return structure.unflatten([leaf if is_static(leaf) else next(new) for leaf in leaves])


# -- forms -----------------------------------------------------------------------------------------


def forms(tree: PyTree) -> dict[str, str]:
    """Path -> dtype and shape of the leaf. A number is of one form, of Python or in an array.

    `count + 1` makes an array of a Python number in a compiled step, and a program may write a
    Python number in the place of a hyperparameter.

    Args:
        tree: any pytree.
    """
    found = {}
    for path, leaf in tree_leaves_with_path(tree):
        form = "no array"
        if is_number(leaf):
            form = "a number"
        elif is_array(leaf):
            form = f"{leaf.dtype}{tuple(leaf.shape)}"
            if not leaf.shape and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                form = "a number"
        found[keystr(path)] = form
    return found


def differences(found: dict[str, str], expected: dict[str, str]) -> str:
    """Names the first leaves whose forms differ, for a message. An empty string if none does.

    Args:
        found: the forms of the tree that the program has passed.
        expected: the forms that it needs.
    """
    differing = []
    for path in {**expected, **found}:
        form, needed = found.get(path, "missing"), expected.get(path, "no leaf")
        if form != needed:
            differing.append(f"state{path} is {form}, expected {needed}")
    return first_of(differing, separator="; ")
