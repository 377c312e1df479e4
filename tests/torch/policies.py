"""Engines for these tests, with short warm-ups."""

from healcore import policy
from healcore.core.clipping import AdaGCConfig, FixedConfig, ZClipConfig
from healcore.core.decision import Action, Cause
from healcore.core.detectors import DETECTORS, GradSpikeConfig, LossSpikeConfig, NonFiniteConfig
from healcore.core.engine import Engine, EngineConfig, LrConfig, RuleConfig

WARMUP = 3
NONFINITE = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)

_SKIP = EngineConfig(
    detectors=(("nonfinite", NonFiniteConfig()), ("grad_spike", GradSpikeConfig(window=WARMUP))),
    rules=(RuleConfig(NONFINITE | int(Cause.GRAD_SPIKE), skip=True),),
)

SKIPS = Engine(_SKIP)
"""Skips NaN and finite spikes, clips nothing: a step that passes is the optimizer's own."""

OBSERVES = Engine(_SKIP._replace(mode="observe", clip=FixedConfig(1e-3)))

CUTS = Engine(
    _SKIP._replace(
        rules=(RuleConfig(NONFINITE, skip=True, action=int(Action.CUT_LR)),),
        lr=LrConfig(factor=0.5, floor=0.1, hold_steps=3, ramp_steps=2),
    )
)
"""Halves the learning rate after every non-finite step."""

ADAGC = Engine(
    EngineConfig(
        clip=AdaGCConfig(warmup_steps=WARMUP, max_norm=1e9),
        detectors=(("nonfinite", NonFiniteConfig()),),
        rules=(RuleConfig(NONFINITE, skip=True),),
    )
)

EVERYTHING = Engine(
    EngineConfig(
        clip=ZClipConfig(warmup_steps=WARMUP),
        detectors=tuple((name, detector()) for name, detector in DETECTORS.items()),
        rules=(
            RuleConfig(NONFINITE | int(Cause.LOSS_SPIKE | Cause.GRAD_SPIKE), skip=True),
            RuleConfig(NONFINITE, action=int(Action.ROLLBACK | Action.CUT_LR), count=2, within=9),
        ),
    )
)

LOSSES = Engine(
    EngineConfig(
        detectors=(
            ("nonfinite", NonFiniteConfig()),
            ("loss_spike", LossSpikeConfig(window=8)),  # fewer losses do not show their noise
        ),
        rules=(RuleConfig(NONFINITE | int(Cause.LOSS_SPIKE), skip=True),),
    )
)

OF_RANKS = Engine(
    LOSSES.config._replace(
        clip=ZClipConfig(warmup_steps=20),
        detectors=(
            ("nonfinite", NonFiniteConfig()),
            ("loss_spike", LossSpikeConfig(window=20)),
            ("grad_spike", GradSpikeConfig()),
        ),
    )
)
"""Clips, and skips what is not finite and spikes of the loss; longer warm-ups than the others."""


def fixed(max_norm: float) -> Engine:
    """Clips to `max_norm`, and skips what is not finite."""
    return Engine(SKIPS.config._replace(clip=FixedConfig(max_norm), detectors=()))


ROLLS_BACK = policy.loads(
    """
schema = 1
name = "first-nan"
detect.nonfinite = {}
respond = [{to = ["nonfinite"], do = ["skip", "rollback", "cut_lr"]}]
incident = {quiet_steps = 2, patience = 5}
rollback = {probation = 2}
lr = {hold_steps = 3, ramp_steps = 4}
"""
)
"""A policy for short runs: it rolls back at the first NaN; a checkpoint is good two steps on."""
