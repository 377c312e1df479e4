"""The kinds of events: when each is written, and what it has to say."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """One kind."""

    when: str
    """When it is written; what `step` is, where it is not the step that the run is at."""
    needs: tuple[str, ...] = ()
    """Fields that it always has, besides those of every event. Any other may come with it."""


KINDS: dict[str, Kind] = {
    "start": Kind(
        "A process begins. Its number, host and versions are added by the log.",
        ("host", "pid", "environment", "policy"),
    ),
    "resume": Kind("The run goes on from a checkpoint of an earlier process.", ("checkpoint",)),
    "alarm": Kind("A step with a cause. `step` is that step.", ("cause", "readings")),
    "incident": Kind(
        "An incident begins. `step` is the step that was judged.", ("incident", "onset", "cause")
    ),
    "order": Kind(
        "The policy orders something of the host. `step` is the step that was judged.",
        ("action", "cause"),
    ),
    "assessment": Kind(
        "Whether the model is worse or the data are different; only `damage` goes back.",
        ("verdict", "cause"),
    ),
    "save": Kind("A checkpoint's copy was taken. `step` is the checkpoint's."),
    "save_failed": Kind(
        "A checkpoint could not be written; training goes on. `step` is the checkpoint's.",
        ("problem",),
    ),
    "good": Kind("A checkpoint is known-good from now on. `step` is the checkpoint's."),
    "quarantine": Kind(
        "A checkpoint is set aside: newer than the one gone back to.", ("checkpoint",)
    ),
    "damaged": Kind(
        "A checkpoint's bytes are not those that were saved. `step` is the checkpoint's.",
        ("problem",),
    ),
    "rollback_begin": Kind("A rollback begins, and is in the journal.", ("onset",)),
    "rollback": Kind(
        "A rollback is done. `step` is the one it went back from.", ("checkpoint", "outcome")
    ),
    "skipped_batches": Kind("Batches were left out, exactly these.", ("batches",)),
    "data": Kind("What became of the data's position.", ("outcome",)),
    "lr": Kind(
        "The learning-rate multiplier was cut, or is back at 1.", ("lr_scale_before", "lr_scale")
    ),
    "rerun": Kind("A suspicious step is taken once more from a snapshot.", ("checkpoint",)),
    "verdict": Kind("What the re-run showed.", ("outcome",)),
    "hook": Kind("A hook overrode an order, or raised."),
    "stop": Kind("The policy ends the run.", ("why", "diagnosis")),
    "problem": Kind(
        "Something that did not stop the run and that a person should know.", ("problem",)
    ),
    "end": Kind("The process ends, in whatever way it still can say so.", ("ending",)),
}
