"""`attach`: heals a torch optimizer. `Healing`: the handle that `attach` returns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.console import Console, checked_console
from healcore.core.decision import Action, Cause, Decision
from healcore.core.engine import Engine
from healcore.core.engine.state import metrics as metrics_of
from healcore.core.engine.state import record_numbers
from healcore.core.errors import AttachError
from healcore.core.signals import SignalError
from healcore.policy import Overrides, PolicyLike, engine_of
from healcore.torch import gradients
from healcore.torch.healed_step import HealedStep, has_kernel
from healcore.torch.live_engine import LiveEngine
from healcore.torch.measurement import Measurer, one_number
from healcore.torch.ranks import SignalAllReduce, StepRanks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def attach(
    optimizer: Optimizer,
    policy: PolicyLike = "default",
    *,
    scaler: torch.amp.GradScaler | None = None,
    engine: Literal["auto", "host", "device"] = "auto",
    process_group: ProcessGroup | DeviceMesh | Literal["auto"] | None = "auto",
    pp_mesh: DeviceMesh | None = None,
    console: Console = "auto",
    **overrides: Unpack[Overrides],
) -> Healing:
    """Heals an optimizer: the policy judges every `optimizer.step()`, then clips it or skips it.

        heal = attach(optimizer, "default")
        heal.observe(loss); loss.backward(); optimizer.step()

    Remove other clipping: the policy needs the unclipped norm. A skipped step leaves parameters,
    moments and step counters bit-identical. Buffers that the forward pass has written, such as
    BatchNorm's statistics, keep its NaN. The loop's own learning-rate schedules and weight averages
    continue, since the loop did call `step()`. Step hooks of a skipped step do not run if the host
    decides.

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
        process_group: the ranks that take each step together. They judge the mean of their losses
            and the global norm, which costs one all_reduce of 80 bytes per step. "auto": the ranks
            of the parameters' meshes (FSDP2, tensor parallel), or for plain parameters the default
            group, if torch.distributed is initialized. With None the ranks exchange nothing; with a
            Healer each rank is then a run of its own.
        pp_mesh: the stages of a pipeline, `mesh["pp"]`, whose squared norms are summed. By default
            the dimension "pp" of the root mesh of the parameters' meshes.
        console: whether lines are printed to standard error. "auto": unless the program has set up
            logging for the logger `healcore`; False: never; True: unless the program's logging
            already prints them to the terminal.
        **overrides: values to replace in the policy, `clip={"max_norm": 1.0}`; see
            `healcore.policy.Overrides`.

    Returns:
        The handle: `observe`, `metrics`, `state_dict`, `detach`.

    Raises:
        AttachError: not an optimizer, already attached, no parameters, an unknown value of an
            option, or meshes that do not show which ranks step together. Nothing was changed.
        healcore.policy.PolicyError: the policy does not exist or is not valid.
    """
    checked = checked_console(console)
    wrapper_scaler = getattr(optimizer, "scaler", None)  # accelerate calls it by itself
    if not isinstance(wrapper_scaler, torch.amp.GradScaler):
        wrapper_scaler = None
    if scaler is None:
        scaler = wrapper_scaler
    healing = heal_optimizer(
        unwrapped(optimizer),
        engine_of(policy, overrides),
        scaler=scaler,
        engine=engine,
        process_group=process_group,
        pp_mesh=pp_mesh,
    )
    if wrapper_scaler is not None:
        # With fp16 accelerate's wrapper stores `step` and restores it after each step. An update of
        # its state with nothing makes it store the current `step`.
        wrapper: Any = optimizer
        wrapper.__setstate__({})
        healing.healed_step.undo_stack.callback(wrapper.__setstate__, {})
    healing.healed_step.attach_log.console = checked
    return healing


def heal_optimizer(
    optimizer: Optimizer,
    policy_engine: Engine,
    *,
    scaler: torch.amp.GradScaler | None = None,
    engine: str = "auto",
    process_group: ProcessGroup | DeviceMesh | Literal["auto"] | None = "auto",
    pp_mesh: DeviceMesh | None = None,
    measurer: Callable[..., Measurer] = Measurer,
    healed_step: Callable[..., HealedStep] = HealedStep,
) -> Healing:
    """Attaches to an optimizer without a wrapper. `attach` and the trainers call it.

    Everything that can fail is done before the optimizer is changed, so a failed call leaves it as
    it was. The parts are made in this order, each from the parts before it:

        StepRanks ─► LiveEngine ─► Measurer ─► HealedStep ─► Healing

    Args:
        optimizer: a torch.optim optimizer, see `unwrapped`.
        policy_engine: the policy's engine, without a state.
        scaler: see `attach`. A disabled GradScaler counts as None.
        engine: "auto", "host" or "device", see `attach`.
        process_group: see `attach`.
        pp_mesh: see `attach`.
        measurer: `Measurer`, or a subclass for a trainer that holds the gradients elsewhere.
        healed_step: `HealedStep`, or a subclass for a trainer that steps in its own way.

    Returns:
        The handle of the optimizer.

    Raises:
        AttachError: as for `attach`.
    """
    if engine not in ("auto", "host", "device"):
        raise AttachError(f"engine must be 'auto', 'host' or 'device', got {engine!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise AttachError(
            f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}: "
            "leave it out if you use no scaler"
        )
    if scaler is not None and not scaler.is_enabled():
        scaler = None  # GradScaler(enabled=False) hands everything through and keeps no records
    name = type(optimizer).__name__
    params = gradients.parameters(optimizer)
    if healing_of(optimizer) is not None:
        raise AttachError(
            f"this {name} is healed already: each of two policies would judge the changes of the "
            "other policy; call detach() on the first handle"
        )
    if not params:
        raise AttachError(f"this {name} has no parameters: attach after add_param_group")
    home = params[0].device
    ranks = StepRanks(params, process_group, pp_mesh)
    if policy_engine.per_tensor and ranks.stages > 1:
        raise AttachError(
            "the policy clips each parameter by its own history, and pipeline stages have "
            "different parameters: use a policy with one limit for all, clip={'kind': 'zclip'}"
        )
    device = None
    # On a CPU reading a tensor costs nothing, and without a fused kernel the host needs the
    # decision anyway.
    is_faster = home.type != "cpu" and has_kernel(optimizer)
    if engine == "device" or (engine == "auto" and is_faster):
        device = home
    live_engine = LiveEngine(policy_engine, len(params), device)
    measured = measurer(live_engine, optimizer, home, scaler)
    step = healed_step(optimizer, live_engine, measured, SignalAllReduce(ranks, home))
    return Healing(step)


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer inside accelerate's or Fabric's wrapper.

    Such a wrapper is an `Optimizer` whose constructor did not run, so it has no hooks. Wrappers may
    be nested.

    Args:
        optimizer: an optimizer, or a wrapper around one.

    Returns:
        The optimizer whose `step()` updates the weights: `optimizer` itself if it is not a wrapper.

    Raises:
        AttachError: there is no torch.optim optimizer inside.
    """
    inner = optimizer
    while isinstance(inner, Optimizer) and "_optimizer_step_pre_hooks" not in vars(inner):
        inner = vars(inner).get("optimizer") or vars(inner).get("_optimizer")
    if isinstance(inner, Optimizer):
        return inner
    raise AttachError(
        f"attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}: pass the optimizer "
        "whose step() updates the weights, or for DeepSpeed use healcore.torch.heal_engine(engine)"
    )


