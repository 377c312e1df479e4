"""`attach`: one line that turns healing on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch.optim import Optimizer

from healcore.torch import fused as kernels
from healcore.torch import gradients
from healcore.torch.agreeing import Agreement
from healcore.torch.device_seat import DeviceSeat
from healcore.torch.enforcing import Enforcer
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing
from healcore.torch.host_seat import HostSeat
from healcore.torch.measuring import Measurer
from healcore.torch.report import Reporter
from healcore.torch.step_hooks import StepHooks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from healcore.policy import Overrides, PolicyLike


def attach(
    optimizer: Optimizer,
    policy: PolicyLike = "default",
    *,
    scaler: torch.amp.GradScaler | None = None,
    engine: Literal["auto", "host", "device"] = "auto",
    fused: bool | Literal["auto"] = "auto",
    compile: bool | Literal["auto"] = "auto",
    process_group: ProcessGroup | Literal["auto"] | None = "auto",
    **overrides: Unpack[Overrides],
) -> Healing:
    """Heals an optimizer: every `optimizer.step()` is judged first, then clipped, skipped or taken.

        heal = attach(optimizer, "default")
        heal.observe(loss); loss.backward(); optimizer.step()

    Remove other clipping: the policy wants the norm as it is. A skipped step leaves parameters,
    moments and step counters as they were, to the bit; learning-rate schedules and weight averages
    of the loop's own go on, since the loop did call `step()`.

    Args:
        optimizer: any torch.optim optimizer, or accelerate's or Fabric's wrapper around one.
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, an Engine or
            an EngineConfig.
        scaler: the GradScaler, if one is used. Only needed for an optimizer that is not fused,
            which it does not call at an overflow: such a step's losses are dropped with it, and
            overflows that do not end are counted as non-finite steps.
        engine: where decisions are made. "device": in torch, next to the parameters, without a
            sync if the optimizer is fused. "host": in NumPy, one sync per step on an accelerator,
            none on a CPU. "auto": device for fused optimizers on accelerators, else host. Both
            decide alike.
        fused: whether `step()` honours `found_inf` and `grad_scale`. "auto" knows torch's own; True
            vouches for a subclass that only wraps `super().step()`; False never uses them.
        compile: whether the device engine runs through torch.compile; "auto": on accelerators.
        process_group: the ranks that take each step together. They judge the mean of their losses
            and norms, which costs one small all_reduce per step. "auto": the default group, where
            torch.distributed is initialized with several ranks. None: nothing is exchanged; only
            where every rank is given the same loss and gradients anyway, or trains its own model.
        **overrides: values to replace in the policy, `clip={"max_norm": 1.0}`; see
            `healcore.policy.Overrides`.

    Returns:
        The handle: `observe`, `metrics`, `state_dict`, `report`, `detach`.

    Raises:
        AttachError: not an optimizer, already attached, nothing to optimize, or an option that
            there is none of. Nothing has changed then.
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
    """
    from healcore.policy import engine_of  # here: `import healcore.torch` loads no pydantic

    optimizer = unwrapped(optimizer)
    if engine not in ("auto", "host", "device"):
        raise AttachError(f"engine must be 'auto', 'host' or 'device', got {engine!r}")
    if compile not in (True, False, "auto"):
        raise AttachError(f"compile must be True, False or 'auto', got {compile!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise AttachError(
            f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}: "
            "leave it out if you use none"
        )
    if healing_of(optimizer) is not None:
        raise AttachError(
            f"this {type(optimizer).__name__} is healed already: two policies on one optimizer "
            "would each see what the other did; call detach() on the first handle"
        )
    params = gradients.parameters(optimizer)
    if not params:
        raise AttachError(
            f"this {type(optimizer).__name__} has no parameters: attach after add_param_group"
        )
    home = params[0].device
    if home.type == "meta":
        raise AttachError(
            "the parameters are on the meta device and have no values: "
            "attach after they are materialised"
        )
    core = engine_of(policy, overrides)
    obstacle = kernels.obstacle(optimizer, fused)
    where, reason = _seat(engine, obstacle, home, type(optimizer).__name__)
    if where == "device":
        compiled = home.type != "cpu" if compile == "auto" else compile
        seat = DeviceSeat(core, len(params), home, compile=compiled)
    else:
        seat = HostSeat(core, len(params))
    measurer = Measurer(core, optimizer, home, scaler)
    enforcer = Enforcer(optimizer, by_kernel=obstacle is None, cuts_lr=core.cuts_lr)
    agreement = Agreement(process_group, home)
    return Healing(
        optimizer,
        core,
        seat,
        measurer,
        StepHooks(optimizer, core, seat, measurer, enforcer, agreement),
        agreement,
        Reporter(measurer, seat, reason, obstacle, enforcer.own_step.stoppable, agreement),
    )


def _seat(wanted: str, obstacle: str | None, home: torch.device, name: str) -> tuple[str, str]:
    """Which seat, and why."""
    if wanted != "auto":
        return wanted, f"asked for with engine={wanted!r}"
    if home.type == "cpu":
        return "host", "the parameters are on the CPU, where reading a tensor costs nothing"
    if obstacle is None:
        return "device", f"{name} is fused: the decision never has to leave {home}"
    return "host", f"{obstacle}: the host has to know the decision anyway"


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer itself: accelerate's and Fabric's wrappers are Optimizers too, without hooks.

    They keep it in an attribute: `optimizer`, `_optimizer`.
    """
    inner = optimizer
    while isinstance(inner, Optimizer) and "_optimizer_step_pre_hooks" not in vars(inner):
        inner = vars(inner).get("optimizer") or vars(inner).get("_optimizer")
    if isinstance(inner, Optimizer):
        return inner
    if isinstance(optimizer, torch.nn.Module):
        hint = "pass the optimizer, not the model"
    elif isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        hint = "pass scheduler.optimizer"
    elif isinstance(optimizer, type):
        hint = f"pass an instance, {optimizer.__name__}(model.parameters(), lr=1e-3)"
    elif isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        hint = f"pass the {type(optimizer).__name__}'s .optimizer"
    else:
        hint = "pass the torch.optim.Optimizer whose step() you call"
    raise AttachError(
        f"attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}: {hint}"
    )


def healing_of(optimizer: Optimizer) -> Healing | None:
    """The handle that is attached to an optimizer, if any."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        found = getattr(hook, "__healing__", None)
        if found is not None:
            return found
    return None
