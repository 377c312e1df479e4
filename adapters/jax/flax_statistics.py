"""Warns of a step in Flax that keeps the batch statistics of a skipped step.

An optax transformation gets gradients and parameters, and no batch statistics. But Flax's own
`Optimizer.update` and `apply_gradients` get them, and call the transformation. Their frames are on
the stack while the step is traced.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

_NAN_STAYS = "so after a batch with NaN the statistics have NaN, and an evaluation is NaN: "


def warn_if_kept() -> None:
    """Warns if Flax calls this `update` of a transformation for a model with batch statistics.

    Does not warn if healcore's `flax_nnx.update` or `HealTrainState` has called Flax, because these
    revert the statistics.
    """
    frame = sys._getframe()
    level = 1
    text = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package == "flax":
            text = text or _warning(frame.f_code.co_qualname, frame.f_locals)
        elif text and package != "healcore":
            warnings.warn(text, stacklevel=level)  # at the program's own line
            return
        elif text and (module != "healcore.jax.flax_nnx" or frame.f_locals["before"] is not None):
            return
        frame = frame.f_back
        level += 1


def _warning(function: str, given: dict[str, Any]) -> str:
    """The warning about a function of Flax with these variables, or an empty string."""
    if function == "Optimizer.update" and _writes_statistics(given["model"]):
        return (
            "optimizer.update keeps the batch statistics of a step that healcore skips, "
            + _NAN_STAYS
            + "write before = healcore.jax.flax_nnx.snapshot(model) before the forward pass, and "
            "healcore.jax.flax_nnx.update(optimizer, model, grads, value=loss, before=before)"
        )
    if function == "TrainState.apply_gradients" and "batch_stats" in given["kwargs"]:
        return (
            "TrainState.apply_gradients takes the batch_stats of a step that healcore skips, "
            + _NAN_STAYS
            + "derive the state from healcore.jax.flax_linen.HealTrainState"
        )
    return ""


def _writes_statistics(model: Any) -> bool:
    """Whether an nnx model has a layer with batch statistics that is not in evaluation mode."""
    from flax import nnx

    for _, layer in nnx.iter_graph(model):
        if not isinstance(layer, nnx.Module) or getattr(layer, "use_running_average", False):
            continue
        if any(isinstance(value, nnx.BatchStat) for value in vars(layer).values()):
            return True
    return False