def healing_of(optimizer: Optimizer) -> Healing | None:
    """The `Healing` of an optimizer, or None if the optimizer is not attached.

    A Healer uses the handle of an earlier `attach` instead of attaching a second time, which would
    judge each step twice.

    Args:
        optimizer: the optimizer, without a wrapper.
    """
    for hook in optimizer._optimizer_step_pre_hooks.values():
        healing = getattr(hook, "__healing__", None)
        if healing is not None:
            return healing
    return None


def _no_handle() -> None:
    """Returns None, which a copied or unpickled `Healing` becomes. Warns."""
    warnings.warn(
        "a Healing handle belongs to the optimizer of one process, so its copy is None: call "
        "healcore.torch.attach for the other optimizer, or keep the handle outside of what is "
        "copied or pickled",
        stacklevel=2,
    )


class Healing:
    """Handle of an optimizer that a policy heals. Created by `attach`, not directly.

    Your loop reports its losses to the handle, reads decisions and metrics from it, and saves its
    state next to the optimizer's. `optimizer.step()` itself is called as before.

        heal = attach(optimizer, "default")
        for batch in loader:
            loss = model(batch)
            heal.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.save({"optimizer": optimizer.state_dict(), "heal": heal.state_dict()}, "run.pt")

    Attributes:
        optimizer: the optimizer, without accelerate's or Fabric's wrapper.
        live_engine: the engine with its state.
        engine: the policy's engine, without a state.
        healed_step: the optimizer's healed step.
    """

    def __init__(self, healed_step: HealedStep) -> None:
        self.optimizer = healed_step.optimizer
        self.live_engine = healed_step.live_engine
        self.engine = healed_step.live_engine.engine
        self.healed_step = healed_step
        self._measurer = healed_step.measurer
        healed_step.pre_hook.__healing__ = self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Pickles and copies the handle as None, with a warning.

        A handle belongs to the hooks of one optimizer in one process. But programs keep it in their
        `args` or on their model, and these are copied and saved.
        """
        return _no_handle, ()

    # -- signals from the training loop ---------------------------------------------------------

    def observe(self, loss: Tensor | float, *, weight: float = 1.0) -> None:
        """Reports the loss of one (micro-)batch. A step is judged by the mean since the last step.

        No host sync. With several ranks a step is judged by the mean over the ranks.
        A rank may pass its own loss or a reduced loss.

        Args:
            loss: a number, or a tensor of one element on any device. NaN and Inf are accepted.
            weight: weight of this loss in the mean, for parts of different size. A loss of weight
                0 (no token to predict) does not count, even if it is NaN.

        Raises:
            SignalError: `loss` is not a single real number, or `weight` is negative or not finite.
                Nothing was changed.
        """
        value = one_number("loss", loss)
        if not 0 <= weight < math.inf:
            raise SignalError(f"weight must be a finite number from 0 on, got {weight!r}")
        self.healed_step.judge_dropped()
        if weight:
            self._measurer.losses.add(value, weight)

    def observe_eval(self, eval_loss: Tensor | float) -> None:
        """Reports the loss of an evaluation, which the policy reads at the next step.

        Only detectors of an evaluation's loss (`overfit`) read it. No host sync.

        Args:
            eval_loss: a number, or a tensor of one element on any device.

        Raises:
            SignalError: as for `observe`.
        """
        self._measurer.eval_loss = one_number("eval_loss", eval_loss)

    def expect_change(self) -> None:
        """Announces that the next step differs on purpose (LR, batch size, data, weights).

        Baselines warm up again. For `grace_steps` steps only non-finite values are alarms. With
        several ranks, call it on every rank before the same step: the ranks compare their
        decisions.
        """
        self.live_engine.expect_change()

    def judge_dropped(self) -> None:
        """Judges a step that the GradScaler skipped without calling the optimizer, if any.

        The policy can then act on overflows that do not end. `observe` calls this method. A loop
        without losses may call it once after each `scaler.update()`.
        """
        self.healed_step.judge_dropped()

    # -- results for the training loop ----------------------------------------------------------

    def last_decision(self) -> Decision | None:
        """The last step's decision, for a loop that carries out rollbacks or stops itself.

            decision = heal.last_decision()
            if decision is not None and Action.STOP in decision.action:
                sys.exit(1)

        Returns:
            The decision in Python values (`Cause`, `Action`, bool, float), or None before the first
            step. A sync on an accelerator.
        """
        decision = self.live_engine.decision
        if decision is None:
            return None
        group_scale = decision.group_scale
        if group_scale is not None:
            group_scale = group_scale.tolist()
        return Decision(
            grad_scale=float(decision.grad_scale),
            skip=bool(decision.skip),
            lr_scale=float(decision.lr_scale),
            action=Action(int(decision.action)),
            cause=Cause(int(decision.cause)),
            rollback_depth=int(decision.rollback_depth),
            group_scale=group_scale,
        )

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d tensors for a logger (`heal/grad_norm`, `heal/skips`, ...). Copies.

        On an accelerator the call waits for the last step, unless the policy decides in the step
        (`zclip`, `pretraining`): call it when you log.

        `heal/loss` is NaN until a step with a finite loss is judged.
        """
        state = self.live_engine.state
        numbers = metrics_of(record_numbers(state), state.tally)
        return {name: torch.as_tensor(value).clone() for name, value in numbers.items()}

    # -- saving ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The engine's state, JSON-safe and framework-neutral (`Engine.to_dict`). A sync.

        Save it with every checkpoint of model and optimizer: it holds the baselines, the budgets
        and the learning-rate multiplier. A state saved under JAX or NumPy can be loaded here, and
        vice versa.
        """
        return self.live_engine.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state, so that decisions continue as if the run had never stopped.

        Losses that were observed since the last step are dropped.

        Args:
            state: the result of `state_dict`.

        Raises:
            StateError: the state is damaged, or from another policy or model. Nothing is loaded.
        """
        self.live_engine.load(state, rollback=False)
        self.healed_step.on_state_loaded()

    def on_rollback(self, state: dict[str, Any]) -> None:
        """Loads a checkpoint's state after a rollback. Keeps current budgets and LR multiplier.

        With `load_state_dict` instead, the run would forget that it has rolled back, and could roll
        back to the same checkpoint forever.

        Args:
            state: the result of `state_dict` at the time of the checkpoint.

        Raises:
            StateError: as for `load_state_dict`.
        """
        self.live_engine.load(state, rollback=True)
        self.healed_step.on_state_loaded()

    def detach(self) -> None:
        """Restores `step`: the optimizer is as if `attach` had never been called.

        Later steps are not judged, clipped or skipped. State and metrics stay readable. Calling it
        again does nothing.
        """
        self.healed_step.detach()

    def __repr__(self) -> str:
        where = "host"
        if self.live_engine.device is not None:
            where = "device"
        if self.live_engine.judges_late:
            late = ", which judges a step after it was taken"
        else:
            late = ""
        return f"<Healing of {type(self.optimizer).__name__}, {where} engine{late}>"
