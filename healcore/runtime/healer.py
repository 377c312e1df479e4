"""`Healer`: a whole training run under one policy, in torch and in JAX."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Literal, Self, SupportsFloat, TypeVar, Unpack

from healcore.core.errors import HealcoreError
from healcore.events.models import Ending
from healcore.policy import Overrides, PolicyLike
from healcore.runtime.data.loaders import Loader
from healcore.runtime.data.readers import ScanBlocks
from healcore.runtime.driver import HealerError, trainer_limit
from healcore.runtime.faults.microbatches import Microbatch
from healcore.runtime.healing_report import HealingReport
from healcore.runtime.reporting.trackers import TrackersLike, select
from healcore.runtime.run.batches.batch_loop import (
    Batch,
    Batches,
    loop_over_batches,
    loop_over_blocks,
)
from healcore.runtime.run.batches.number_loops import loop_over_epochs, loop_over_steps
from healcore.runtime.run.ending.end import EndedBy, RunEnd, end_run
from healcore.runtime.run.run import Run
from healcore.runtime.run.start import open_run
from healcore.runtime.run.witness.witness import FORWARD_PASS
from healcore.runtime.run_options import (
    CHECKPOINTS,
    LOGGING,
    NO_HOOKS,
    AttachOptions,
    Checkpoints,
    Hooks,
    HostPolicy,
    Logging,
    Options,
)
from healcore.runtime.store.store import Places, checked_places

Item = TypeVar("Item")
"""The type of what a loop yields: a batch, or the number of an epoch or a step."""
State = TypeVar("State")
"""The type of the state that the program has passed: a dictionary, or in JAX any pytree."""


class Healer(Generic[State]):
    """Heals a training loop: skips bad steps, saves checkpoints, rolls back, resumes, or stops.

        state = {"model": model, "optimizer": optimizer}
        with Healer(
            "default", state=state, store="checkpoints", loss_fn=loss_fn
        ) as healer:
            for batch in healer.batches(loader):
                loss = healer.loss(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    In JAX, with `protect` or `heal` in the optimizer:

        with Healer(state=state, store="checkpoints", loss_fn=compare) as healer:
            for batch in healer.batches(loader):
                state, loss = train_step(healer.state, batch)
                state = healer.update(state)

    Your loop decides which methods it calls:

    your loop | in torch | in JAX
    ---|---|---
    reads batches from a loader | `batches`, `loss` | `batches`, `update`
    has an outer loop over epochs | `epochs`, then `batches(loader, epoch=epoch)` | as in torch
    counts steps, reads its own batches | `steps`, `loss` | `steps`, `update`
    has its own condition, as in `while` | `loss`, then `after_step` | `update`
    is compiled as a whole | (no such loop) | `scan`

    In torch, a loop that computes the loss itself calls `observe(loss)` instead of `loss(batch)`,
    and each of these loops may split its batches by `microbatches`. In JAX the loss is `value=loss`
    of `tx.update`.

    Args:
        policy: name of a preset, path of a TOML file, a `healcore.policy.Policy`, an Engine or an
            EngineConfig. In JAX pass the policy that the optimizer was built with.
        state: the live state, which checkpoints save. torch: name -> module, optimizer, scheduler,
            scaler, or any object with `state_dict`; the Healer attaches to the optimizers. JAX:
            the pytree that the step returns, or name -> nnx module and optimizer.
        store: a directory for checkpoints (with copies in host memory), a
            `CheckpointStore`, or None for host memory only, which is lost with the process. Or a
            list of directories, as in `["/local/run", "/shared/run"]`: each checkpoint is written
            to all of them, and a restart takes the newest checkpoint that is intact in any of them.
            Events and metrics are in the first.
        loss_fn: returns the loss of one batch: `loss_fn(batch)` in torch and with nnx objects,
            `loss_fn(state, batch)` if the state is a pytree. It may return more than the loss, as
            `(loss, logits)` or as a mapping with the key "loss". The Healer calls it with current
            and with earlier weights, without gradients unless it computes some: better earlier
            weights are evidence for a rollback (docs/how-it-decides.md). Every rank evaluates its
            own batches, and the mean decides. Without `loss_fn`, "default" rolls back only if
            weights are not finite. The Healer checks it on the batch of the first step, and
            raises SignalError at step 2 if it changes the batch, raises, or does not return one
            number, for example None.
        loss_fn_cost: cost of one call of `loss_fn` on one batch, in training steps, above 0. The
            default is a third: a forward pass of a step whose backward pass costs two. State the
            cost if `loss_fn` is expensive, for example 2.0 if it generates text: healcore then
            compares less often. It is stated and not measured, so that the run makes the same
            decisions on any machine. docs/evidence.md has what comparisons cost a healthy run.
        checkpoints: when to save checkpoints and how many to keep, see `healcore.Checkpoints`.
        logging: files for events and metrics, and console lines, see `healcore.Logging`.
        trackers: receive metrics and events: "wandb", "trackio" or "tensorboard", with a
            project, experiment or directory as "wandb:project"; or `healcore.Tracker` objects. A
            tracker that fails or hangs does not stop the run. See docs/reports.md.
        hooks: functions to call at incidents, saves and rollbacks, see `healcore.Hooks`.
        resume: "auto" resumes an interrupted run. If the run had completed, it loads the final
            state, `batches`, `epochs` and `steps` yield nothing, and the program continues after
            its loop, for example with an evaluation. True trains further in both cases. False
            raises StoreNotEmpty if the store holds checkpoints. A warning names hyperparameters
            that differ from the run's start. With "auto" a completed run raises StoreNotEmpty if
            these or the initial weights differ, or if this process has completed the run.
        attach: options of `healcore.torch.attach`.
        stop_file: path of a file that asks the run to end, or None. Every rank looks for the file
            once a second. All ranks end at the same step, with the last state saved and exit status
            0. The file is not removed, and no run starts while it exists.
        **overrides: policy values to replace, as in `clip={"max_norm": 1.0}`; see
            `healcore.policy.Overrides`. In JAX pass the same overrides to the optimizer.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        ValueError: another argument is out of range.
        healcore.errors.MissingExtraError: the library of a tracker is not installed.
    """

    def __init__(
        self,
        policy: PolicyLike = "default",
        *,
        state: State,
        store: Places = None,
        loss_fn: Callable[..., Any] | None = None,
        loss_fn_cost: float = FORWARD_PASS,
        checkpoints: Checkpoints = CHECKPOINTS,
        logging: Logging = LOGGING,
        trackers: TrackersLike = (),
        hooks: Hooks = NO_HOOKS,
        resume: bool | Literal["auto"] = "auto",
        attach: AttachOptions | None = None,
        stop_file: str | os.PathLike[str] | None = None,
        **overrides: Unpack[Overrides],
    ) -> None:
        self._options = Options(
            policy=HostPolicy.of(policy, overrides, trainer_limit(state)),
            state=state,
            store=checked_places(store),
            loss_fn=loss_fn,
            loss_fn_cost=loss_fn_cost,
            checkpoints=checkpoints,
            logging=logging,
            trackers=select(trackers),
            hooks=hooks,
            resume=resume,
            attach=dict(attach or {}),
            stop_file=stop_file,
        )
        self._begun_run: Run | None = None

    # -- the block ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Attaches to the optimizers, then resumes an earlier run or takes the first snapshot.

        After a restart the state is the state of the newest intact checkpoint, with its random
        states, and the loops continue after it.

        Returns:
            The Healer itself.

        Raises:
            HealerError: this Healer was opened before.
            EndRequested: the stop file exists; status 0.
            StoreNotEmpty: the store holds a run that `resume` does not permit to continue.
            NoGoodCheckpoint: the store holds checkpoints, and none of them is usable.
            StateMismatch: the checkpoints are of another state.
            StoreError: the store cannot be used.
        """
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Saves the last state, waits for pending checkpoints, writes the postmortem, detaches.

        The last state is the state at the end of the block, with what the program has changed after
        its loop, such as best weights. If an earlier process has completed the run, its last state
        is loaded once more: the code after the loop had its effect there.

        An exception that has left the block is classified, and propagates after the end of the
        run, unless one of the exceptions below replaces it.

        Args:
            kind: type of the exception that has left the block, or None.
            error: the exception, or None.
            trace: its traceback, or None.

        Raises:
            LastStateNotSaved: the loop has ended, and no checkpoint holds its state; status 1.
            IncompleteRun: the loop has ended, and the Healer has seen no step, or the loop called
                neither `batches` nor `after_step`; status 1.
            RunStopped: more than half of the steps, or of their batches, were skipped.
        """
        self._end(error)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the run as leaving its block does. A second call does nothing.

            healer = healcore.start(state=state, store="checkpoints")
            train(healer)
            healer.close()  # the run is complete, also if its loop was left by `break`

        Saves the state that is there at the call.

        Use it for a Healer of `healcore.start`. Within a block, the end of the block calls it.

        Args:
            error: the exception that ends the run, or None if the run is complete.

        Raises:
            LastStateNotSaved, IncompleteRun, RunStopped: as at the end of a block.
        """
        if self.is_open:
            self._end(error, by="close")

    def _open(self) -> None:
        """Begins the run without a block, for `healcore.start` and for trainers."""
        if self._begun_run is not None:
            raise HealerError("a Healer is opened once: create another one")
        try:
            self._begun_run = open_run(self._options)
        except HealcoreError as error:  # the message says what to do, without frames of healcore
            raise error.with_traceback(None)  # noqa: B904 -- the same error

    def _end(self, error: BaseException | None, by: EndedBy = "block") -> None:
        """Ends the run."""
        run = self._live
        if os.getpid() != run.pid:  # a forked child must not end its parent's run
            run.end = RunEnd(Ending.EXCEPTION, error)
            return
        run.end = end_run(run, error, by=by)
        if run.end.error is not None and run.end.error is not error:
            raise run.end.error

    def _until_end(self, loop: Iterator[Item]) -> Iterator[Item]:
        """What a loop yields. A Healer without a block acts at the end of the loop."""
        return loop

    @property
    def is_open(self) -> bool:
        """Whether the run has begun and not ended: most methods work only then."""
        return self._begun_run is not None and self._begun_run.end is None

    @property
    def store(self) -> Places:
        """The `store` argument: a path, a store, None for host memory only, or a tuple of paths.

        A list that was passed is a tuple here.
        """
        return self._options.store

    # -- the loop, in torch and in JAX ----------------------------------------------------------

    def batches(
        self,
        loader: Loader[Batch] | Callable[[], Loader[Batch]],
        *,
        epochs: int | None = 1,
        epoch: int | None = None,
        name: str = "",
    ) -> Batches[Batch]:
        """An iterator over the loader's batches that does the work between two steps.

            for batch in healer.batches(loader):
                healer.loss(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

        Within `for epoch in healer.epochs(n)`, call `batches(loader, epoch=epoch)` once per epoch.

        Args:
            loader: any iterable of batches, or a function without arguments that makes one for
                each epoch.
            epochs: passes over the loader, or None for no end.
            epoch: number of the epoch in the program's own loop, or None if the loop begins at
                epoch 0 again after a restart. One epoch is read.
            name: name of the loader's position in the data. Two loaders that are in use at the same
                time need two names; loaders that are read one after another need none.

        Returns:
            An iterator. Its `len` counts the batches of all passes, also after a restart. Its
            `with_state()` yields pairs of batch and state, for a loop in JAX.

        Raises:
            ValueError: `epochs` is not a whole number >= 1.
            DataError: from the first `next`; the loader cannot be iterated over, an iterator is
                asked for several epochs, or another loader of the same name is in use.
            RunStopped: the policy ends the run.
            Terminated: SIGTERM was received; the current step is finished and the run saved.
            EndRequested: the stop file exists; the current step is finished and the run saved.

        Rewinding:
            After a rollback a loader that can be rewound (lists, torch's `DataLoader`, `state_dict`
            and `load_state_dict`, `get_state` and `set_state`) continues from the checkpoint and
            skips the bad batches. Any other loader continues at its current position. A generator,
            a `zip` or another stream can be rewound if you pass a function that makes it:

                for batch in healer.batches(lambda: zip(images, texts)):
                    ...

            After a rollback and after a restart the function is called again, and what it returns
            is moved to the position, by its `load_state_dict` or by dropping batches. The function
            must make the same stream at each call. If the order changes from epoch to epoch, the
            function can take it from `healer.epoch`.

        Ending early:
            After a `break` before the last batch, the next start trains the remaining batches. With
            `epochs=None`, or a loader without a length, a `break` completes the run.
        """
        if epochs is not None and (type(epochs) is not int or epochs < 1):
            raise ValueError(f"epochs is a whole number >= 1, or None for no end, not {epochs!r}")
        batches = loop_over_batches(self._live, loader, epochs, epoch, name=name)
        return Batches(self, self._until_end(batches), loader, epochs)

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the epochs, after a restart from the epoch that was interrupted.

            for epoch in healer.epochs(4):  # after a kill in epoch 2: 2, 3
                train_one_epoch(model, healer.batches(loader, epoch=epoch))

        A rollback into an earlier epoch yields the number of this epoch again. Check
        `will_repeat_epoch` before you evaluate after the batches of an epoch.
        An epoch may be one step without `batches`, as in full-batch training.
        Code after an epoch runs again, unless a step of the next epoch was saved. If that code
        changes the state, as a scheduler's step does, call `save` before it.

        Args:
            total: number of epochs of the whole run, including earlier processes.

        Returns:
            An iterator over epoch numbers below `total`, from 0 in a new run. It yields nothing if
            an earlier process has completed the run.

        Raises:
            HealerError: the call is outside the Healer's block.
            RunStopped, Terminated, EndRequested: as in `batches`, if an epoch is one step.
        """
        return self._until_end(loop_over_epochs(self._live, total))

    def steps(self, total: int) -> Iterator[int]:
        """Yields the numbers of the steps, and does the work between two steps.

            for step in healer.steps(300):  # after a restart: from the step that is resumed
                loss = healer.loss(next(data))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        For loops that read their own batches. After a rollback the numbers continue from the
        checkpoint. The Healer does not rewind `data`: a new process begins with its first batch.
        An iteration without an optimizer step, which only fills a replay buffer, gets the same
        number again.

        Args:
            total: number of optimizer steps of the whole run, including earlier processes.

        Returns:
            An iterator over step numbers below `total`. It yields nothing if an earlier process has
            completed the run.

        Raises:
            IncompleteRun: no step in as many iterations in a row as `total`, and at least 1,000;
                after the first step in 1,000 iterations; a SystemExit of status 1.
            RunStopped, Terminated, EndRequested: as in `batches`.
        """
        return self._until_end(loop_over_steps(self._live, total))

    def after_step(self, *, last: bool = False) -> bool:
        """Does the work between two steps in a loop without `batches`.

            while healer.step < 1000 or healer.after_step(last=True):
                healer.loss(next(data)).backward()
                optimizer.step()
                optimizer.zero_grad()
                healer.after_step()

        Args:
            last: whether the loop would end after this step. The Healer then reads all pending
                steps and saves nothing, because the end of the block saves.

        Returns:
            Whether the run was rolled back. Then `step` has changed, in JAX also `state`, and the
            loop has to continue, even after the last step.

        Raises:
            HealerError: the call is outside the Healer's block.
            RunStopped, Terminated, EndRequested: as in `batches`.
        """
        return self._live.loop.after_step(last=last) is not None

    def microbatches(
        self, batch: Batch, *, count: Callable[[Batch], SupportsFloat] | str | None = None
    ) -> Iterator[Microbatch[Batch]]:
        """Yields the batch in parts that fit into memory; usually in one part.

            for part in healer.microbatches(batch):
                with part:
                    loss = loss_fn(model, part.batch)
                    (loss * part.weight).backward()

        If a part runs out of memory and the policy's rule for `oom` has `shrink_microbatch`, the
        Healer frees the part's memory and drops gradients and observed losses since the last
        optimizer step. Then it yields all batches since this step again, in parts of half the size.
        The sum of the parts' gradients is the gradient of the whole batch. 100 steps later a step
        tries parts of twice the size, and keeps this size if they fit. After a transient
        failure in the network, a run of one rank waits as `retrying` does, and repeats the step.

        Args:
            batch: an array or a structure of arrays, split along their first axis, or a list of
                samples; see `healcore.runtime.faults.microbatches`.
            count: what the loss averages over, which weights the parts: the key of an entry whose
                elements count unless they are -100, a function that returns the count of a part,
                or None for samples. Used only if a batch is split.

        Returns:
            An iterator over the parts. Each is a context manager, with its samples as `batch` and
            its share of the loss as `weight`, which is 1 for a whole batch.

        Raises:
            RunStopped: a single sample does not fit, or `budget.shrinks` is exhausted.
            MicrobatchError: the loop does not enter each part with `with part:`.
        """
        return self._live.out_of_memory.parts(batch, count=count)

    def expect_change(self) -> None:
        """Announces that the next step differs on purpose (LR, batch size, data, loss, weights).

            healer.expect_change()
            optimizer.param_groups[0]["lr"] = 1e-4

        Without the call a jump of the loss may be taken for damage. The Healer drops the earlier
        weights that it compares with. Call it on every rank, between two steps.

        Raises:
            HealerError: the call is outside the Healer's block.
        """
        self._live.loop.expect_change()

    def save(self) -> None:
        """Saves a checkpoint now, in addition to the regular checkpoints.

        Call it only between two steps: in torch a restart loses the batches of an accumulation.
        With several ranks, call it on every rank. It does nothing if a rollback is about to return
        to an earlier epoch of `epochs`. A checkpoint that cannot be written is reported, and the
        run continues.

        Raises:
            HealerError: the call is outside the Healer's block.
        """
        self._live.loop.save()

    # -- the loop, in torch only ----------------------------------------------------------------

    def loss(self, batch: object, optimizer: str | None = None) -> Any:
        """torch: calls `loss_fn` on one (micro-)batch, and observes the loss.

            loss = healer.loss(batch)
            loss, logits = healer.loss(batch)  # of a loss_fn that returns both

        Args:
            batch: the batch.
            optimizer: as for `observe`.

        Returns:
            What `loss_fn` has returned: the loss for `backward`, or a tuple or mapping with it.

        Raises:
            HealerError: the Healer has no `loss_fn`, or its state is of JAX; or as `observe`.
        """
        return self._live.loop.loss(batch, optimizer)

    def observe(
        self,
        loss: SupportsFloat | None = None,
        optimizer: str | None = None,
        *,
        batch: object = None,
        eval_loss: SupportsFloat | None = None,
    ) -> None:
        """torch: reports the loss of one (micro-)batch, see `healcore.torch.Healing.observe`.

        Within `microbatches` the loss has the weight of the current part.

        Args:
            loss: one number, or a tensor with one element.
            optimizer: the optimizer's name in the state, or None for all optimizers.
            batch: the batch, if `loss` is the result of `loss_fn` for it. Saves another call.
            eval_loss: the loss of an evaluation. In JAX it is shown in the metrics only: pass it to
                `tx.update` for the policy.

        Raises:
            HealerError: a `loss` is reported in JAX, where it is `value=loss` of `tx.update`; or
                the call is outside the Healer's block.
        """
        self._live.loop.observe(loss, optimizer, batch=batch, eval_loss=eval_loss)

    # -- the loop, in JAX only ------------------------------------------------------------------

    def update(self, state: State | None = None, *, batch: object = None) -> State:
        """JAX: takes the state after a step and does the work between two steps.

        The step may donate the state. A loop without `batches` does not have to call `after_step`.

        Args:
            state: result of the step, or None for nnx objects, which change in place. Its structure
                may change if the optimizer's state changes with its parameters.
            batch: the step's batch for `loss_fn`, in a loop without `batches`.

        Returns:
            State to start the next step from: another one after a rollback or `expect_change`.

        Raises:
            HealerError: the Healer is of torch, or the call is outside the Healer's block.
            HealStateError: `state` has another structure, shape or dtype, or was computed from a
                state before the last rollback or `expect_change`.
            RunStopped, Terminated, EndRequested: as in `batches`.
        """
        return self._live.loop.update(state, batch)

    def scan(
        self,
        update: Callable[[State, Any], tuple[State, Any]],
        state: State,
        steps: int,
        *,
        every: int,
        donate: bool = False,
    ) -> tuple[State, Any]:
        """JAX: runs a loop that is compiled as a whole, in blocks, and works between the blocks.

            # state, losses = jax.lax.scan(update, state, jnp.arange(1000))
            with healcore.Healer(state=state, store="run") as healer:
                state, losses = healer.scan(update, state, 1000, every=50)

        Each block is one compiled program of `every` updates, in which `protect` judges every step
        on the device. Between two blocks the Healer reads the records of all their steps, saves,
        compares, and rolls back. A rollback restores the state at the start of a block, with its
        random keys and environments, and repeats the updates with the same bits, unless it limits
        the learning rate. No update is skipped. A restart continues with the block after its
        checkpoint, and ends with the bits of a run that was not killed, if `every` is the same.

        A `loss_fn(state, number)` of the Healer gets the number of the block's last update, and has
        to make its batch from this number, for example with `jax.random.fold_in(key, number)`.
        Weights are compared on the batches of different numbers.

        Args:
            update: a function as for `jax.lax.scan`: `(state, step) -> (state, outputs)`, where
                `step` is the number of the update, int32 0-d. It may take any number of optimizer
                steps, at most `records` of `protect`. Call no `healer.update` in it.
            state: the state to begin with, as the Healer was opened with, or what an earlier `scan`
                has returned. After a restart the saved state replaces it.
            steps: number of updates.
            every: number of updates in a block. If it divides `steps`, one program is compiled,
                otherwise another one for the shorter last block.
            donate: whether each block reuses the memory of the state that it begins with, for a
                state that does not fit into the device's memory twice, such as a large replay
                buffer. You cannot read `state` afterwards.

        Returns:
            The last state, and the outputs of all updates of this process, stacked along a new
            first axis. After a restart they begin with the update that was resumed, and a completed
            run yields none.

        Raises:
            ValueError: `steps` or `every` is not a whole number >= 1.
            HealerError: the Healer is of torch, or its state consists of nnx objects.
            HealStateError: as `update`; or an update takes more steps than `protect` has records.
            RunStopped, Terminated, EndRequested: as in `batches`.
        """
        return loop_over_blocks(self._live, update, state, ScanBlocks(steps, every), donate=donate)

    # -- the state and the run, in torch and in JAX ---------------------------------------------

    @property
    def state(self) -> State:
        """The live state, also after the block. In JAX the next step has to start from it.

        In torch these are the objects that were passed as `state`, which change in place.
        """
        return self._run.driver.live

    @property
    def step(self) -> int:
        """Number of steps done. The first reading after a restart restores random states.

        In JAX it is the number of updates. The steps of earlier processes count. In torch, several
        calls of `optimizer.step()` for one batch of `batches` are one step. A rollback decreases
        the number.

        The first reading after a restart sets the random states of the checkpoint, so that a loop
        that draws its own batches draws the batches of the run that was interrupted. So read the
        number before you draw, as in `while healer.step < 1000`. All readings after the first batch
        or step only return the number.
        """
        return self._run.loop.next_step()

    @property
    def epoch(self) -> int:
        """Epoch of the batch that the loop uses, or of the next batch between two batches.

        A rollback into an earlier epoch decreases it, and a restart continues from it. In a loop
        over `epochs` it is the number that the loop has.

            for batch in healer.batches(loader, epochs=10):
                temperature = 0.9**healer.epoch
        """
        return self._run.loaders.place.epoch

    @property
    def batch_index(self) -> int:
        """Index within the epoch, from 0, of the batch that the loop uses.

        Between two batches it is the index of the next batch.
        """
        return self._run.loaders.place.index

    @property
    def will_repeat_epoch(self) -> bool:
        """Whether a rollback has ended the pass over the batches before its last batch.

        `epochs` then yields the same epoch again, or an earlier one. The weights are the restored
        weights until then, so an evaluation would get the number of the wrong epoch.

            for epoch in healer.epochs(10):
                for batch in healer.batches(loader, epoch=epoch):
                    ...
                if not healer.will_repeat_epoch:
                    evaluate(model, epoch)
        """
        return self._run.loop.returns_to_epoch

    @property
    def rollbacks(self) -> int:
        """Number of rollbacks so far, including earlier processes of the run.

        A loop that keeps state of its own can compare it with an earlier value.
        """
        return len(self._run.ledger.rollbacks)

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the newest step that was read, and counts. Does not sync the device.

            wandb.log(healer.metrics())

        Returns:
            Name -> value. Of the newest step: `heal/loss`, `heal/threshold`, `heal/grad_scale`,
            `heal/lr_scale`. Counts since the run began: `heal/clips` (unless each tensor is clipped
            by itself), `heal/skips`, `heal/lr_cuts`, `heal/rollbacks`, `heal/alarms`,
            `heal/incidents`, and `heal/scaler_skips` once a loss scale has left out a step. With
            several optimizers the names are `heal/<name>/loss` and so on. Empty until the first
            step is read.
        """
        return self._run.metrics.values()

    def report(self, *, memory: bool = False) -> HealingReport:
        """Returns a summary of the run so far, or of the whole run after the block.

            print(healer.report())

        It waits for the device, so call it at the end, and `metrics` at each step.

        Args:
            memory: whether to write a memory profile next to the events, as after an out-of-memory
                error, and to say what holds most of the memory now.
        """
        return HealingReport.of(self._run, memory=memory)

    @property
    def _run(self) -> Run:
        """The run, also after the block. Raises HealerError before it."""
        if self._begun_run is None:
            raise HealerError("use the Healer inside its block: `with Healer(...) as healer:`")
        return self._begun_run

    @property
    def _live(self) -> Run:
        """The run, within the block only. Raises HealerError outside of it."""
        run = self._begun_run
        if run is None:
            return self._run
        if run.end is not None:
            raise HealerError("the `with` block of this Healer has ended: create another Healer")
        return run
