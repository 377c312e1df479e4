"""Finds the tensors that an engine judges in the state of a run, and their names.

An optimizer state does not name the parameters that it optimizes, and a state may contain several
trees that look like them: an average of the weights, a target network, the moments. An engine only
knows how many gradients it judges. So a candidate is a subtree with that many floating tensors:

    state                         engine with 4 gradients
    ├─ params      4 tensors      candidate, the most likely one by its name
    ├─ ema         4 tensors      candidate
    └─ opt_state
       └─ mu       4 tensors      candidate within an optimizer, the least likely one

Messages need the names, and comparisons of weights need to know what may be trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from healcore.jax.array_leaves import PyTree, is_number
from healcore.jax.gradients import is_gradient
from healcore.jax.opt_state import without_heal_state

Key = Any
"""One step of a path: `jax.tree_util.DictKey`, `GetAttrKey`, `SequenceKey`, ..."""
Path = tuple[Key, ...]
"""Keys that lead from the root of a state to a node, as `jax.tree_util` makes them."""


def candidates_of(tree: PyTree, count: int, optimizers: Sequence[Path]) -> dict[Path, list[Path]]:
    """Finds the subtrees that may be the parameters of an engine.

    A Python number may be a parameter, so it counts as a tensor at first. If then no subtree
    outside of the optimizers fits, it is not a parameter: the rate of a dropout layer is such a
    leaf of an Equinox module. The search is then repeated without Python numbers.

    Args:
        tree: the state of a run, or a part of it.
        count: number of gradients of the engine.
        optimizers: paths of the optimizer states in the tree.

    Returns:
        Path of each outermost subtree with `count` floating tensors -> paths of these tensors.
    """
    leaves = jax.tree_util.tree_leaves_with_path(without_heal_state(tree))
    tensors = []
    arrays = []
    for path, leaf in leaves:
        if not is_gradient(leaf):
            continue
        tensors.append(path)
        if not is_number(leaf):
            arrays.append(path)
    candidates = _outermost(tensors, count)
    if all(is_within(place, optimizers) for place in candidates):
        candidates = _outermost(arrays, count)
    return candidates


def _outermost(tensors: Sequence[Path], count: int) -> dict[Path, list[Path]]:
    """Path of each outermost subtree with `count` of the tensors -> paths of these tensors."""
    subtrees: dict[Path, list[Path]] = {}
    for path in tensors:
        for depth in range(len(path) + 1):
            subtrees.setdefault(path[:depth], []).append(path)
    outermost = {}
    for path, inside in subtrees.items():
        if len(inside) != count:
            continue
        parent_fits = bool(path) and len(subtrees[path[:-1]]) == count
        if not parent_fits:
            outermost[path] = inside
    return outermost


def tensor_names(
    candidates: Mapping[Path, Sequence[Path]],
    name: str,
    engine: Path,
    count: int,
    optimizers: Sequence[Path],
) -> tuple[str, ...]:
    """Names the tensors that an engine judges, for alarms such as "Inf in params/Dense_0/kernel".

    The most likely candidate is called `params` or `model`, is outside the optimizers, and its path
    is similar to `engine`. If two networks are equally likely, the names start with the engine's
    name. If their tensors have different names too, the names are numbers.

    Args:
        candidates: result of `candidates_of`.
        name: name of the engine.
        engine: path of the engine's HealState.
        count: number of gradients of the engine.
        optimizers: paths of the optimizer states, one for each engine of the run.

    Returns:
        `count` names, in the order of the gradients.
    """

    def rank_of(path: Path) -> tuple[bool, bool, int]:
        """Lower for a more likely candidate."""
        is_named = bool(path) and key_name(path[-1]) in ("params", "model")
        alike = 0
        for key, other in zip(path, engine, strict=False):
            if key == other:
                alike += 1
        return not is_named, is_within(path, optimizers), -alike

    best = min(map(rank_of, candidates), default=None)
    likeliest = [path for path in candidates if rank_of(path) == best]
    if len(likeliest) == 1:
        return tuple(map(jax.tree_util.keystr, candidates[likeliest[0]]))
    inner_paths = set()
    for path in likeliest:
        inner_paths.add(tuple(leaf[len(path) :] for leaf in candidates[path]))
    if len(inner_paths) == 1:
        [inner] = inner_paths
        if all(inner):
            return tuple(f"{name}: {jax.tree_util.keystr(leaf)}" for leaf in inner)
    prefix = ""
    if len(optimizers) > 1:
        prefix = f"{name}: "
    return tuple(f"{prefix}gradient {i} of {count}" for i in range(count))


def is_within(path: Path, others: Sequence[Path]) -> bool:
    """Whether a path leads to one of the nodes at the other paths, or into it."""
    return any(path[: len(other)] == other for other in others)


def key_name(key: Key) -> str:
    """The name of a key without brackets or quotes: ``params`` of ``['params']``, ``0`` of ``[0]``.

    Args:
        key: a key of a path, of any of the classes of `jax.tree_util`.
    """
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"a key of a path has a name, a key or an index, not {key!r}")
