"""Errors between a policy and an optimizer. Every message ends with what to write instead.

A loss that is not a number raises `healcore.core.signals.SignalError`, and a saved state that does
not fit `healcore.core.engine.StateError`: the same as in JAX.
"""

from __future__ import annotations

from healcore.core.errors import HealcoreError


class AttachError(HealcoreError, TypeError):
    """`attach` cannot work with what it was given; nothing was changed."""


class ObservedTooLateError(HealcoreError, RuntimeError):
    """A loss was observed after its step; the step at hand was not taken."""


class RanksDisagreeError(HealcoreError, RuntimeError):
    """The ranks of one run have decided different things; the step at hand was not taken."""


class ParametersChangedError(HealcoreError, RuntimeError):
    """The optimizer's parameters are not those that `attach` saw; the step was not taken."""
