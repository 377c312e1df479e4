"""The vocabulary: a field means the same, and has the same shape, in every kind of event."""

from __future__ import annotations

from typing import NamedTuple

from healcore.runtime.events import shapes
from healcore.runtime.events.shapes import Shape


class Field(NamedTuple):
    """One field."""

    shape: Shape
    about: str


ENVELOPE: dict[str, Field] = {
    "schema": Field(shapes.whole(1), "Version of the format: 1."),
    "seq": Field(
        shapes.whole(),
        "Counts events, also those that could not be written; goes on from the file's last.",
    ),
    "run": Field(shapes.TEXT, "Id of the run: of one process, from its start to its end."),
    "time": Field(shapes.TIME, "Wall time, ISO 8601, UTC."),
    "mono": Field(shapes.SECONDS, "Monotonic clock, for durations within one run."),
    "kind": Field(shapes.TEXT, "What happened; see below."),
    "step": Field(shapes.or_null(shapes.whole()), "Index of the optimizer step, from 0."),
}
"""Every event has these."""

FIELDS: dict[str, Field] = {
    "lost": Field(shapes.whole(1), "Events before this one that could not be written."),
    # What was seen.
    "incident": Field(shapes.whole(), "Number of the incident that it is part of; 0: of none."),
    "onset": Field(shapes.whole(), "Step of its first alarm."),
    "engine": Field(shapes.TEXT, "The optimizer's name in the state, where there are several."),
    "cause": Field(shapes.CAUSES, "Why something is wrong."),
    "readings": Field(shapes.READINGS, "The numbers behind it; the last finite loss and norm."),
    "evidence": Field(shapes.EVIDENCE, "Tensors whose gradients stood out, the worst first."),
    "batches": Field(shapes.BATCHES, "The step's batches, or those that were left out."),
    # What was done.
    "action": Field(shapes.ACTIONS, "What is done about it on the host."),
    "ordered": Field(shapes.ACTIONS, "What the policy had ordered, where a hook overrode it."),
    "observed": Field(shapes.TRUTH, "True: nothing is done, the policy only observes."),
    "skip": Field(shapes.TRUTH, "The step was skipped within the step."),
    "grad_scale": Field(shapes.NUMBER, "Factor on the step's gradients."),
    "lr_scale_before": Field(shapes.NUMBER, "The learning-rate multiplier until now."),
    "lr_scale": Field(shapes.NUMBER, "The learning-rate multiplier from now on."),
    "lr": Field(shapes.NUMBER, "The user's own learning rate, without the multiplier."),
    "number": Field(shapes.whole(1), "Of the rollback, over the whole run."),
    "depth": Field(shapes.whole(), "How many known-good checkpoints to go back."),
    "checkpoint": Field(shapes.whole(), "Step of the checkpoint that was used, or is spoken of."),
    "repeated": Field(shapes.TRUTH, "An earlier rollback went there too, and nothing is older."),
    "initial": Field(shapes.TRUTH, "It is the snapshot that the run started from."),
    "rewound": Field(shapes.TRUTH, "The data was put back; false: it goes on forward."),
    "outcome": Field(shapes.TEXT, "What came of it, in words."),
    "why": Field(shapes.TEXT, "The reason, in words."),
    "problem": Field(shapes.TEXT, "What went wrong, in words."),
    "verdict": Field(
        shapes.one_of("damage", "data", "open", "unknown"),
        "Whether the model was found to be worse; open: it may come back by itself.",
    ),
    "by": Field(
        shapes.one_of(
            "instability", "weights", "remembered_batches", "earlier_weights", "budget", "nothing"
        ),
        "What the verdict rests on.",
    ),
    "rise": Field(
        shapes.or_null(shapes.NUMBER), "Of the step's loss above that of the remembered batches."
    ),
    "rise_remembered": Field(
        shapes.or_null(shapes.NUMBER),
        "Of the loss of the remembered batches with the present weights.",
    ),
    "hook": Field(shapes.TEXT, "Name of the hook."),
    "seconds": Field(shapes.SECONDS, "How long it took."),
    "diagnosis": Field(shapes.TEXT, "For a person, in plain words."),
    # The run.
    "host": Field(shapes.TEXT, "Host name."),
    "pid": Field(shapes.whole(), "Process number."),
    "boot": Field(shapes.TEXT, "The kernel's id of the boot."),
    "born": Field(shapes.whole(), "When the process began, in clock ticks from the boot."),
    "environment": Field(shapes.VERSIONS, "Versions: healcore, Python, system, frameworks."),
    "policy": Field(shapes.TEXT, "Name of the policy."),
    "fingerprint": Field(shapes.TEXT, "Of the policy."),
    "policy_toml": Field(shapes.TEXT, "The policy as TOML, every key spelt out."),
    "mode": Field(shapes.one_of("heal", "observe"), "Of the policy."),
    "framework": Field(shapes.one_of("torch", "jax"), "Whose run it is."),
    "store": Field(shapes.TEXT, "Where checkpoints go."),
    "lag": Field(shapes.whole(), "Steps after which a step's numbers are read."),
    "save_every": Field(shapes.whole(1), "Steps between saves."),
    "rank": Field(shapes.whole(), "Number of this process in the run."),
    "world": Field(shapes.whole(1), "How many processes the run has."),
    "ending": Field(shapes.one_of(*shapes.ENDINGS), "How the process ended."),
    "resumes": Field(shapes.TRUTH, "There are checkpoints of an earlier process to go on from."),
    "untold_alarms": Field(shapes.whole(1), "Alarms that got no event of their own."),
    "incidents": Field(shapes.whole(), "Incidents so far."),
    "rollbacks": Field(shapes.whole(), "Rollbacks so far."),
    "last_good": Field(shapes.whole(), "Step of the newest known-good checkpoint."),
}
"""Any event may have these; which ones a kind always has stands in `kinds`."""
