"""Clip of the update by its own history: an update far longer than the recent ones is shortened.

Levanter's `clip_update_by_historical_norm`: at most mean + k standard deviations of the last 128
update norms. A decayed second moment makes a huge step of an ordinary gradient, which no clipping
of gradients sees; in Marin's 32B run such updates came before the loss spikes.

The rule is ZClip's with `target = "max"` (`zclip`), on another norm: moving averages instead of the
window, robust warm-up, clipped values enter as clipped, and after a true shift of the level it
becomes the baseline. In Levanter values enter unclipped, so that one spike raises the limit for the
next 128 steps. Its comment gives the reason: clipped values could lock in. Here `baseline` prevents
this.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import baseline
from healcore.core.clipping.zclip import ZClipConfig, ZClipState
from healcore.core.signals import Signals, observe


class UpdateClipState(NamedTuple):
    """Statistics of the accepted update norms, and the last step."""

    rule: ZClipState
    restart: Any  # bool: a change was expected since the last update
    norm: Any  # float32: last finite norm, before the clip and without the LR multiplier
    scale: Any  # float32: factor on the last update
    clips: Any  # int32: updates clipped


class UpdateClipConfig(NamedTuple):
    """Numbers of the clip of updates."""

    z_threshold: Any = 3.0
    """Standard deviations above the mean to which a longer update is brought down."""
    ema_decay: Any = 0.984375
    """Decay of mean and variance per step; as long a memory as a window of 128."""
    warmup_steps: Any = 64
    """Updates learnt before one is clipped."""
    min_rel_std: Any = 0.01
    """Floor of the standard deviation as a fraction of the mean."""
    shift: baseline.ShiftConfig = baseline.ShiftConfig()
    """When clipping has become the rule."""

    def init(self) -> UpdateClipState:
        """A rule at the start of its warm-up."""
        return UpdateClipState(
            self._rule().init(),
            restart=np.zeros((), bool),
            norm=np.zeros((), np.float32),
            scale=np.ones((), np.float32),
            clips=np.zeros((), np.int32),
        )

    def update(
        self, state: UpdateClipState, norm: Any, learn: Any, *, xp: Any
    ) -> tuple[UpdateClipState, Any]:
        """Judges the norm of one update, then learns it; returns the factor on the update.

        Where `learn` is false (the step is skipped, or soft) the update is judged and not learnt.
        An update that is not finite is not learnt either, and its factor is 1.
        """
        seen = observe(Signals(grad_norm=norm), state.restart, xp=xp)
        rule, clip = self._rule().update(state.rule, seen, learn, xp=xp)
        return UpdateClipState(
            rule=rule,
            restart=state.restart & False,
            norm=xp.where(seen.finite, seen.grad_norm, state.norm),
            scale=clip.scale,
            clips=xp.where(clip.clipped & learn, state.clips + 1, state.clips),
        ), clip.scale

    def _rule(self) -> ZClipConfig:
        return ZClipConfig(target="max", max_norm=None, **self._asdict())
