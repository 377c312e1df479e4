"""What the callback does during one fit: `InStep` clips and skips, `WholeRun` runs a Healer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from healcore import console
from healcore.core.engine import StateError
from healcore.runtime.healer import Healer
from healcore.runtime.incidents.run_metrics import METRICS
from healcore.runtime.loop.setup import StoreNotEmpty
from healcore.runtime.run_options import CHECKPOINTS
from healcore.torch.attachment import attach
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing
from healcore.torch.trainers import replaced
from healcore.torch.trainers.lightning.feed import Feed
from healcore.torch.trainers.lightning.progress import Progress


class InStep:
    """The optimizers of a fit, each with its own engine.

    Attributes:
        healings: the handle of each optimizer, by the names of `_named_optimizers`.
    """

    def __init__(
        self, trainer: Any, policy: Any, options: dict[str, Any], engines: Mapping[str, Any]
    ) -> None:
        self.healings: dict[str, Healing] = {}
        options = {"scaler": getattr(trainer.precision_plugin, "scaler", None), **options}
        try:
            for name, optimizer in _named_optimizers(trainer).items():
                self.healings[name] = attach(optimizer, policy, **options)
        except BaseException:
            self.close()
            raise
        _load_engines(self.healings, engines)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step for a logger. A sync on an accelerator."""
        found: dict[str, float] = {}
        for name, healing in self.healings.items():
            prefix = "heal/" if len(self.healings) == 1 else f"heal/{name}/"
            values = healing.metrics()
            numbers = torch.stack([values[f"heal/{each}"].float() for each in METRICS]).tolist()
            found |= {
                f"{prefix}{each}": number for each, number in zip(METRICS, numbers, strict=True)
            }
        return found

    def close(self, error: BaseException | None = None) -> None:
        """Detaches."""
        for healing in self.healings.values():
            healing.detach()


