"""`attach`: heals a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch.optim import Optimizer

from healcore.console import Console, checked
from healcore.core.errors import AttachError
from healcore.policy import Overrides, PolicyLike, engine_of
from healcore.policy.loader import check_keywords
from healcore.torch import gradients
from healcore.torch.enforcer import Enforcer, all_fused, is_third_party
from healcore.torch.engines import DeviceEngine, HostEngine
from healcore.torch.healed_step import HealedStep
from healcore.torch.healing import Healing
from healcore.torch.measurement import Measurer
from healcore.torch.ranks import StepRanks
from healcore.torch.signal_allreduce import SignalAllReduce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from healcore.core.engine import Engine


def attach(
    optimizer: Optimizer,
    policy: PolicyLike = "default",
    *,
    scaler: torch.amp.GradScaler | None = None,
    engine: Literal["auto", "host", "device"] = "auto",
    compile: bool | Literal["auto"] = "auto",
    process_group: ProcessGroup | DeviceMesh | Literal["auto"] | None = "auto",
    pp_mesh: DeviceMesh | None = None,
    console: Console = "auto",
    **overrides: Unpack[Overrides],
) -> Healing:
    """Heals an optimizer: the policy judges every `optimizer.step()`, then clips it or skips it.

        heal = attach(optimizer, "default")
        heal.observe(loss); loss.backward(); optimizer.step()

    Remove other clipping: the policy needs the unclipped norm. A skipped step leaves parameters,
    moments and step counters bit-identical. The loop's own learning-rate schedules and weight
    averages continue, since the loop did call `step()`. Step hooks of a skipped step do not run if
    the host decides.

    Args:
        optimizer: any torch.optim optimizer, or accelerate's or Fabric's wrapper of an optimizer.
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, an Engine or
            an EngineConfig.
        scaler: the GradScaler of the loop; by default the GradScaler of accelerate's wrapper.
            Needed if the optimizer is not fused, because after an overflow a GradScaler does not
            call `step()`. The losses of such a step are dropped. The step is judged if its loss is
            not finite, or if overflows do not end.
        engine: where decisions are made. "device": in torch, next to the parameters, without a
            sync if the optimizer is fused. "host": in NumPy, one sync per step on an accelerator,
            none on a CPU. "auto": device for fused optimizers on accelerators, else host. Both
            make the same decisions.
        compile: whether torch.compile compiles the device engine; "auto": on accelerators.
        process_group: the ranks that take each step together. They judge the mean of their losses
            and the global norm, which costs one all_reduce of 96 bytes per step. "auto": the ranks
            of the parameters' meshes (FSDP2, tensor parallel), or for plain parameters the default
            group, if torch.distributed is initialized. None: the ranks exchange nothing. Use it
            only if every rank has the same loss and gradients, or trains its own model.
        pp_mesh: the stages of a pipeline, `mesh["pp"]`, whose squared norms are summed. By default
            the dimension "pp" of the root mesh of the parameters' meshes.
        console: whether lines are printed to standard error. "auto": unless the program has set up
            logging for the logger `healcore`; False: never; True: unless the program's logging
            already prints them to the terminal.
        **overrides: values to replace in the policy, `clip={"max_norm": 1.0}`; see
            `healcore.policy.Overrides`.

    Returns:
        The handle: `observe`, `metrics`, `state_dict`, `report`, `detach`.

    Raises:
        AttachError: not an optimizer, already attached, no parameters, an unknown value of an
            option, or meshes that do not show which ranks step together. Nothing was changed.
        healcore.policy.PolicyError: the policy does not exist or is not valid.
    """
    check_keywords(attach, overrides)
    printed, stored = checked(console), scaler_of(optimizer)
    healing = heal_optimizer(
        unwrapped(optimizer),
        lambda: engine_of(policy, overrides),
        scaler=stored if scaler is None else scaler,
        engine=engine,
        compile=compile,
        process_group=process_group,
        pp_mesh=pp_mesh,
    )
    if stored is not None:
        # With fp16 accelerate's wrapper stores `step` and restores it after each step. An update of
        # its state with nothing makes it store the current `step`.
        wrapper: Any = optimizer
        wrapper.__setstate__({})
        healing.hooks.changes.callback(wrapper.__setstate__, {})
    healing.hooks.incident_log.console = printed
    return healing


def heal_optimizer(
    optimizer: Optimizer,
    core_of: Callable[[], Engine],
    *,
    scaler: torch.amp.GradScaler | None = None,
    engine: str = "auto",
    compile: bool | Literal["auto"] = "auto",
    process_group: Any = "auto",
    pp_mesh: Any = None,
    measurer: Callable[..., Measurer] = Measurer,
    healed_step: Callable[..., HealedStep] = HealedStep,
) -> Healing:
    """Attaches to an optimizer without a wrapper. Calls `core_of` after all other checks.

    A trainer that steps the optimizer in its own way passes subclasses of `Measurer` and
    `HealedStep`.
    """
    if engine not in ("auto", "host", "device"):
        raise AttachError(f"engine must be 'auto', 'host' or 'device', got {engine!r}")
    if compile not in (True, False, "auto"):
        raise AttachError(f"compile must be True, False or 'auto', got {compile!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise AttachError(
            f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}: "
            "leave it out if you use no scaler"
        )
    if healing_of(optimizer) is not None:
        raise AttachError(
            f"this {type(optimizer).__name__} is healed already: each of two policies would judge "
            "the changes of the other policy; call detach() on the first handle"
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
    ranks = StepRanks(params, process_group, pp_mesh)
    core = core_of()
    if core.per_tensor and ranks.stages > 1:
        raise AttachError(
            "the policy clips each parameter by its own history, and pipeline stages have "
            "different parameters: use a policy with one limit for all, clip={'kind': 'zclip'}"
        )
    obstacle = _fused_obstacle(optimizer)
    where, reason = _choose_engine(engine, obstacle, home, type(optimizer).__name__)
    if where == "device":
        compiled = home.type != "cpu" if compile == "auto" else compile
        live_engine = DeviceEngine(core, len(params), home, compile=compiled)
    else:
        live_engine = HostEngine(core, len(params))
    step = healed_step(
        optimizer,
        live_engine,
        measurer(core, optimizer, home, scaler),
        Enforcer(optimizer, by_kernel=obstacle is None, scales_lr=core.scales_lr),
        SignalAllReduce(ranks, home),
    )
    return Healing(step, engine_reason=reason)


def _fused_obstacle(optimizer: Optimizer) -> str | None:
    """Reason why an optimizer cannot clip and skip inside its fused kernel, or None.

    For GradScaler, fused Adam, AdamW, SGD and Adagrad divide the gradients by
    `optimizer.grad_scale`, and change nothing if `optimizer.found_inf` is 1. torch marks them by
    `_step_supports_amp_scaling`.
    """
    name = type(optimizer).__name__
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"{name} was not built with fused=True"
    if not all_fused(optimizer):
        return f"a parameter group of this {name} has fused off"
    if is_third_party(optimizer):
        # Its step() may compute the update itself, or change the update of super().step().
        return f"{name} has a step() of its own, which may not honour found_inf"
    return None


def _choose_engine(
    wanted: str, obstacle: str | None, home: torch.device, name: str
) -> tuple[str, str]:
    """Returns "host" or "device", and the reason."""
    if wanted != "auto":
        return wanted, f"set by engine={wanted!r}{f'; {obstacle}' if obstacle else ''}"
    if home.type == "cpu":
        return "host", "the parameters are on the CPU, where reading a tensor costs nothing"
    if obstacle is None:
        return "device", f"{name} is fused: the decision stays on {home}"
    return "host", f"{obstacle}: the host needs the decision anyway"


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer inside accelerate's or Fabric's wrapper (an Optimizer without hooks)."""
    inner = optimizer
    while isinstance(inner, Optimizer) and "_optimizer_step_pre_hooks" not in vars(inner):
        inner = vars(inner).get("optimizer") or vars(inner).get("_optimizer")
    if isinstance(inner, Optimizer):
        return inner
    if any(kind.__module__.startswith("deepspeed.") for kind in type(optimizer).__mro__):
        hint = "for DeepSpeed use healcore.torch.heal_engine(engine)"
    else:
        hint = "pass the torch.optim.Optimizer whose step() you call"
    raise AttachError(
        f"attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}: {hint}"
    )


def scaler_of(optimizer: Any) -> torch.amp.GradScaler | None:
    """The GradScaler of accelerate's optimizer wrapper, or None."""
    found = vars(optimizer).get("scaler") if isinstance(optimizer, Optimizer) else None
    return found if isinstance(found, torch.amp.GradScaler) else None


def healing_of(optimizer: Optimizer) -> Healing | None:
    """The `Healing` of an optimizer, or None if it is not attached."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        found = getattr(hook, "__healing__", None)
        if found is not None:
            return found
    return None
