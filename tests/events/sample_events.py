"""A sample event of every kind, and the check that an event is as this version writes it."""

import math
from collections.abc import Mapping
from typing import Any

import jsonschema

from healcore.core.decision import Action, Cause
from healcore.core.step_record import Readings, SuspectGradient
from healcore.events import kinds
from tests.events.page_tables import json_schema

EXPORTED = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(EXPORTED)

READINGS = Readings(2.31, 14.2, 1.27, 55.0, math.inf)
EVIDENCE = (SuspectGradient("layers.3.weight", math.nan), SuspectGradient("layers.1.weight", 12.5))

SAMPLES: dict[str, dict[str, Any]] = {
    "start": {
        "policy": "default", "fingerprint": "0a1b2c3d", "mode": "heal", "framework": "torch",
        "store": "checkpoints", "rank": 0, "world": 1, "save_every": 100, "resumes": False,
    },
    "resume": {"checkpoint": 400},
    "alarm": {
        "engine": "optimizer", "incident": 1, "cause": Cause.LOSS_SPIKE, "skip": True, "skips": 3,
        "lr": 0.01, "grad_scale": 1.0, "lr_scale": 1.0, "action": Action.ALERT,
        "readings": READINGS, "evidence": EVIDENCE, "batches": [(0, 7)],
        "alert": Cause.LOSS_SPIKE, "severity": "warning",
        "diagnosis": "The loss rose far above its level.",
        "references": ["arXiv:2504.02507 (ZClip)"],
    },
    "over": {"incident": 1, "onset": 4, "last": 6, "cause": Cause.LOSS_SPIKE, "readings": READINGS},
    "assessment": {
        "onset": 4, "cause": Cause.LOSS_SPIKE, "verdict": "damage", "by": "earlier_weights",
    },
    "save": {"why": "regular", "seconds": 0.25},
    "save_failed": {"problem": OSError(28, "No space left on device")},
    "good": {},
    "damaged": {"problem": "the checkpoint of step 500 is damaged"},
    "rollback": {
        "number": 1, "onset": 4, "cause": Cause.LOSS_SPIKE, "checkpoint": 300, "outcome": "rewound",
        "lr": 1e-3, "lr_limit": 5e-4, "lr_scale_before": 1.0, "lr_scale": 0.5,
        "batches": [(0, 7), (0, 8)], "steps_repeated": 5, "steps_lost": 3,
        "why": "loss spike", "problem": "a generator cannot be rewound",
    },
    "hook": {"hook": "mine.watch", "ordered": Action.ROLLBACK, "action": Action(0)},
    "fault": {
        "cause": ["NETWORK"], "sign": "HTTP 503", "answer": "retry", "attempt": 2, "wait_s": 1.5,
        "problem": "upload failed (HTTP 503, attempt 2), next attempt in 1.5 s",
    },
    "note": {
        "why": "the ranks end together (rank 1: signal 15)",
        "of_ranks": [{"rank": 1, "why": "signal 15"}],
    },
    "stop": {"why": "the budget is spent", "diagnosis": "healcore stopped.", "checkpoint": 300},
    "problem": {"problem": "the rollback could not be written"},
    "end": {"ending": "stopped", "incidents": 3, "rollbacks": 2, "last_good": 300, "steps_lost": 3},
}  # fmt: skip


def problems(event: Mapping[str, Any]) -> list[str]:
    """What is wrong with an event, unknown kinds and fields included, unlike `json_schema`."""
    kind = event.get("kind")
    found = [] if kind in kinds.KINDS else [f"kind {kind!r} is none of {', '.join(kinds.KINDS)}"]
    known = EXPORTED["properties"]
    found += [f"{kind} has a field {name!r} that no event has" for name in event.keys() - known]
    return found + [f"{kind}: {error.message:.200}" for error in VALIDATOR.iter_errors(event)]
