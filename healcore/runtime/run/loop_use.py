"""`LoopUse`: how the program uses its loop, which decides whether its end is the end of the run."""

from __future__ import annotations

from healcore.runtime.data.loader_registry import LoaderRegistry


class LoopUse:
    """What is known of the program's loop: whether it has begun, is in its body, or has ended.

    `Loop` and the loops of the program write these facts, and `Shutdown` reads them: a program that
    leaves its loop early has not completed the run, and a program whose loop never called the
    Healer could not be healed.

    Args:
        loaders: the loaders of the program.
        has_trainer: whether a trainer owns the loop, so that an early end is not a `break`.

    Attributes:
        was_used: whether the program has called `batches`, `after_step` or `update` in this
            process. A loop that takes steps without them ends with an error, because nothing could
            be saved or rolled back between its steps.
        reached_end: whether any loop over `epochs`, `steps` or `scan` of this process has come to
            its end. It stays True if the program begins another loop.
        in_body: whether the body of a loop of the program runs, or was left before its end.
            Loops may be nested; it is False again after the body of the outermost loop.
        yielded_step: index of the step that a loop over `steps` has yielded and whose body runs, or
            None outside of such a body.
        step_is_epoch: whether each epoch of a loop over `epochs` is one step without `batches`.
        is_trial: whether a trainer begins again with a smaller batch if memory runs out. The run
            then ends without a trace: it has taken no step.
        own_count_obstacle: reason why a loop that counts its steps itself cannot continue, because
            a checkpoint has replaced its snapshot, or an empty string.
    """

    def __init__(self, loaders: LoaderRegistry, *, has_trainer: bool) -> None:
        self._loaders = loaders
        self._has_trainer = has_trainer
        self.was_used = False
        self.reached_end = False
        self.in_body = False
        self.yielded_step: int | None = None
        self.step_is_epoch = False
        self.is_trial = False
        self.own_count_obstacle = ""

    @property
    def left_early(self) -> bool:
        """Whether the program has left its loop in the body, before the last batch or step.

        A `break` after the last batch of a training loader is not early: nothing was left to read.
        """
        loader = self._loaders.last_trained
        if loader is not None and loader.in_loop and loader.at_end:
            return False
        return self.in_body

    @property
    def break_place(self) -> str:
        """Place at which a `break` has left the loop before its last epoch ended, or ""."""
        loader = self._loaders.last_trained
        if self._has_trainer or loader is None or not loader.in_loop:
            return ""
        return loader.break_place
