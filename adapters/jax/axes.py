"""`Axes`: reduces signals over the axes of `shard_map` or `pmap`, so that all devices decide alike.

Where JAX itself distributes a step (`jit` over sharded arrays) a norm is global anyway. Inside
`shard_map`, `pmap` and a `vmap` with an axis name each device computes with its own part only, and
would decide by its own loss and norm.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from healcore.core.signals import Signals
from healcore.jax.norms import global_norm

AxisName = str | tuple[str, ...] | None

_MEANS = ("loss", "eval_loss", "update_norm", "learning_rate")
_FLAGS = ("change_expected", "externally_skipped")


class Axes(NamedTuple):
    """The axes over which the devices have to decide alike."""

    averaged: tuple[str, ...] = ()
    """Gradients are the same along them (already averaged, as in data-parallel training)."""
    split: tuple[str, ...] = ()
    """Each device has its own part of the gradients."""

    @classmethod
    def of(cls, axis_name: AxisName, shard_axis_name: AxisName) -> Axes:
        """The axes that a user names.

        Raises:
            TypeError: a name is not a string, or an axis is in both.
        """
        axes = cls(
            _names("axis_name", axis_name),
            _names("shard_axis_name", shard_axis_name),
        )
        both = sorted(set(axes.averaged) & set(axes.split))
        if both:
            raise TypeError(
                f"axis {both[0]!r} is in axis_name and in shard_axis_name: along one axis "
                "gradients are either the same (axis_name) or parts of a whole (shard_axis_name)"
            )
        return axes

    def __bool__(self) -> bool:
        return bool(self.averaged or self.split)

    def signals(
        self, own: Signals, leaf_norms: chex.Array | None, *, given_norm: bool
    ) -> tuple[Signals, chex.Array | None]:
        """The signals of the whole step, the same on every device: one all-reduce.

        Losses and rates are averaged, norms combined, and a flag is set if any device sets it. A
        NaN or Inf on one device is on every device afterwards.

        Args:
            own: the signals of this device.
            leaf_norms: float32 (n,), norms of this device's gradient leaves, or None.
            given_norm: the caller has passed the global norm.
        """
        if not self:
            return own, leaf_norms
        names = [*_MEANS, *(["grad_norm"] if given_norm else []), *_FLAGS]
        found = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
        vector = [jnp.asarray(value, jnp.float32)[None] for value in found.values()]
        if leaf_norms is not None:
            vector.append(jnp.square(leaf_norms))
        total = jax.lax.psum(jnp.concatenate(vector), (*self.averaged, *self.split))
        devices = self._size(self.averaged + self.split)
        new = {name: total[i] / devices for i, name in enumerate(found)}
        new |= {name: new[name] > 0 for name in _FLAGS if name in new}
        if leaf_norms is not None:
            squares = total[len(found) :] / self._size(self.averaged)
            leaf_norms = jnp.sqrt(squares)
            if not given_norm:
                new["grad_norm"] = jnp.sqrt(jnp.sum(squares))
        if own.group_norms is not None:
            new["group_norms"] = leaf_norms
        return own._replace(**new), leaf_norms

    def norm(self, tree: Any) -> chex.Array:
        """`norms.global_norm` over all devices."""
        own = global_norm(tree)
        if not self:
            return own
        total = jax.lax.psum(jnp.square(own), (*self.averaged, *self.split))
        return jnp.sqrt(total / self._size(self.averaged))

    def any(self, flag: chex.Array) -> chex.Array:
        """Whether a flag (bool, 0-d) is set on any device.

        Also reduced without axes, where JAX knows that the flag differs (`check_vma`).
        """
        names = self.averaged + self.split or _varying(flag)
        return jax.lax.psum(flag.astype(jnp.int32), names) > 0 if names else flag

    def _size(self, names: tuple[str, ...]) -> int:
        return math.prod(jax.lax.axis_size(name) for name in names)


def _varying(array: chex.Array) -> tuple[str, ...]:
    """The axes along which JAX knows an array to differ; always none under `check_vma=False`."""
    kind: Any = jax.typeof(array)
    found = getattr(kind, "vma", None)  # up to jax 0.9
    if found is None:
        found = getattr(getattr(kind, "manual_axis_type", None), "varying", ())
    return tuple(sorted(found))


def _names(argument: str, given: Any) -> tuple[str, ...]:
    names = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{argument} must be the name of a mesh axis, or a tuple of names, got {given!r}: "
            f'write {argument}="data"'
        )
    return tuple(names)
