"""Policies of these tests, built from the core's own configuration."""

from healcore.core.clipping import AdaGCConfig, ZClipConfig
from healcore.core.decision import Action, Cause
from healcore.core.detectors import DETECTORS, GradSpikeConfig, NonFiniteConfig
from healcore.core.engine import EngineConfig, LrConfig, RuleConfig
from tests.core.policies import full

NONFINITE = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
WARMUP = 3

ZCLIP = EngineConfig(
    clip=ZClipConfig(),
    detectors=(("nonfinite", NonFiniteConfig()),),
    rules=(RuleConfig(NONFINITE, skip=True),),
)

# Nothing clips, so that a step without a skip is the inner optimizer's own.
SKIP = EngineConfig(
    detectors=(("nonfinite", NonFiniteConfig()), ("grad_spike", GradSpikeConfig(window=WARMUP))),
    rules=(RuleConfig(NONFINITE | int(Cause.GRAD_SPIKE), skip=True),),
)

BOTH = SKIP._replace(clip=ZCLIP.clip)

OBSERVE = ZCLIP._replace(mode="observe")

ADAGC = ZCLIP._replace(clip=AdaGCConfig(warmup_steps=WARMUP))

CUT_LR = SKIP._replace(
    rules=(RuleConfig(NONFINITE, skip=True, action=int(Action.CUT_LR)),),
    lr=LrConfig(factor=0.5, floor=0.1, hold_steps=4, ramp_steps=4),
)

EVERYTHING = full(detectors=tuple((name, each()) for name, each in DETECTORS.items()))
