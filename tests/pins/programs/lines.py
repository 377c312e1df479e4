"""Small programs for the lines of the log: python -m tests.pins.programs.lines FOLDER NAME."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import healcore
from healcore import Action, Checkpoints, Healer, Hooks
from healcore import policy as policies
from healcore.errors import RunStopped, Terminated

POLICY = policies.load("default", rollback={"probation": 4}, incident={"quiet_steps": 3})
CUTS = policies.load(
    POLICY,
    rollback={"confirm": False},
    respond=[{"to": ["nonfinite"], "do": ["skip", "rollback", "cut_lr"]}],
    lr={"hold_steps": 3, "ramp_steps": 4},
)
STOPS = policies.load(POLICY, respond=[{"to": ["nonfinite"], "do": ["skip", "stop"]}])
SOON = policies.load(POLICY, retry={"base_delay_s": 0.01, "jitter": 0.0})
SLOW = policies.load("default", rollback={"probation": 10})


class Program:
    """A linear model on numbered batches."""

    def __init__(self, folder: Path, policy: Any = POLICY, **options: Any) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        given = {"store": folder / "store", "checkpoints": Checkpoints(every=5), **options}
        state = {"model": self.model, "optimizer": self.optimizer}
        self.healer = Healer(policy, state=state, **given)
        self.rate = 1e-2

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        make = torch.Generator().manual_seed(number)
        inputs = torch.randn(32, 4, generator=make)
        noise = torch.randn(32, 1, generator=make)
        return inputs, inputs.sum(1, keepdim=True).tanh() + 0.1 * noise

    def loss_of(self, number: int) -> torch.Tensor:
        inputs, targets = self.batch(number)
        return (self.model(inputs) - targets).square().mean()

    def step(self, number: int, *, bad: bool = False) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        loss = self.loss_of(number) * (float("nan") if bad else 1.0)
        self.healer.observe(loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def damage(self) -> None:
        with torch.no_grad():
            next(self.model.parameters()).fill_(float("nan"))

    def train(
        self,
        steps: int,
        *,
        bad: Callable[[int], bool] = lambda number: False,
        after: Callable[[int], object] = lambda number: None,
    ) -> None:
        """Trains.

        Args:
            steps: number of batches.
            bad: says of which batches the loss is NaN.
            after: called with the number of the batch after each step.
        """
        with self.healer as healer:
            for number in healer.batches(range(steps)):
                self.step(number, bad=bad(number))
                after(number)


def restart(folder: Path) -> None:
    """A run that SIGTERM has ended, and its next start."""

    def ask(number: int) -> None:
        if number == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with contextlib.suppress(Terminated):
        Program(folder).train(12, after=ask)
    Program(folder).train(12)


def exception(folder: Path) -> None:
    """A run that an exception has ended."""

    def fail(number: int) -> None:
        if number == 7:
            raise ValueError("wrong")

    with contextlib.suppress(ValueError):
        Program(folder).train(12, after=fail)


def bad_batch(folder: Path) -> None:
    """One batch with NaN."""
    Program(folder).train(24, bad=lambda number: number == 12)


def observed(folder: Path) -> None:
    """The same bad batch, with a policy that only observes."""
    Program(folder, mode="observe").train(24, bad=lambda number: number in range(8, 19))


def bad_weights(folder: Path) -> None:
    """Weights that become NaN once, between two steps."""
    program = Program(folder)
    left = [1]

    def damage(number: int) -> None:
        if number == 12 and left:
            left.pop()
            program.damage()

    program.train(40, after=damage)


def bad_weights_again(folder: Path) -> None:
    """Weights that become NaN at each repeat, until the batch is left out."""
    program = Program(folder)
    program.train(40, after=lambda number: program.damage() if number == 12 else None)


def cut(folder: Path) -> None:
    """A rule that rolls back and cuts the rate."""
    program = Program(folder, CUTS)
    bad = [12]

    def once(number: int) -> bool:
        return number in bad and bool(bad.pop())

    program.train(40, bad=once)


def hooked(folder: Path) -> None:
    """A hook that prevents a rollback, and another one that raises."""

    def prevent(incident: Any) -> Action:
        return Action(0)

    def fail(incident: Any) -> None:
        raise ValueError("a hook of the program")

    hooks = Hooks(on_incident=[prevent, fail])
    Program(folder, CUTS, hooks=hooks).train(24, bad=lambda number: number == 12)


def full_disk(folder: Path) -> None:
    """A disk that is full for the save of step 10."""

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(source: Any, to: Any, *args: Any, **options: Any) -> Any:
            if "step-0000000010" in str(to):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))
            return call(source, to, *args, **options)

        return changed

    os.rename, os.replace = failing(os.rename), failing(os.replace)
    Program(folder).train(24)


def flipped_bit(folder: Path) -> None:
    """A bit of the newest checkpoint that has changed between two starts."""

    def leave(number: int) -> None:
        if number == 12:
            raise KeyError

    with contextlib.suppress(KeyError):
        Program(folder).train(24, after=leave)
    newest = max((folder / "store").glob("step-*"))
    files = [path for path in newest.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-9] ^= 1
    largest.write_bytes(content)
    Program(folder).train(24)


def out_of_memory(folder: Path) -> None:
    """A batch of four samples of which two fit."""
    program = Program(folder)
    with program.healer as healer:
        for number in healer.batches(range(12)):
            for part in healer.microbatches(program.batch(number)):
                with part:
                    inputs, targets = part.batch
                    if number == 7 and len(inputs) > 16:
                        raise torch.OutOfMemoryError("CUDA out of memory")
                    loss = (program.model(inputs) - targets).square().mean()
                    healer.observe(loss)
                    (loss * part.weight).backward()
            program.optimizer.step()
            program.optimizer.zero_grad()


def lost_connection(folder: Path) -> None:
    """A call that fails once because of the network."""
    program = Program(folder, SOON)
    failures = [ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))]

    def upload() -> None:
        if failures:
            raise failures.pop()

    uploading = healcore.retrying(upload, program.healer)
    program.train(12, after=lambda number: uploading() if number == 7 else None)


def stopped(folder: Path) -> None:
    """A rule that stops the run."""
    with contextlib.suppress(RunStopped):
        Program(folder, STOPS).train(24, bad=lambda number: number == 12)


def unfinished_window(folder: Path) -> None:
    """A loop that ends within an accumulation."""
    program = Program(folder)
    with program.healer as healer:
        for number in healer.batches(range(11)):
            program.loss_of(number).backward()
            if number % 4 == 3:
                program.optimizer.step()
                program.optimizer.zero_grad()


def worse(folder: Path) -> None:
    """A learning rate that is 100 times too high for 50 steps, with a `loss_fn`."""
    program = Program(folder, SLOW, loss_fn=lambda number: program.loss_of(number))

    def set_rate(number: int) -> None:
        program.rate = 1.0 if number in range(74, 124) else 1e-2

    program.train(200, after=set_rate)


def kept_damage(folder: Path) -> None:
    """Weights that the program damages at each repeat, with a `loss_fn`."""
    program = Program(folder, SLOW, loss_fn=lambda number: program.loss_of(number))

    def damage(number: int) -> None:
        if number in range(74, 124):
            for weights in program.model.parameters():
                weights.data.add_(torch.randn_like(weights), alpha=0.3)

    program.train(200, after=damage)


def ranks(folder: Path) -> None:
    """Two ranks, of which one is asked to end."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = 1 - bool(os.fork())
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    program = Program(folder)
    parallel = torch.nn.parallel.DistributedDataParallel(program.model)

    def loss_of(number: int) -> torch.Tensor:
        inputs, targets = program.batch(number)
        return (parallel(inputs) - targets).square().mean()

    def ask(number: int) -> None:
        if number == 7 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    program.loss_of = loss_of
    with contextlib.suppress(Terminated):
        program.train(24, after=ask)
    if rank == 1:
        os._exit(0)
    os.wait()


PROGRAMS = {
    each.__name__: each
    for each in (
        restart,
        exception,
        bad_batch,
        observed,
        bad_weights,
        bad_weights_again,
        cut,
        hooked,
        full_disk,
        flipped_bit,
        out_of_memory,
        lost_connection,
        stopped,
        unfinished_window,
        worse,
        kept_damage,
        ranks,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[2]](Path(sys.argv[1]))
