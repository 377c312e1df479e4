"""Errors between a policy and an optimizer. Every message says what to write instead.

A loss that is not a number raises `healcore.core.signals.SignalError`, and a saved state that does
not fit `healcore.core.engine.StateError`: the same as in JAX.
"""

from __future__ import annotations


class AttachError(TypeError):
    """`attach` cannot work with what it was given; nothing was changed."""


class ObservedTooLateError(RuntimeError):
    """A loss was observed after its step; the current step was not taken."""


class RanksDisagreeError(RuntimeError):
    """The ranks of one run made different decisions; the current step was not taken."""


class ParametersChangedError(RuntimeError):
    """The optimizer's parameters are not those that `attach` saw; the step was not taken."""