@dataclass(eq=False)
class WholeRun:
    """Puts a Healer into the running fit loop, between Lightning and its dataloaders.

    The Healer is opened when Lightning asks for the first batch. From there on every checkpoint is
    taken at the same point of the loop, so its counters can be exchanged.
    """

    trainer: Any
    module: Any
    policy: Any
    options: dict[str, Any]
    """For the Healer."""
    engines: Mapping[str, Any]
    """States of the engines in a Lightning checkpoint, by optimizer."""

    def __post_init__(self) -> None:
        self.healer: Healer[Any] | None = None
        self._progress = Progress(self.trainer)
        self._replaced = self._replace_hooks()

    @property
    def healings(self) -> Mapping[str, Healing]:
        """The handle of each optimizer; empty before the first batch."""
        return {} if self.healer is None else self.healer.driver.healings  # type: ignore[attr-defined]

    def feed(self) -> None:
        """Puts a `Feed` around the dataloaders, which Lightning may have reloaded."""
        fit = self.trainer.fit_loop
        if isinstance(fit._data_fetcher, Feed):
            return
        if any(c.__name__ == "_DataLoaderIterDataFetcher" for c in type(fit._data_fetcher).__mro__):
            raise AttachError(
                "training_step takes dataloader_iter and reads the data itself, so no rollback can "
                "lead it back: write training_step(self, batch, batch_idx), or pass "
                "in_step_only=True to the callback"
            )
        fit._data_fetcher = Feed(self.trainer, fit._data_fetcher, self._progress, self._open)

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger; no sync. Empty before the first step was read."""
        return {} if self.healer is None else self.healer.metrics()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the Healer's block; `error` is the exception that ends the fit, if any."""
        self._replaced.close()
        if self.healer is None:
            return
        if type(error).__name__ == "SIGTERMException":
            # Lightning raises it after a step, before the Healer has seen that step.
            try:
                self.healer.after_step()
            except BaseException as ended:
                error = ended
        self.healer.__exit__(type(error) if error else None, error, None)

    # -- within ---------------------------------------------------------------------------------

    def _open(self, feed: Feed) -> Healer[Any]:
        """Opens the Healer at the first call, which resumes the run in its store."""
        assert feed.loader is not None
        if self.healer is None:
            ckpt_path = self.trainer.ckpt_path
            options = dict(self.options)
            checkpoints = options.get("checkpoints", CHECKPOINTS)
            if checkpoints.restart_every is None:
                checkpoints = replace(checkpoints, restart_every=self._saves_every())
            options["checkpoints"] = checkpoints
            if ckpt_path is not None:
                options["resume"] = False
            if options["loss_fn"] is not None:
                options["loss_fn"] = self._loss_of
            healer = Healer(self.policy, state=self._state(), **options)
            self._progress.data_goes_back = True
            try:
                self.healer = healer.__enter__()
            except StoreNotEmpty as error:
                if ckpt_path is None:
                    raise
                raise AttachError(
                    f"both ckpt_path={str(ckpt_path)!r} and the callback's store have a run to "
                    "resume, and only one can: leave ckpt_path out to go on from the store, or "
                    "pass an empty store to begin from ckpt_path"
                ) from error
            self._progress.within_step = lambda: bool(healer.run.data.unused)
            if ckpt_path is not None:
                _load_engines(self.healings, self.engines)
        self._progress.data_goes_back = feed.loader.why_not is None
        return self.healer

    def _state(self) -> dict[str, Any]:
        trainer = self.trainer
        configs = trainer.lr_scheduler_configs
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return {
            "model": self.module,
            **_named_optimizers(trainer),
            **{f"scheduler{i}": each.scheduler for i, each in enumerate(configs)},
            **({} if scaler is None else {"scaler": scaler}),
            "progress": self._progress,
        }

    def _saves_every(self) -> int | None:
        """Steps after which a ModelCheckpoint saves, or None if none saves by steps."""
        callbacks = self.trainer.checkpoint_callbacks
        steps = [getattr(each, "_every_n_train_steps", 0) for each in callbacks]
        return min(filter(None, steps), default=None)

    def _loss_of(self, batch: Any) -> Any:
        return self.options["loss_fn"](self.trainer.strategy.batch_to_device(batch.fetched[0]))

    def _replace_hooks(self) -> ExitStack:
        """Replaces two methods of Lightning's loops, which have no callback at that moment."""
        fit, loop = self.trainer.fit_loop, self.trainer.fit_loop.epoch_loop
        fit_advanced, advanced = fit.on_advance_end, loop.on_advance_end

        def end_if_complete() -> None:
            """Lets `fit` return without the end of an epoch that had no batch."""
            if getattr(fit._data_fetcher, "nothing_to_do", False):
                raise StopIteration  # leaves FitLoop.run
            fit_advanced()

        def read_last_steps(data_fetcher: Any) -> None:
            """Reads the last steps of an epoch, which may still send the run back into it.

            Lightning asks for no batch after the last one. Its callbacks come before the loop's
            counters are complete, or after the loop was left.
            """
            advanced(data_fetcher)
            if self.healer is not None and loop.done:
                self.healer.after_step(last=True)

        with ExitStack() as stack:
            stack.enter_context(replaced(fit, "on_advance_end", end_if_complete))
            stack.enter_context(replaced(loop, "on_advance_end", read_last_steps))
            return stack.pop_all()


def _named_optimizers(trainer: Any) -> dict[str, Optimizer]:
    """Lightning's optimizers by their names in checkpoints and events."""
    if len(trainer.optimizers) == 1:
        return {"optimizer": trainer.optimizers[0]}
    return {f"optimizer{i}": each for i, each in enumerate(trainer.optimizers)}


def _load_engines(healings: Mapping[str, Healing], engines: Mapping[str, Any]) -> None:
    """Loads the engine states of a Lightning checkpoint, except the states of another policy."""
    for name, healing in healings.items():
        if name in engines:
            try:
                healing.load_state_dict(engines[name])
            except StateError as error:
                console.warning(f"the baselines of {name} start again: {error}")
