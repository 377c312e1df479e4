"""Defines `WholeRun`, which runs a Healer within the fit loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from healcore import console
from healcore.core.engine import StateError
from healcore.runtime.healer import Healer
from healcore.runtime.loop.setup import StoreNotEmpty
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing
from healcore.torch.trainers import replaced
from healcore.torch.trainers.lightning.feed import Feed
from healcore.torch.trainers.lightning.progress import Progress


@dataclass(eq=False)
class WholeRun:
    """Inserts a Healer into the running fit loop, between Lightning and its dataloaders.

    The Healer opens when Lightning requests the first batch. Every checkpoint is then taken at the
    same point of the loop, so a rollback can restore the loop's counters.
    """

    trainer: Any
    module: Any
    policy: Any
    options: dict[str, Any]
    """Arguments of the Healer."""
    engines: Mapping[str, Any]
    """States of the engines in a Lightning checkpoint, by name of the optimizer."""

    def __post_init__(self) -> None:
        self.healer: Healer[Any] | None = None
        self._progress = Progress(self.trainer)
        self._replaced = self._replace_hooks()

    @property
    def healings(self) -> Mapping[str, Healing]:
        """Handles of the optimizers. Empty before the first batch."""
        return {} if self.healer is None else self.healer.driver.healings  # type: ignore[attr-defined]

    def feed(self) -> None:
        """Wraps the dataloaders in a `Feed`, again if Lightning has reloaded them."""
        fit = self.trainer.fit_loop
        if isinstance(fit._data_fetcher, Feed):
            return
        if any(c.__name__ == "_DataLoaderIterDataFetcher" for c in type(fit._data_fetcher).__mro__):
            raise AttachError(
                "training_step takes dataloader_iter and reads the data itself, so a rollback "
                "cannot rewind the data: write training_step(self, batch, batch_idx), or heal the "
                "optimizer with healcore.torch.attach"
            )
        fit._data_fetcher = Feed(self.trainer, fit._data_fetcher, self._progress, self._open)

    def metrics(self) -> dict[str, float]:
        """Metrics for a logger, without a sync. Empty before the first step is read."""
        return {} if self.healer is None else self.healer.metrics()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the Healer's block; `error` is the exception that ends the fit, if any."""
        self._replaced.close()
        if self.healer is None:
            return
        if type(error).__name__ == "SIGTERMException":
            # Lightning raises this after a step, before the Healer has processed the step.
            try:
                self.healer.after_step()
            except BaseException as ended:
                error = ended
        self.healer.__exit__(type(error) if error else None, error, None)

    def _open(self, feed: Feed) -> Healer[Any]:
        """Returns the Healer. The first call opens it and resumes the run in its store."""
        assert feed.loader is not None
        if self.healer is None:
            ckpt_path = self.trainer.ckpt_path
            options = dict(self.options)
            if ckpt_path is not None:
                options["resume"] = False
            if options["loss_fn"] is not None:
                options["loss_fn"] = self._loss_of
            healer = Healer(self.policy, state=self._state(), **options)
            self._progress.rewinds_data = True
            try:
                self.healer = healer.__enter__()
            except StoreNotEmpty as error:
                if ckpt_path is None:
                    raise
                raise AttachError(
                    f"ckpt_path={str(ckpt_path)!r} and the callback's store both have a run to "
                    "resume: omit ckpt_path to continue from the store, or "
                    "pass an empty store to start from ckpt_path"
                ) from error
            self._progress.within_step = lambda: bool(healer.run.data.unused)
            if ckpt_path is not None:
                _load_engines(self.healings, self.engines)
        self._progress.rewinds_data = feed.loader.why_not is None
        return self.healer

    def _state(self) -> dict[str, Any]:
        trainer = self.trainer
        configs = trainer.lr_scheduler_configs
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return {
            "model": self.module,
            **_named_optimizers(trainer),
            **{f"scheduler{i}": config.scheduler for i, config in enumerate(configs)},
            **({} if scaler is None else {"scaler": scaler}),
            "progress": self._progress,
        }

    def _loss_of(self, batch: Any) -> Any:
        return self.options["loss_fn"](self.trainer.strategy.batch_to_device(batch.fetched[0]))

    def _replace_hooks(self) -> ExitStack:
        """Replaces two methods of Lightning's loops, because no callback runs at their moment."""
        fit, loop = self.trainer.fit_loop, self.trainer.fit_loop.epoch_loop
        fit_on_advance_end, loop_on_advance_end = fit.on_advance_end, loop.on_advance_end

        def end_if_complete() -> None:
            """Makes `fit` return without the end of an epoch that had no batch."""
            if getattr(fit._data_fetcher, "nothing_to_do", False):
                raise StopIteration  # leaves FitLoop.run
            fit_on_advance_end()

        def read_last_steps(data_fetcher: Any) -> None:
            """Reads the last steps of an epoch, which may roll the run back into the epoch.

            Lightning requests no batch after the last batch. Its callbacks run before the loop's
            counters are complete, or after the end of the loop.
            """
            loop_on_advance_end(data_fetcher)
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
    return {f"optimizer{i}": optimizer for i, optimizer in enumerate(trainer.optimizers)}


def _load_engines(healings: Mapping[str, Healing], engines: Mapping[str, Any]) -> None:
    """Loads the engine states of a Lightning checkpoint. Warns about states of another policy."""
    for name, healing in healings.items():
        if name in engines:
            try:
                healing.load_state_dict(engines[name])
            except StateError as error:
                console.warning(f"the baselines of {name} are reset: {error}")
