"""`Healer`: a whole training run under one policy, in either framework."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Literal, Self, SupportsFloat, TypeVar, Unpack

from healcore.core.errors import HealcoreError
from healcore.policy import Overrides, PolicyLike
from healcore.runtime.data.cursor import Loader
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.hooks import Hook, Hooks
from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.setup import Options, open_run
from healcore.runtime.loop.shutdown import close
from healcore.runtime.store import CheckpointStore, Keep
from healcore.runtime.store.ranks import Ranks

State = TypeVar("State")
Batch = TypeVar("Batch")


class HealerError(HealcoreError, RuntimeError):
    """The Healer is used where, or as, it cannot be."""


class Healer(Generic[State]):
    """Drives a loop: saves what is known to be good, goes back to it, stops where that is honest.

        with Healer("default", state={"model": model, "optimizer": optimizer},
                    store="checkpoints", events="run.events.jsonl") as healer:
            for batch in healer.batches(loader):
                loss = model(batch)
                healer.observe(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    and in JAX, with `protect` or `heal` in the optimizer:

            for batch in healer.batches(loader):
                state = train_step(healer.state, batch)
                healer.update(state)

    Args:
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, an Engine or
            an EngineConfig. In JAX the one that the optimizer was built with.
        state: what a checkpoint holds. torch: name -> module, optimizer, scheduler, scaler, or any
            object with `state_dict`; optimizers are attached to. JAX: the pytree that the step
            returns, or name -> nnx module and optimizer.
        store: a directory for checkpoints (host memory is used before it), a store, or None: host
            memory only, which is gone with the process.
        events: the events file; None: `healcore.events.jsonl` in the store's directory, if any.
        metrics: a file that gets one line per step (loss, norm, threshold, decision), some 300
            bytes, for `healcore replay`, `report` and `watch`; "auto": beside the events, if those
            go to a file, and thinned when the run gets long; None: none.
        save_every: steps between two checkpoints; None: the policy's `rollback.probation`.
        lag: steps after which a decision is read on the host; the same on every rank.
        keep: how many checkpoints of each kind stay; None: the newest few, and of the older
            known-good ones one at each doubling of the distance (`Keep(older=True)`).
        loss_fn: the loss of one batch: `loss_fn(batch)` in torch and with nnx objects,
            `loss_fn(state, batch)` where the state is a pytree. Called without gradients, in
            evaluation mode, at alarms: on a few batches from before the trouble, to tell a
            damaged model from different data. None: without that evidence.
        on_incident: functions that see an incident and may override what is done.
        rerun: go back once with nothing changed before going back for good, to tell a transient
            fault from one that happens again. Only where the data can be rewound.
        resume: "auto" goes on from a run that was interrupted, and ends the program with status 0
            where it had completed; True goes on from either; False refuses a store that is not
            empty.
        nonfinite_ok: patterns of array names (`model.*.mask`) where NaN and Inf are meant.
        ranks: the processes of this run; None: what the framework knows of.
        framework: "torch" or "jax"; None looks at the state.
        attach: options of `healcore.torch.attach`.
        driver: instead of the framework's own.
        trust: pickle objects that have no plain form (of the state and of loaders), and read what
            was pickled. Reading a pickle runs whatever code its writer put there: only for a
            directory that nobody else can write to. A store that you make has a `trust` of its own.
        **overrides: values to replace in the policy, `clip={"max_norm": 1.0}`; see
            `healcore.policy.Overrides`. In JAX give the optimizer the same ones.

    Raises:
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
        ValueError: another argument is out of range.
    """

    def __init__(
        self,
        policy: PolicyLike = "default",
        *,
        state: State,
        store: str | os.PathLike[str] | CheckpointStore | None = None,
        events: str | os.PathLike[str] | None = None,
        metrics: str | os.PathLike[str] | None = "auto",
        save_every: int | None = None,
        lag: int = 1,
        keep: Keep | None = None,
        loss_fn: Callable[..., SupportsFloat] | None = None,
        on_incident: Hook | Iterable[Hook] = (),
        rerun: bool = False,
        resume: bool | Literal["auto"] = "auto",
        nonfinite_ok: Iterable[str] = (),
        ranks: Ranks | None = None,
        framework: Literal["torch", "jax"] | None = None,
        attach: Mapping[str, Any] | None = None,
        driver: Driver | None = None,
        trust: bool = False,
        **overrides: Unpack[Overrides],
    ) -> None:
        self._options = Options(
            policy=HostPolicy.of(policy, overrides),
            state=state,
            store=store,
            events=events,
            metrics=metrics,
            save_every=save_every,
            lag=lag,
            keep=keep,
            hooks=Hooks(on_incident),
            rerun=rerun,
            resume=resume,
            nonfinite_ok=tuple(nonfinite_ok),
            ranks=ranks,
            framework=framework,
            attach=dict(attach or {}),
            driver=driver,
            loss_fn=loss_fn,
            trust=trust,
        ).checked()
        self._run: Loop | None = None
        self._ended = False
        self._pid = 0

    # -- the block ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Attaches, and goes on from an earlier run or takes the first snapshot.

        Raises:
            AlreadyCompleted: the run in the store had completed; a SystemExit of status 0.
            StoreNotEmpty: `resume` does not allow what lies in the store.
            NoGoodCheckpoint: there are checkpoints, and none is intact.
            StateMismatch: they are of another state.
        """
        if self._run is not None:
            raise HealerError("a Healer is for one `with` block: make another one")
        self._run, self._pid = open_run(self._options), os.getpid()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for checkpoints being written, writes the postmortem, detaches.

        Raises:
            LastStateNotSaved: the loop has ended, and no checkpoint has its last state; a
                SystemExit of status 1.
        """
        run, self._ended = self._live, True
        if os.getpid() == self._pid:  # a forked child has no say in how its parent's run ended
            lost = close(run, error)
            if lost is not None:
                raise lost

    # -- the loop -------------------------------------------------------------------------------

    def batches(self, loader: Loader[Batch], *, epochs: int | None = 1) -> Iterator[Batch]:
        """The loader's batches; whatever has to be done between two steps is done here.

        After a rollback they go on from the checkpoint, without the bad window, where the loader
        can be put back (`state_dict` and `load_state_dict`, `get_state` and `set_state`, lists),
        else forward. With `for epoch in ...` outside, call it once per epoch.

        Args:
            loader: what the loop would iterate over.
            epochs: passes over it; None for no end.

        Raises:
            RunStopped: the policy ends the run.
            Terminated: SIGTERM; the step under way was finished and the run saved.
        """
        return self._live.batches(loader, epochs)

    def after_step(self) -> bool:
        """What `batches` does between two steps, for loops that take their data from elsewhere.

        Returns:
            Whether the run has gone back: `step` has changed then, and in JAX `state`.

        Raises:
            RunStopped: the policy ends the run.
            Terminated: SIGTERM.
        """
        return self._live.after_step()

    def observe(self, loss: SupportsFloat, optimizer: str | None = None) -> None:
        """torch: reports the loss of one (micro-)batch, see `healcore.torch.Healing.observe`.

        Args:
            loss: one number or a tensor with one element.
            optimizer: whose, by its name in the state; None: of all.
        """
        self._side("observe", "in JAX pass value=loss to tx.update")(loss, optimizer)

    def observe_eval(self, eval_loss: SupportsFloat, optimizer: str | None = None) -> None:
        """torch: reports an evaluation's loss."""
        side = self._side("observe_eval", "in JAX pass eval_loss=... to tx.update")
        side(eval_loss, optimizer)

    def update(self, state: State | None = None) -> None:
        """JAX: the state after the step; with nnx objects, which change in place, nothing."""
        self._side("update", "in torch the state changes in place")(state)

    @property
    def state(self) -> State:
        """What is protected. In JAX the state to take the next step from; also after the block."""
        return getattr(self._the_run.driver, "state", self._options.state)

    def expect_change(self) -> None:
        """Says that the next step differs on purpose (LR, batch size, data, weights)."""
        self._live.driver.expect_change()

    def save(self) -> None:
        """Saves now, besides the regular saves. Call it between two steps."""
        self._live.save("asked")

    # -- how it stands --------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps done (in JAX: updates); a rollback sets it back."""
        return self._the_run.step

    @property
    def good(self) -> int | None:
        """Step of the newest known-good checkpoint."""
        return self._the_run.checkpoints.good

    @property
    def rollbacks(self) -> int:
        """Carried out so far, in earlier processes too."""
        return self._the_run.journal.page.rollbacks

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints."""
        return self._the_run.checkpoints.store

    @property
    def driver(self) -> Driver:
        """The framework's side: in torch `driver.healings` has the handle of each optimizer."""
        return self._the_run.driver

    # -- within ---------------------------------------------------------------------------------

    @property
    def _the_run(self) -> Loop:
        if self._run is None:
            raise HealerError("use it as `with Healer(...) as healer:`, inside of the block")
        return self._run

    @property
    def _live(self) -> Loop:
        if self._ended:
            raise HealerError("the `with` block of this Healer is over: make another one")
        return self._the_run

    def _side(self, method: str, instead: str) -> Callable[..., None]:
        """What only one framework's driver has."""
        found = getattr(self._live.driver, method, None)
        if found is None:
            raise HealerError(f"{method} is of the other framework: {instead}")
        return found
