"""`TorchDriver`: what the Healer needs of a run in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.core.engine import StateError
from healcore.policy import PolicyLike, engine_of
from healcore.runtime.store.protocol import CheckpointStore
from healcore.runtime.store.ranks import Alone, Ranks
from healcore.torch import gradients
from healcore.torch.attaching import attach as attach_to
from healcore.torch.attaching import healing_of
from healcore.torch.driver import live
from healcore.torch.driver.accumulating import Accumulation
from healcore.torch.driver.hyperparameters import TensorOptions
from healcore.torch.driver.pending_step import Entry, PendingStep, Recorder
from healcore.torch.driver.rng import RngState
from healcore.torch.driver.statistics import Statistics
from healcore.torch.driver.strangers import Strangers
from healcore.torch.driver.unread import Unread
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing
from healcore.torch.norms import per_tensor, total
from healcore.torch.porting import restored as readable
from healcore.torch.store import DCPStore, MemoryStore, TieredStore, apply
from healcore.torch.store.flattening import flatten
from healcore.torch.store.gloo import GlooRanks, initialized

_WITHOUT_LOSS = 20
"""Steps without any loss after which it is asked whether that is meant."""


class TorchDriver:
    """Implements `healcore.runtime.driver.Driver`.

    Args:
        state: name -> module, optimizer, scheduler, scaler, tree of tensors, or any object with
            `state_dict` and `load_state_dict`. Every optimizer among the values is healed; one that
            `attach` has been called on, with the same policy, keeps its handle.
        policy: as for `attach`; one engine for each optimizer.
        attach: further options for `attach`, the same for all (`engine`, `fused`, `compile`,
            `scaler`). A single GradScaler in the state is taken for the scaler.

    Raises:
        AttachError: the state cannot be healed, or `attach` says so. Nothing has changed then.
    """

    framework = "torch"

    def __init__(
        self,
        state: Mapping[str, Any],
        policy: PolicyLike = "default",
        attach: Mapping[str, Any] = {},
    ) -> None:
        self._state = live.checked(state)
        self.healings: dict[str, Healing] = {}
        """The handle of each optimizer, by its name in the state."""
        self._own: list[Healing] = []
        try:
            self._attach(engine_of(policy), {"scaler": live.scaler(self._state), **attach})
        except BaseException:
            self._detach()
            raise
        names = live.Names(self._state)
        self._unread: Unread[Entry] = Unread()
        self._recorders = [
            Recorder(name, healing, names, self._unread) for name, healing in self.healings.items()
        ]
        self._accumulations = [Accumulation(healing) for healing in self.healings.values()]
        self._all_stepped = False
        self._statistics = Statistics(self._state, self.healings)
        self._ranks: Ranks | None = None
        self._taken = 0
        self.notes: list[str] = []
        """Lines for a person, oldest first: whoever reads them clears the list."""
        self._strangers = Strangers(self._state, self.healings, self.notes.append)

    # -- what the loop says ---------------------------------------------------------------------

    def observe(self, loss: Tensor | float, optimizer: str | Optimizer | None = None) -> None:
        """Reports a loss; see `Healing.observe`.

        Args:
            loss: a number, or a tensor of one element.
            optimizer: whose step it belongs to, the object or its name; by default all of them.
        """
        for healing in self._meant(optimizer):
            healing.observe(loss)

    def observe_eval(
        self, eval_loss: Tensor | float, optimizer: str | Optimizer | None = None
    ) -> None:
        """Reports an evaluation's loss; the next step sees it."""
        for healing in self._meant(optimizer):
            healing.observe_eval(eval_loss)

    # -- the protocol ---------------------------------------------------------------------------

    def items(self) -> dict[str, Any]:
        """The state as it was given; what an interrupted step has lent is taken back first."""
        self._settle()
        self._statistics.look_again()
        return dict(self._state)

    def replace(self, restored: Mapping[str, Any]) -> None:
        """Loads; then gradients, and losses reported for a step that was not taken, are gone."""
        self._settle()
        options = [TensorOptions(healing.optimizer) for healing in self.healings.values()]
        apply(self._state, restored)
        for each in options:
            each.put_back()
        for accumulation in self._accumulations:
            accumulation.clear()
        for healing in self.healings.values():
            healing.discard()
        self._statistics.keep()

    def healing(self) -> dict[str, dict[str, Any]]:
        """Optimizer's name -> state of its engine, JSON-safe. A sync on an accelerator."""
        return {name: healing.state_dict() for name, healing in self.healings.items()}

    def load_healing(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces engine states; steps taken and not asked for are forgotten."""
        for name, data in engines.items():
            if name not in self.healings:
                raise StateError(
                    f'there is no optimizer "{name}" in the state, whose engine this would be: '
                    f"it has {', '.join(self.healings)}"
                )
            healing = self.healings[name]
            readable(healing.engine, data, healing.seat.groups)
        for recorder in self._recorders:
            if recorder.name in engines:
                recorder.healing.load_state_dict(engines[recorder.name])
            recorder.restart()
        self._unread.clear()

    def poll_step(self) -> PendingStep | None:
        """What was judged since the last call; reads nothing."""
        for healing in self.healings.values():
            healing.judge_dropped()
        self._all_stepped = all(each.stepped for each in self._accumulations)
        for each in self._accumulations:
            each.stepped = False
        entries = self._unread.take()
        if not entries:
            return None
        step = PendingStep(entries, self._compared_with)
        self._taken += 1
        if self._taken == _WITHOUT_LOSS:
            self._ask_for_losses()
        return step

    def may_save(self) -> bool:
        """Whether no optimizer has gradients that it has not stepped with.

        Of several that have all stepped, what still lies in `.grad` is what the backward pass of
        one has left in the parameters of another (a GAN's generator in the discriminator's): the
        next `zero_grad` throws it away.
        """
        if self._all_stepped and len(self._accumulations) > 1:
            return True
        return not any(accumulation.under_way for accumulation in self._accumulations)

    def learning_rate(self) -> float | None:
        """Of the first group of the first optimizer. A sync if it is a tensor on a device."""
        self._settle()
        groups = next(iter(self.healings.values())).optimizer.param_groups
        rate = groups[0].get("lr")
        return None if rate is None else float(rate)

    def expect_change(self) -> None:
        """Opens every engine's grace window at its next step."""
        for healing in self.healings.values():
            healing.expect_change()
        self._statistics.take()  # whoever has loaded weights has loaded these too

    def decline(self) -> None:
        """Tells every engine that the rollback it ordered is not carried out."""
        for healing in self.healings.values():
            healing.decline()

    def finite(self) -> bool:
        """Whether all parameters are finite. One sync for each device."""
        params = [p for h in self.healings.values() for p in gradients.parameters(h.optimizer)]
        return bool(torch.isfinite(total(per_tensor(params), params[0].device)))

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        state: Mapping[str, Any] | None = None,
    ) -> list[float]:
        """In evaluation mode, without gradients; modes and random generators are put back.

        Of a state only the modules are used. Their present tensors wait on the host.
        """
        modules = [m for each in self._state.values() for m in live.modules(each)]
        modes, generators = [module.training for module in modules], self.generators()
        before, weights = generators.state_dict(), {}
        if state is not None:
            named = {n: m for n, m in self._state.items() if isinstance(m, nn.Module)}
            weights = {n: _on_host(m.state_dict()) for n, m in named.items()}
            apply(self._state, {name: state[name] for name in named})
        try:
            for module in modules:
                module.training = False
            with torch.no_grad():
                return [float(loss_fn(batch)) for batch in batches]
        finally:
            apply(self._state, weights)
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            generators.load_state_dict(before)

    def state_bytes(self) -> int:
        """Of the arrays in the state. An optimizer without moments yet is taken to be Adam."""
        leaves = flatten(self.items(), trust=True).leaves.values()
        trained = sum(
            parameter.nbytes
            for healing in self.healings.values()
            if not healing.optimizer.state
            for group in healing.optimizer.param_groups
            for parameter in group["params"]
        )
        return sum(leaf.tensor.nbytes for leaf in leaves) + 2 * trained

    def store(
        self, where: Any, nonfinite_ok: tuple[str, ...], *, trust: bool = False
    ) -> CheckpointStore:
        """Memory, and behind it a `DCPStore`. Every rank makes its own."""
        memory = MemoryStore(nonfinite_ok=nonfinite_ok, trust=trust)
        if where is None:
            return memory
        return TieredStore(memory, DCPStore(where, nonfinite_ok=nonfinite_ok, trust=trust))

    def ranks(self) -> Ranks:
        """The process group's, over gloo; the first call makes a group, on every rank."""
        if self._ranks is None:
            self._ranks = GlooRanks() if initialized() else Alone()
        return self._ranks

    def generators(self) -> RngState:
        """The global ones, of CPU and CUDA."""
        return RngState()

    def close(self) -> None:
        """Takes off hooks and handles; those of an earlier `attach` stay."""
        self._strangers.close()
        self._statistics.close()
        for accumulation in self._accumulations:
            accumulation.close()
        for healing in self.healings.values():
            healing.hooks.on_judged = None
            healing.hooks.grows, healing.own_loss = False, True
            healing.settle()
        self._detach()

    # -- within ---------------------------------------------------------------------------------

    def _attach(self, engine: Any, options: dict[str, Any]) -> None:
        for name, optimizer in live.optimizers(self._state).items():
            healing = healing_of(optimizer)
            if healing is None:
                healing = attach_to(optimizer, engine, **options)
                self._own.append(healing)
            elif healing.hooks.on_judged is not None:
                raise AttachError(
                    f'"{name}" is in a Healer that has not ended: leave its `with` block, or '
                    "delete the object"
                )
            elif repr(healing.engine.config) != repr(engine.config):  # == fails on array configs
                raise AttachError(
                    f'"{name}" is healed already, under another policy: detach() that handle, or '
                    "attach with the policy given here"
                )
            self.healings[name] = healing
        for healing in self.healings.values():
            healing.hooks.grows, healing.own_loss = True, len(self.healings) == 1

    @property
    def _compared_with(self) -> Ranks | None:
        """The processes of this run, if there are several and some engine decides without them."""
        if self._ranks is None or self._ranks.world == 1:
            return None
        alone = any(healing.ranks == 1 for healing in self.healings.values())
        return self._ranks if alone else None

    def _detach(self) -> None:
        for healing in self._own:
            healing.detach()

    def _ask_for_losses(self) -> None:
        read = any("loss" in healing.engine.needs for healing in self.healings.values())
        if read and not any(healing.has_seen_loss for healing in self.healings.values()):
            self.notes.append(
                f"no loss has been observed in {self._taken} steps: call healer.observe(loss); "
                "detectors that read it rest"
            )

    def _settle(self) -> None:
        for healing in self.healings.values():
            healing.settle()

    def _meant(self, optimizer: str | Optimizer | None) -> list[Healing]:
        if optimizer is None:
            return list(self.healings.values())
        for name, healing in self.healings.items():
            if optimizer is healing.optimizer or optimizer is self._state[name]:
                return [healing]
        if isinstance(optimizer, str) and optimizer in self.healings:
            return [self.healings[optimizer]]
        raise AttachError(
            f"there is no optimizer {optimizer!r:.60} in the state: pass one of "
            f"{', '.join(self.healings)}, by name or as the object"
        )


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a module's state; what is no tensor is its own copy already."""
    return {
        name: each.detach().to("cpu", copy=True) if isinstance(each, Tensor) else each
        for name, each in state.items()
    }
