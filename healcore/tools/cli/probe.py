"""`healcore probe loss | optimizer | checkpoint`.

Exit status: 0 pass, 1 warn, 2 fail, 3 it cannot be said (too short, nothing of the kind, not to be
read, or the command line is wrong). Of several the worst: FAIL, ERROR, WARN, SKIP, PASS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from healcore.tools.cli.columns import columns_of
from healcore.tools.cli.probing import Command, Group, checked, each, finish, no_traces, unusable

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Is this curve, this optimizer state, this checkpoint healthy? "
    "Exit status 0 pass, 1 warn, 2 fail, 3 cannot say.",
)

_Json = Annotated[bool, typer.Option("--json", help="JSON instead of text; no NaN, no Infinity.")]


@app.command(cls=Command)
def loss(
    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE", help="Logs of runs, of any kind that replay reads."),
    ],
    signal: Annotated[
        str, typer.Option(help="loss, eval_loss, grad_norm or update_norm.")
    ] = "loss",
    goal: Annotated[str, typer.Option(help="down, or up for a reward.")] = "down",
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="SIGNAL=NAME", help="Which column is which, as in loss=reward."),
    ] = None,
    join: Annotated[
        bool, typer.Option("--join", help="All traces are attempts of one run, in this order.")
    ] = False,
    min_steps: Annotated[
        int | None, typer.Option(help="Fewer finite values are too few to judge. [10]")
    ] = None,
    ends: Annotated[
        float | None, typer.Option(help="Part of the curve that one end is. [0.05]")
    ] = None,
    max_final_loss: Annotated[
        float | None, typer.Option(help="FAIL beyond; no bound if left out.")
    ] = None,
    max_convergence_ratio: Annotated[
        float | None, typer.Option(help="WARN if end / start is above. [1]")
    ] = None,
    min_smoothness: Annotated[
        float | None, typer.Option(help="WARN below; noise around a level has -1. [-2]")
    ] = None,
    trend_sigmas: Annotated[
        float | None, typer.Option(help="A rise or a fall counts from here on. [3]")
    ] = None,
    warn_regret: Annotated[
        float | None, typer.Option(help="WARN if so much of the way is lost again. [0.1]")
    ] = None,
    fail_regret: Annotated[float | None, typer.Option(help="FAIL if so much is. [0.5]")] = None,
    event_sigmas: Annotated[
        float | None, typer.Option(help="Height of an instability event. [5]")
    ] = None,
    event_points: Annotated[
        int | None, typer.Option(help="Of 5 values so many are that high. [3]")
    ] = None,
    max_events: Annotated[int | None, typer.Option(help="WARN if there are more. [0]")] = None,
    max_nonfinite: Annotated[
        int | None, typer.Option(help="WARN if more values are NaN or Inf. [0]")
    ] = None,
    curve_points: Annotated[
        int | None, typer.Option(help="Of the curve in the JSON, extremes kept. [512]")
    ] = None,
    as_json: _Json = False,
) -> None:
    """The loss curve: does it fall, does it hold, does it end well?"""
    from healcore.tools.probe.loss import LossInputs, probe_loss
    from healcore.tools.probe.verdict import ProbeError, unforeseen, unreadable
    from healcore.tools.traces import TraceError, open_traces

    given = {
        "signal": signal,
        "goal": goal,
        "min_steps": min_steps,
        "ends": ends,
        "max_final_loss": max_final_loss,
        "max_convergence_ratio": max_convergence_ratio,
        "min_smoothness": min_smoothness,
        "trend_sigmas": trend_sigmas,
        "warn_regret": warn_regret,
        "fail_regret": fail_regret,
        "event_sigmas": event_sigmas,
        "event_points": event_points,
        "max_events": max_events,
        "max_nonfinite": max_nonfinite,
        "curve_points": curve_points,
    }
    inputs = checked(LossInputs, given)
    try:
        opened, failed = open_traces(traces, columns=columns_of(column or []), join=join)
    except TraceError as error:
        unusable(str(error))
    results = no_traces(failed, traces)
    for trace in opened:
        try:
            results.append(probe_loss(trace, inputs))
        except (ProbeError, TraceError, OSError) as error:
            results.append(unreadable("loss", trace.name, error))
        except Exception as error:
            results.append(unforeseen("loss", trace.name, error))
    finish(results, inputs, as_json)


@app.command(cls=Command)
def optimizer(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT",
            help="torch or safetensors files; directories of DCP, Orbax, the Trainer, or a store.",
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="Which checkpoint of a store. [the newest known-good]")
    ] = None,
    min_step: Annotated[
        int | None, typer.Option(help="Before it moments cannot be judged. [50]")
    ] = None,
    global_step: Annotated[
        int | None, typer.Option(help="The step, where the state does not say it.")
    ] = None,
    beta2: Annotated[
        float | None, typer.Option(help="Where the state does not say it. [0.999]")
    ] = None,
    fail_nonfinite: Annotated[
        int | None, typer.Option(help="FAIL if so many parameters have NaN; fewer warn. [2]")
    ] = None,
    fail_dead: Annotated[
        float | None, typer.Option(help="FAIL if more of the layers are dead; fewer warn. [0.3]")
    ] = None,
    outlier_sigmas: Annotated[
        float | None, typer.Option(help="How far an outlier is from its like. [5]")
    ] = None,
    outlier_ratio: Annotated[
        float | None, typer.Option(help="And at least by this factor. [50]")
    ] = None,
    fail_outliers: Annotated[
        float | None, typer.Option(help="FAIL if more of the layers are; fewer warn. [0.3]")
    ] = None,
    top: Annotated[int | None, typer.Option(help="How many layers are named. [3]")] = None,
    as_json: _Json = False,
) -> None:
    """The state of Adam, AdamW and their like: are its second moments those of a healthy net?"""
    from healcore.tools.probe.optimizer import OptimizerInputs, probe_optimizer

    given = {
        "step": step,
        "min_step": min_step,
        "global_step": global_step,
        "beta2": beta2,
        "fail_nonfinite": fail_nonfinite,
        "fail_dead": fail_dead,
        "outlier_sigmas": outlier_sigmas,
        "outlier_ratio": outlier_ratio,
        "fail_outliers": fail_outliers,
        "top": top,
    }
    inputs = checked(OptimizerInputs, given)
    finish(each("optimizer", checkpoints, probe_optimizer, inputs), inputs, as_json)


@app.command(cls=Command)
def checkpoint(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT",
            help="Stores, single checkpoints of a store, or checkpoints that others wrote.",
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Only this one of a store.")] = None,
    nonfinite_ok: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Arrays where NaN and Inf are meant; may be repeated."
        ),
    ] = None,
    require_good: Annotated[
        bool, typer.Option("--require-good", help="Without a known-good one it does not pass.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Look at every number, also where digests hold.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Checkpoints: intact, finite, known-good? Nothing is changed, no lock is taken."""
    from healcore.tools.probe.checkpoint import CheckpointInputs, probe_checkpoint

    given = {
        "step": step,
        "nonfinite_ok": tuple(nonfinite_ok or ()),
        "require_good": require_good,
        "deep": deep,
    }
    inputs = checked(CheckpointInputs, given)
    finish(each("checkpoint", checkpoints, probe_checkpoint, inputs), inputs, as_json)
