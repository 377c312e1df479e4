"""`Healer`: a whole training run under one policy, in torch and in JAX."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Self,
    SupportsFloat,
    TypeVar,
    Unpack,
    cast,
)

from healcore.core.errors import HealcoreError
from healcore.events.log import Log
from healcore.events.models import Ending
from healcore.policy import Overrides, PolicyLike
from healcore.policy.loader import check_keywords
from healcore.runtime.data.cursor import Loader
from healcore.runtime.data.position import BatchId
from healcore.runtime.driver import Driver, trainer_limit
from healcore.runtime.healing_report import HealingReport
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.incidents.ledger import IncidentRecord
from healcore.runtime.loop.end import close, ending_of
from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.saver import CheckpointSaver
from healcore.runtime.loop.setup import Options, open_run
from healcore.runtime.microbatches.window import Microbatch
from healcore.runtime.postmortem.postmortem import path_for
from healcore.runtime.run_options import (
    CHECKPOINTS,
    LOGGING,
    NO_HOOKS,
    Checkpoints,
    Logging,
    check_no_field,
)
from healcore.runtime.store import CheckpointStore
from healcore.runtime.store.ranks import Ranks
from healcore.runtime.trackers import select

if TYPE_CHECKING:
    from torch import Tensor

State = TypeVar("State")
Batch = TypeVar("Batch")
P = ParamSpec("P")
T = TypeVar("T")


class HealerError(HealcoreError, RuntimeError):
    """A Healer is used outside of its block, or for the wrong framework."""


class Healer(Generic[State]):
    """Heals a training loop: saves checkpoints, rolls back to a known-good one, or stops the run.

        with Healer("default", state={"model": model, "optimizer": optimizer},
                    store="checkpoints", loss_fn=lambda batch: loss_fn(model, batch)) as healer:
            for batch in healer.batches(loader):
                loss = healer.loss(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    In JAX, with `protect` or `heal` in the optimizer:

            for batch in healer.batches(loader):
                state = healer.update(train_step(healer.state, batch))

    **Main arguments**

    Args:
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, an Engine or
            an EngineConfig. In JAX the policy that the optimizer was built with.
        state: what a checkpoint holds. torch: name -> module, optimizer, scheduler, scaler, or any
            object with `state_dict`; the Healer attaches to the optimizers. JAX: the pytree that
            the step returns, or name -> nnx module and optimizer.
        store: a directory for checkpoints (with a faster tier in host memory), a store, or None:
            host memory only, which is lost with the process.
        loss_fn: the loss of one batch: `loss_fn(batch)` in torch and with nnx objects,
            `loss_fn(state, batch)` if the state is a pytree. Called without gradients, with the
            current weights and with earlier ones: better earlier weights are evidence for a
            rollback (docs/how-it-decides.md). With several ranks every rank calls it with its own
            batches, and the mean decides. Without it, "default" rolls back only if weights are
            not finite. It is tried on the first batch (with several ranks after the first step):
            SignalError if it raises or does not return one number.
        checkpoints: when checkpoints are saved and how many stay, see `healcore.Checkpoints`.
        logging: where events, metrics and lines for people go, see `healcore.Logging`.
        trackers: where metrics and events go besides the files: "wandb", "trackio", "mlflow",
            "tensorboard" or "stdout", with a project, experiment or directory as "wandb:project";
            a live wandb, trackio or mlflow run or a SummaryWriter, which stays open; or objects
            with the methods of `healcore.Tracker`. They run in threads, and one that fails or
            hangs is reported and left. See docs/trackers.md.
        hooks: functions that are called at incidents, saves and rollbacks, see `healcore.Hooks`.
        resume: "auto" resumes an interrupted run, and ends the program with status 0 if the run had
            completed; True resumes either; False refuses a store that is not empty. Hyperparameters
            that differ from those at the run's start are named in a line; "auto" refuses a
            completed run then.
        **overrides: values to replace in the policy, `clip={"max_norm": 1.0}`; see
            `healcore.policy.Overrides`. In JAX pass the same ones to the optimizer.

    **Other arguments**

    Args:
        attach: options of `healcore.torch.attach`.
        rerun: before a rollback, go back once with nothing changed, to distinguish a transient
            fault from a reproducible one. Only if the data can be rewound.
        lag: steps after which a decision is read on the host; the same on every rank.
        stop_file: a file that ends the run once it is there, on all ranks at the same step, with
            the last state saved and exit status 0. Looked for once a second, on every rank; it is
            left there, and while it is no run starts. None: there is none.
        ranks: the processes of this run, or None for the processes of the framework.
        driver: "torch" or "jax", or an object that replaces the framework's own driver. None:
            detected from the state.

    Raises:
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
        ValueError: another argument is out of range.
        TypeError: an unknown keyword is like the name of an argument.
        healcore.errors.MissingExtraError: the library of a tracker is not installed.
    """

    def __init__(
        self,
        policy: PolicyLike = "default",
        *,
        state: State,
        store: str | os.PathLike[str] | CheckpointStore | None = None,
        loss_fn: Callable[..., SupportsFloat] | None = None,
        checkpoints: Checkpoints = CHECKPOINTS,
        logging: Logging = LOGGING,
        trackers: object = (),
        hooks: Hooks = NO_HOOKS,
        resume: bool | Literal["auto"] = "auto",
        attach: Mapping[str, Any] | None = None,
        rerun: bool = False,
        lag: int = 1,
        stop_file: str | os.PathLike[str] | None = None,
        ranks: Ranks | None = None,
        driver: Driver | Literal["torch", "jax"] | None = None,
        **overrides: Unpack[Overrides],
    ) -> None:
        check_no_field(overrides)
        check_keywords(Healer.__init__, overrides)
        self._options = Options(
            policy=HostPolicy.of(policy, overrides, trainer_limit(state)),
            state=state,
            store=store,
            loss_fn=loss_fn,
            checkpoints=checkpoints,
            logging=logging,
            trackers=select(trackers),
            hooks=hooks,
            resume=resume,
            attach=dict(attach or {}),
            rerun=rerun,
            lag=lag,
            stop_file=stop_file,
            ranks=ranks,
            driver=driver,
        ).checked()
        self._run: Loop[CheckpointSaver] | None = None
        self._ending: Ending | None = None
        self._error: BaseException | None = None
        self._pid = 0

    # -- the block ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Attaches, and resumes an earlier run or takes the first snapshot.

        Raises:
            AlreadyCompleted: the run in the store had completed; a SystemExit of status 0.
            EndRequested: the stop file is there; a SystemExit of status 0.
            StoreNotEmpty: `resume` is False, and the store holds checkpoints; or it is "auto", and
                the run in the store had completed with other hyperparameters.
            NoGoodCheckpoint: there are checkpoints, and none is intact.
            StateMismatch: they are of another state.
            StoreError: the store cannot be used.
        """
        if self._run is not None:
            raise HealerError("a Healer is for one `with` block: create another one")
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
            LastStateNotSaved: the loop has ended, and no checkpoint holds its last state; a
                SystemExit of status 1.
            IncompleteRun: the loop has ended, and the Healer has seen no step, or the loop called
                neither `batches` nor `after_step`; a SystemExit of status 1.
            RunStopped: more than half of the steps, or of their batches, were skipped.
        """
        run = self._live
        self._error, self._ending = error, ending_of(error, run.ranks.termination.signal_number)
        if os.getpid() == self._pid:  # a forked child must not end its parent's run
            instead = close(run, error)
            if instead is not None:
                self._error, self._ending = instead, ending_of(instead)
                raise instead

    # -- the loop -------------------------------------------------------------------------------

    def batches(self, loader: Loader[Batch], *, epochs: int | None = 1) -> Iterator[Batch]:
        """Yields the loader's batches, and does everything that has to happen between two steps.

        After a rollback a loader that can be rewound (`state_dict` and `load_state_dict`,
        `get_state` and `set_state`, lists) continues from the checkpoint, without the bad window.
        Another loader continues where it is. Within `for epoch in ...` call it once per epoch.
        A `break` before the last batch does not complete the run: the next start trains the rest.
        With `epochs=None`, or a loader without a length, a `break` is the end.

        Args:
            loader: what the loop would iterate over.
            epochs: passes over it, or None for no end.

        Raises:
            RunStopped: the policy ends the run.
            Terminated: SIGTERM; the current step was finished and the run saved.
            EndRequested: the stop file, in the same way.
        """
        return self._live.batches(loader, epochs)

    def microbatches(
        self,
        batch: Batch,
        *,
        count: Callable[[Batch], SupportsFloat] | str | None = None,
        ignore_index: int = -100,
        total: SupportsFloat | None = None,
        most: int | None = None,
        last_resort: Callable[[], str] | None = None,
    ) -> Iterator[Microbatch[Batch]]:
        """Yields a batch in parts that fit into memory; usually one, the batch itself.

            for part in healer.microbatches(batch):
                with part:
                    loss = loss_fn(model, part.batch)
                    (loss * part.weight).backward()

        If a part runs out of memory and the policy's rule for `oom` has `shrink_microbatch`, what
        it holds is freed, gradients and observed losses since the last optimizer step are dropped,
        and the parts of all batches since then come again, half as large. The sum of their
        gradients is the gradient of the whole batch.

        Args:
            batch: an array or a structure of arrays, split along their first axis, or a list of
                samples; see `healcore.runtime.microbatches.splitting`.
            count: what the mean in the loss counts, to weight the parts by: the key of an entry
                whose elements count unless they are `ignore_index`, or a function of a part. None:
                samples. Only called where a batch is split, or with `total`.
            ignore_index: see `count`.
            last_resort: called where no smaller part is left. Makes a step take less memory
                (gradient checkpointing, say) and returns what it has changed, or "" if it cannot;
                then the parts come again. With several ranks it has to do the same on each.
            total: what the mean counts in all batches of this optimizer step, or None if that is
                unknown: each batch has the weight 1.
            most: most samples in a part, or None for as many as fit.

        Raises:
            RunStopped: a single sample does not fit, or `budget.shrinks` is used.
            UnsplittableBatch: `most` is given, and the batch has no common number of samples.
            MicrobatchError: the loop does not enter each part with `with part:`.
        """
        self._live.memory.last_resort = last_resort
        return self._live.memory.window.parts(
            batch,
            count=count,
            ignore_index=ignore_index,
            total=None if total is None else float(total),
            most=most,
        )

    def after_step(self, *, last: bool = False) -> bool:
        """Does what `batches` does between two steps, for loops that get their data elsewhere.

        Args:
            last: the loop would end after this step. Steps that were not read yet are read, and
                nothing is saved, which the end of the block does.

        Returns:
            Whether the run was rolled back: `step` has changed then, and in JAX `state`. After the
            last step the loop has to continue then.

        Raises:
            RunStopped, Terminated: as in `batches`.
        """
        return self._live.after_step(last=last)

    def loss(self, batch: object, optimizer: str | None = None) -> Tensor:
        """torch: the `loss_fn` of a batch, for `backward`, observed.

            for batch in healer.batches(loader):
                loss = healer.loss(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        Args:
            batch: of one (micro-)batch; what `loss_fn` takes.
            optimizer: as for `observe`.

        Returns:
            What `loss_fn` has returned.

        Raises:
            HealerError: the Healer has no `loss_fn`.
        """
        loss_fn = self._options.loss_fn
        if loss_fn is None:
            raise HealerError(
                "loss(batch) calls the loss_fn of the Healer, and there is none: pass "
                "Healer(..., loss_fn=lambda batch: loss_fn(model, batch)), or call observe(loss)"
            )
        value = cast("Tensor", loss_fn(batch))
        self.observe(value, optimizer, batch=batch)
        return value

    def observe(
        self, loss: SupportsFloat, optimizer: str | None = None, *, batch: object = None
    ) -> None:
        """torch: reports the loss of one (micro-)batch, see `healcore.torch.Healing.observe`.

        Within `microbatches` it counts with the part's weight.

        Args:
            loss: one number or a tensor with one element.
            optimizer: its name in the state, or None for all optimizers.
            batch: if `loss` is what the `loss_fn` returns for this batch; saves calling it again.
        """
        if batch is not None:
            self._live.observed(batch)
        method = self._driver_method("observe", "in JAX pass value=loss to tx.update")
        self._live.guard.resume()  # from here to the optimizer's step nothing takes long
        part = self._live.memory.window.part
        if part is None:
            method(loss, optimizer)
        else:
            method(loss, optimizer, weight=part.weight)

    def observe_eval(self, eval_loss: SupportsFloat, optimizer: str | None = None) -> None:
        """torch: reports an evaluation's loss."""
        method = self._driver_method("observe_eval", "in JAX pass eval_loss=... to tx.update")
        method(eval_loss, optimizer)

    def update(self, state: State | None = None) -> State:
        """JAX: passes the state after the step, and does everything that happens between two steps.

            for batch in healer.batches(loader):
                state = healer.update(step(healer.state, batch))  # the step may donate it

        A loop that does not take its batches from `batches` needs no `after_step`.

        Args:
            state: what the step has returned, in the structure that the run began with; None for
                nnx objects, which change in place.

        Returns:
            `state`, the state from which the next step has to start: after a rollback or
            `expect_change` it is not the one that was passed.

        Raises:
            HealStateError: `state` has another structure, shape or dtype, or was computed from a
                state before the last rollback or `expect_change`.
            RunStopped, Terminated, EndRequested: as in `batches`.
        """
        self._driver_method("update", "in torch the state changes in place")(state)
        self._live.after_update()
        return self.state

    @property
    def state(self) -> State:
        """The protected state. In JAX the one to take the next step from; also after the block."""
        return getattr(self._loop.driver, "state", self._options.state)

    def expect_change(self) -> None:
        """Announces that the next step differs on purpose (LR, batch size, data, weights)."""
        self._live.driver.expect_change()

    def retrying(self, call: Callable[P, T]) -> Callable[P, T]:
        """A function that makes a call, and makes it again after a failure that passes.

            upload = healer.retrying(api.upload_file)

        As `healcore.retrying`, under this run's policy: each attempt that fails is an event and a
        line in the log, and a signal that asks the run to end ends a wait too.

        Args:
            call: what to call. It has to be idempotent.

        Raises:
            TypeError: `call` is a coroutine function or a generator.
        """
        return self._live.data.retrying(call)

    def stop(self, why: str) -> NoReturn:
        """Ends the run with a diagnosis, as an order of the policy does.

        Raises:
            RunStopped: always.
        """
        self._live.stop(why)

    def save(self) -> None:
        """Saves a checkpoint now, in addition to the regular ones. Call it between two steps."""
        self._live.save()

    # -- the state of the run -------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps done (in JAX: updates); a rollback decreases it."""
        return self._loop.data.step

    @property
    def last_good_step(self) -> int | None:
        """Step of the newest known-good checkpoint."""
        return self._loop.saver.checkpoints.good

    @property
    def rollbacks(self) -> int:
        """Rollbacks so far, in earlier processes too."""
        return self._loop.recovery.rollbacks

    @property
    def skipped_batch_ids(self) -> frozenset[BatchId]:
        """Ids of the batches that rollbacks have skipped so far, of all loaders."""
        ids = self._loop.data.loaders.left_out().values()
        return frozenset(BatchId(*each) for some in ids for each in some)

    @property
    def incidents(self) -> tuple[IncidentRecord, ...]:
        """The incidents so far, oldest first, in earlier processes too."""
        return tuple(self._loop.recovery.ledger.incidents)

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger: of the newest step that was read, and counts so far; no sync.

            wandb.log(healer.metrics())

        `heal/loss`, `heal/threshold`, `heal/grad_scale`, `heal/lr_scale`, and since the run began
        `heal/clips`, `heal/skips`, `heal/lr_cuts`, `heal/rollbacks`, `heal/alarms`,
        `heal/incidents`; with several optimizers `heal/<name>/loss` and so on. A step is read `lag`
        steps after it. Empty before the first; no `heal/clips` if tensors are clipped one by one.
        """
        return self._loop.recovery.monitor.metrics.values()

    @property
    def events(self) -> Log:
        """The events file."""
        return self._loop.log.events

    def report(self) -> HealingReport:
        """What has happened so far, or in the whole run after the block. Reads the device.

        print(healer.report())
        json.dumps(healer.report().to_dict())
        """
        loop, events = self._loop, self._loop.log.events
        path = None if events.path is None else path_for(events.path, events.run)
        return HealingReport.of(
            self._loop.recovery.run_end(Ending.COMPLETED),
            policy=loop.policy.name,
            ending="" if self._ending is None else self._ending.value,
            attempts=self.rollbacks,
            incidents=self.incidents,
            driver=loop.driver,
            counts={"shrinks": loop.memory.sizes.used},
            postmortem=path if self._ending and path is not None and path.exists() else None,
            error=self._error,
        )

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints."""
        return self._loop.saver.checkpoints.store

    @property
    def driver(self) -> Driver:
        """The framework's driver: in torch `driver.healings` has the handle of each optimizer."""
        return self._loop.driver

    @property
    def run(self) -> Loop[CheckpointSaver]:
        """The parts of the run, for trainers and tests. They may change in any release."""
        return self._loop

    # -- within ---------------------------------------------------------------------------------

    @property
    def _loop(self) -> Loop[CheckpointSaver]:
        if self._run is None:
            raise HealerError("use it as `with Healer(...) as healer:`, inside of the block")
        return self._run

    @property
    def _live(self) -> Loop[CheckpointSaver]:
        if self._ending is not None:
            raise HealerError("the `with` block of this Healer is over: create another one")
        return self._loop

    def _driver_method(self, name: str, instead: str) -> Callable[..., None]:
        method = getattr(self._live.driver, name, None)
        if method is None:
            raise HealerError(f"{name} is for the other framework: {instead}")
        return method
