"""What a person should look at, by cause. Sentences, the most useful first."""

from __future__ import annotations

from healcore.core.verdict import Cause

_BY_CAUSE: dict[Cause, tuple[str, ...]] = {
    Cause.NONFINITE_LOSS: (
        "The loss itself was NaN or Inf: a log or a division of 0 in it, an empty or fully masked "
        "batch (a mean over nothing), a label outside its range, float16 overflow.",
    ),
    Cause.NONFINITE_GRAD: (
        "Gradients were NaN or Inf: a square root or a norm at exactly 0, a softmax over a fully "
        "masked row, float16 overflow. The tensors named above are where it showed.",
    ),
    Cause.GRAD_SPIKE: (
        "The gradient norm ran away from its own history: the data of those steps, the learning "
        "rate, and whether warm-up was long enough.",
    ),
    Cause.LOSS_SPIKE: (
        "The loss left its level and stayed there: the data of those steps first, then the "
        "learning rate and the second-moment decay (a lower beta2 forgets sooner).",
    ),
    Cause.DIVERGENCE: (
        "The loss was climbing without one bad step: the learning rate is too high for this phase "
        "of the training, or the data has changed.",
    ),
    Cause.INSTABILITY: (
        "Each update made the model worse: the learning rate is too high for this phase of the "
        "training. The run goes on below the rate that broke it; lower your own schedule to that.",
    ),
    Cause.GRAD_VANISHING: (
        "Gradients were next to nothing: a detached graph, frozen parameters, dead activations, a "
        "learning rate or a loss scale of 0.",
    ),
    Cause.PLATEAU: ("The loss has stopped moving: the schedule, or there is no more to learn.",),
    Cause.OVERFIT: (
        "The evaluation loss rose while the training loss fell: regularisation, more data, or an "
        "earlier end.",
    ),
    Cause.UPDATE_SPIKE: (
        "The optimizer's update stood out while its gradient did not: its second moments are too "
        "small or too old (epsilon, beta2), or a restored optimizer state is not this model's.",
    ),
    Cause.OOM: (
        "Memory ran out: a smaller micro-batch, activation checkpointing; whether one input was "
        "longer than the others.",
    ),
    Cause.DATA: ("The data could not be read: the batch named above, then the storage behind it.",),
    Cause.NETWORK: ("A network call failed for good: the service, its quota, the credentials.",),
    Cause.HANG: ("A step never came back: the slowest rank, its device and its network.",),
}

_TRANSIENT = (
    "A fault that does not come again on the same data is not the model's: check the device (ECC "
    "errors, temperature, a self-test) before it is trusted with this run again."
)
_REPRODUCIBLE = (
    "A fault that comes again on the same data and weights is the program's or the data's: run "
    "that one batch from the last known-good checkpoint under a debugger."
)
_AGAIN = {
    (True, True): "Going back did not help, with other data and a lower learning rate: the trouble "
    "is in the model, its precision or its optimizer's settings, or older than the checkpoints.",
    (True, False): "Going back without those batches did not help, at the same learning rate: more "
    "of the data than was left out is like them, or the learning rate is too high.",
    (False, True): "Going back with a lower learning rate did not help, on the same data: the data "
    "of those steps, then the model's precision and its optimizer's settings.",
    (
        False,
        False,
    ): "Going back did not help, on the same data and at the same learning rate: leave "
    "the data of those steps out, or lower the learning rate.",
}
"""After rollbacks that left batches out or not, and lowered the learning rate or not."""


def advice(
    cause: Cause,
    *,
    verdict: str = "",
    rollbacks: int = 0,
    left_out: bool = False,
    lr_lowered: bool = False,
) -> list[str]:
    """Sentences for a person.

    Args:
        cause: flags of the incident; 0: there is nothing to say.
        verdict: `transient` or `reproducible`, if a re-run has told; else "".
        rollbacks: how many were carried out.
        left_out: one of them left batches out.
        lr_lowered: one of them lowered the learning rate.
    """
    hints = []
    if verdict == "transient":
        hints.append(_TRANSIENT)
    elif verdict == "reproducible":
        hints.append(_REPRODUCIBLE)
    for flag, sentences in _BY_CAUSE.items():
        if flag in cause:
            hints += sentences
    if cause and rollbacks > 1:
        hints.append(_AGAIN[left_out, lr_lowered])
    return hints
