"""The table of failures of a training run: what each cause means, and what a person should check.

The diagnosis of a run's end, the report and docs/faults.md use the table, which has one row per
cause. Tests cause each failure in a real run.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

from healcore.core.decision import Cause


class Severity(enum.StrEnum):
    """Whether a run can continue unchanged."""

    WARNING = "warning"
    """The run may recover by itself, or needs a person's decision."""
    ERROR = "error"
    """The run has ended, or is lost if it continues unchanged."""


class Failure(NamedTuple):
    """The row of one cause in `FAILURES`.

    Attributes:
        name: type of failure; several causes may have the same type.
        severity: whether a run can continue unchanged.
        diagnosis: usual meaning, and what a person should check.
        references: publications about the response to the cause.
    """

    name: str
    severity: Severity
    diagnosis: str
    references: tuple[str, ...] = ()


_PALM = "arXiv:2204.02311 (PaLM: roll back about 100 steps and skip batches)"
_OPT = "arXiv:2205.01068 (OPT: restart with a lower learning rate)"
_ZCLIP = "arXiv:2504.02507 (ZClip)"
_RENYI = "Renyi 1962 (records of exchangeable numbers are independent)"
_TABLE = "the self-healing training system for Hugging Face's Trainer and TRL"

FAILURES: dict[Cause, Failure] = {
    # Published for NaN: rollback, half the learning rate, clipping on. Here a bad step is skipped
    # exactly, so the weights stay finite and need no rollback. If they are not, the run rolls back.
    # The learning rate is not changed, because it does not cause a masked batch.
    Cause.NONFINITE_LOSS: Failure(
        "nan_loss",
        Severity.ERROR,
        "The loss itself was NaN or Inf. Look for NaN or Inf in the batch (inputs or labels), a "
        "log or a division of 0, an empty or fully masked batch (a mean over nothing), a label "
        "outside its range, or float16 overflow.",
        (_PALM, _TABLE),
    ),
    Cause.NONFINITE_GRAD: Failure(
        "nan_loss",
        Severity.ERROR,
        "Gradients were NaN or Inf. Very large last norms mean that the run was already "
        "diverging: lower the learning rate. Otherwise look for a square root or a norm at "
        "exactly 0, a softmax over a fully masked row, or float16 overflow. If the weights are "
        "NaN or Inf, the optimizer has made NaN of finite gradients: check its learning rate, "
        "and Adam's eps in float16.",
        (_PALM, _TABLE),
    ),
    # Published: clip by ZClip, and alarm at an absolute norm of 100. An absolute norm ignores the
    # scale of the run, so here the spike is compared with the run's history. The default policy
    # changes no finite step: a clip cured no task of healbench, and harmed rare classes.
    Cause.GRAD_SPIKE: Failure(
        "gradient_explosion",
        Severity.WARNING,
        "The gradient norm was far above its own history. Look at the data of those steps, at "
        "the learning rate, and at the length of the warm-up.",
        (_ZCLIP, "BLOOM-176B's log: the norm grows before the loss does"),
    ),
    # Published: an emergency checkpoint at the spike, which would hold the damaged model. Here the
    # run rolls back to a verified regular checkpoint if the model is worse.
    Cause.LOSS_SPIKE: Failure(
        "loss_spike",
        Severity.WARNING,
        "The loss rose far above its level. If it fell back by itself, the batch was unusual: look "
        "at its data. If it stayed high, look at the learning rate first if it has just risen, "
        "then at the data of those steps, then at the second-moment decay (a lower beta2 forgets "
        "sooner).",
        (_PALM, _ZCLIP),
    ),
    # Published: half the learning rate with each rollback. A change of the data can also raise the
    # loss, so the Healer rolls back only if earlier weights are better on the same batches.
    Cause.DIVERGENCE: Failure(
        "divergence",
        Severity.ERROR,
        "The loss was climbing without one bad step: the learning rate is too high for this phase "
        "of the training, or the data has changed.",
        (_OPT, _PALM),
    ),
    # The default policy does not watch it: data that drift by design look the same.
    Cause.INSTABILITY: Failure(
        "divergence",
        Severity.ERROR,
        "Loss and gradient norm grew together from update to update: the learning rate is too high "
        "for this phase of the training. The run continues below the rate that broke it; lower "
        "your own schedule to that.",
        (_OPT,),
    ),
    # Data that drift by design set records too, so the default policy does not watch them.
    Cause.RECORDS: Failure(
        "divergence",
        Severity.ERROR,
        "The loss set record after record, which well-mixed data do not: the learning rate is too "
        "high for this phase of the training, or the data are no longer shuffled.",
        (_RENYI, _OPT),
    ),
    # Published: increase the learning rate, check the initialisation. A higher rate makes a healthy
    # run worse and does not help a dead network, so both are left to a person.
    Cause.GRAD_VANISHING: Failure(
        "gradient_vanishing",
        Severity.WARNING,
        "Gradients were almost 0. Look for a detached graph, frozen parameters, dead "
        "activations, or a learning rate or a loss scale of 0.",
        (_TABLE,),
    ),
    # Published: increase the learning rate, check the data. As above. A run that has learnt all it
    # can also has a flat loss, so the default policy does not watch it.
    Cause.PLATEAU: Failure(
        "slow_convergence",
        Severity.WARNING,
        "The loss has stopped moving. If it never moved (0.693 with DPO), check the "
        "initialisation and ten samples of the data, and try a learning rate 2 to 5 times "
        "higher, or a lower beta of DPO. Otherwise check the schedule: there may be no more to "
        "learn.",
        (_TABLE,),
    ),
    # The default policy does not watch it: it needs an evaluation loss and a person's decision.
    Cause.OVERFIT: Failure(
        "overfit",
        Severity.WARNING,
        "The evaluation loss rose while the training loss fell. Use regularisation or more data,"
        " or end the training earlier.",
        (_TABLE,),
    ),
    # Published: half the batch, with accumulation, and gradient checkpointing. healcore cannot add
    # gradient checkpointing to the model's own code, so it only advises it.
    Cause.OOM: Failure(
        "oom",
        Severity.ERROR,
        "Memory ran out. Use activation checkpointing, shorter sequences (check whether one "
        "input was longer than the others), bf16, an 8-bit optimizer or offloading. A loop over "
        "healer.microbatches(batch) repeats the step in parts of fewer samples.",
        (_TABLE,),
    ),
    Cause.DATA: Failure(
        "data_error",
        Severity.ERROR,
        "The data could not be read. Check the batch first, then the storage behind it.",
        (_TABLE,),
    ),
    Cause.WORKER: Failure(
        "worker_killed",
        Severity.ERROR,
        "A worker process of the DataLoader died. Most often memory ran out: use fewer "
        "num_workers, a smaller prefetch_factor, or more memory. After a bus error, give more "
        "shared memory (/dev/shm, --shm-size of a container). After a crash, num_workers=0 shows"
        " its traceback.",
    ),
    Cause.NETWORK: Failure(
        "api_error",
        Severity.ERROR,
        "A network call failed. Check the service, its quota and the credentials.",
        (_TABLE, "RFC 9110, 10.2.3 (Retry-After)"),
    ),
    # Published: stop all ranks with their stacks, and start again. Here the stacks are written, and
    # the time-out of a library ends the run, with this diagnosis (decision 26).
    Cause.HANG: Failure(
        "hang",
        Severity.ERROR,
        "A step never returned. Look at the rank whose stack differs from the others', at its "
        "device and at its network.",
        ("arXiv:2509.16293 (ByteRobust)",),
    ),
    Cause.UNKNOWN: Failure(
        "unknown",
        Severity.ERROR,
        "healcore does not classify this exception. Read its message and its traceback.",
        (_TABLE,),
    ),
}
"""A row for every `Cause`."""


def causes_of(names: Iterable[str]) -> Cause:
    """Reads the names of causes.

    Args:
        names: names of `Cause` flags, as in an event.

    Returns:
        The flags. An unknown name, of a newer healcore, is `Cause.UNKNOWN`.
    """
    causes = Cause(0)
    for name in names:
        causes |= Cause.__members__.get(name, Cause.UNKNOWN)
    return causes


def failures_of(causes: Cause) -> tuple[Failure, ...]:
    """The rows of some causes, errors first."""
    rows = [row for cause, row in FAILURES.items() if cause & causes]
    return tuple(sorted(rows, key=lambda row: row.severity is not Severity.ERROR))
