"""One of four ranks that train one model, in each of `CASES`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from healcore import Healer
from healcore.core.detectors import OverfitConfig
from healcore.core.engine import Engine, EngineConfig
from healcore.errors import RanksDisagreeError
from healcore.runtime.run.engine_states import limit_norms
from healcore.torch import attach
from healcore.torch.driver import TorchDriver
from tests.torch import policies
from tests.torch.forked_ranks import folder, serve
from tests.torch.layouts import digest, held, part, shard, spread, whole
from tests.torch.optimizer_cases import HOST_AND_DEVICE

WORLD, ROWS = 4, 4
LATE_STEPS = 35
LATE_FAULTS = (4, 17, 30)
STEPS = {"alone": 120, "DDP": 120, "DDP, device": 90, "FSDP2": 120, "HSDP": 90}
NAN = float("nan")
SECONDS = 400

BAD_BATCH, SPIKE, ONE_FINITE, BAD_PART = 40, 55, 70, 85
FAULTS = {BAD_BATCH, SPIKE, ONE_FINITE, BAD_PART}


class Collectives(TorchDispatchMode):
    """The bytes of everything that goes through a process group, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what the DTensor does
        name = str(func)
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.nbytes.append(sum(tensor.nbytes for tensor in tensors))
        return func(*args, **(kwargs or {}))


def taken(net: nn.Module, optimizer: Optimizer, scaler: Any = None) -> tuple[bool, list[int]]:
    """Takes a step; whether it changed nothing, and the bytes of its collectives."""
    before = digest(held(net, optimizer))
    with Collectives() as counted:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    optimizer.zero_grad()
    return digest(held(net, optimizer)) == before, counted.nbytes


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


# -- many steps with faults ------------------------------------------------------------------------


def trained(kind: str) -> dict[str, Any]:
    """One run on the same global batches; "alone" takes all rows of them in one process."""
    rank = dist.get_rank()
    if kind == "alone" and rank > 0:
        return {}
    net = small_net()
    model, _ = spread(kind, net)
    optimizer = AdamW(net.parameters(), lr=1e-2, fused=True)
    group, where = (None if kind == "alone" else "auto"), ("device" if "device" in kind else "auto")
    heal = attach(optimizer, policies.OF_RANKS, process_group=group, engine=where)  # type: ignore[arg-type]
    mine = range(WORLD) if kind == "alone" else [rank]
    records, unmoved, added = [], [], []
    for i in range(STEPS[kind]):
        x = torch.randn(WORLD, ROWS, 4, generator=torch.Generator().manual_seed(i))
        noise = torch.randn(WORLD, ROWS, 1, generator=torch.Generator().manual_seed(9000 + i))
        losses, seen = [], []
        for r in mine:
            loss = (model(x[r]) - x[r].sum(1, keepdim=True) - noise[r]).square().mean()
            losses.append(loss * (NAN if (i, r) == (BAD_BATCH, 1) else 1.0))
            factor = 1e4 if (i, r) == (SPIKE, 2) else NAN if i == ONE_FINITE and r > 0 else 1.0
            seen.append(losses[-1].detach() * factor)
        heal.observe(torch.stack(seen).mean())
        torch.stack(losses).mean().backward()
        if i == BAD_PART and 3 in mine:
            grads = (part(p.grad) for p in net.parameters() if p.grad is not None)
            next(grad for grad in grads if grad.numel()).view(-1)[0] = NAN
        same, nbytes = taken(net, optimizer)
        unmoved += [i] * same
        added += [nbytes] * (nbytes not in added)
        n = heal.live_engine.pending_record()()
        decided = n.step, int(n.cause), int(n.action), bool(n.why)
        records.append([*decided, n.lr_scale, n.grad_scale, n.loss, n.grad_norm])
    return {
        "records": records,
        "unmoved": unmoved,
        "added": added,
        "weights": digest(map(whole, held(net, optimizer))),
        "part": digest(held(net, optimizer)),
        "ranks": heal.healed_step.all_reduce.ranks.world,
    }


# -- what is judged, for each way to spread a model -----------------------------------------------

LAYOUTS = (
    "DDP", "FSDP2", "HSDP", "tensor parallel", "sequence parallel", "FSDP2 and tensor parallel",
)  # fmt: skip


class Loop:
    """Steps of a layout with AdamW. Without a policy nothing is attached."""

    def __init__(self, kind: str, policy: Engine | None, *, scaler: Any = None, **options: Any):
        torch.manual_seed(0)
        net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.net = net
        (self.model, self.data) = spread(kind, net)
        self.optimizer = AdamW(net.parameters(), lr=1e-2, fused=options.pop("fused", False))
        self.scaler = scaler
        self.heal: Any = policy and attach(self.optimizer, policy, scaler=scaler, **options)

    def loss(self, i: int) -> Tensor:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * i + self.data))
        found: Any = self.model(x)
        if isinstance(found, DTensor):
            x = DTensor.from_local(x, found.device_mesh, [Replicate()])
        return (found - x).square().mean()

    def step(
        self, i: int, *, factor: float = 1.0, broken: tuple[int, ...] = (), value: float = NAN
    ) -> tuple[bool, list[int], float]:
        """A step, with `value` in the gradients of the `broken` ranks.

        Returns whether it changed nothing, the bytes of its collectives, and the gradients' norm.
        """
        loss = self.loss(i) * factor
        if self.heal is not None:
            self.heal.observe(loss)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        for grad in grads if dist.get_rank() in broken else ():
            part(grad).view(-1)[:1] = value
        norm = torch.stack([whole(grad).norm() for grad in grads]).norm()
        return *taken(self.net, self.optimizer, self.scaler), float(norm)

    def weights(self) -> str:
        return digest(map(whole, self.net.parameters()))

    def metric(self, name: str) -> float:
        return float(self.heal.metrics()[f"heal/{name}"])


def judged(kind: str) -> dict[str, Any]:
    """The judged norm, the whole gradients' norm, and the bytes that healing adds to a step."""
    plain, healed = Loop(kind, None), Loop(kind, policies.SKIPS)
    for i in range(2):
        (_, alone, _), (_, added, norm) = plain.step(i), healed.step(i)
    world = healed.heal.healed_step.all_reduce.ranks.world
    return {"norms": [healed.metric("grad_norm"), norm], "ranks": world,
            "calls": [alone, added], "same": plain.weights() == healed.weights()}  # fmt: skip


def fused(where: str) -> dict[str, Any]:
    """A NaN in one rank's part of a sharded gradient, and per-tensor clipping, in a fused step."""
    outcome: dict[str, Any] = {}
    for name, policy in (("skips", policies.SKIPS), ("per tensor", policies.ADAGC)):
        loop = Loop("HSDP", policy, fused=True, engine=where)
        for i in range(5):
            broken = (1,) if i == 3 else ()
            exact, added, _ = loop.step(i, factor=1e3 if i == 4 else 1.0, broken=broken)
            if i == 3:
                outcome[name] = [loop.metric("skips"), exact]
        outcome[name] += [added, loop.weights()]
    return outcome


def scaled(kind: str) -> dict[str, Any]:
    """A GradScaler that finds an overflow in one of two parts, and skips the step by itself."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = Loop("HSDP", policies.SKIPS, fused=kind == "fused", scaler=scaler)
    broken = [(1, 3) if i == 3 else () for i in range(5)]  # copies, as after the reduction
    exact = [loop.step(i, broken=b, value=float("inf"))[0] for i, b in enumerate(broken)]
    return {"skipped": exact, "scale": scaler.get_scale(), "skips": loop.metric("skips"),
            "weights": loop.weights()}  # fmt: skip


def limited(where: str) -> dict[str, Any]:
    """A limit of the norm of sharded gradients, in force from the third step on."""
    loop = Loop("HSDP", policies.CUTS, fused=True, engine=where)
    limit = 0.125
    scales = []
    for i in range(5):
        if i == 2:
            states = {"optimizer": loop.heal.state_dict()}
            states = limit_norms(policies.CUTS, states, {"optimizer": limit})
            loop.heal.load_state_dict(states["optimizer"])
        norm = loop.step(i, factor=4096.0 if i == 3 else 1.0)[2]
        scales.append([loop.metric("grad_scale"), min(1.0, limit / norm) if i >= 2 else 1.0])
    return {"scales": scales, "weights": loop.weights()}


def late(where: str) -> dict[str, Any]:
    """A policy whose steps a device engine judges later; one rank alone reads the state early."""
    net = small_net()
    optimizer = AdamW(net.parameters(), lr=1e-2, fused=True)
    heal = attach(optimizer, "default", engine=where, clip={"max_norm": 0.5})  # type: ignore[arg-type]
    for i in range(LATE_STEPS):
        draw = torch.Generator().manual_seed(i)
        bad = i in LATE_FAULTS and dist.get_rank() == 2
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=draw) * (NAN if bad else 1.0)
        heal.observe(torch.tensor(2.0 + dist.get_rank()))
        optimizer.step()
        if i % 3 == 0 and dist.get_rank() == 1:
            heal.metrics()
    return {
        "late": heal.live_engine.judges_late,
        "metrics": {name: float(value) for name, value in heal.metrics().items()},
        "state": heal.state_dict(),
        "weights": digest(held(net, optimizer)),
    }


def pipeline(kind: str) -> dict[str, Any]:
    """Stages of a pipeline: four, or two of two sharded ranks; the last one has the loss."""
    torch.manual_seed(0)
    stages = 4 if kind == "four stages" else 2
    mesh = init_device_mesh("cpu", (stages, WORLD // stages), mesh_dim_names=("pp", "dp"))
    index = mesh["pp"].get_local_rank()
    net = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(stages)][index]
    options: dict[str, Any] = {"pp_mesh": mesh["pp"]} if stages == WORLD else {}
    if not options:
        shard(net, mesh["dp"])
    stage = PipelineStage(net, index, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = SGD(net.parameters(), lr=1e-2)
    heal = attach(optimizer, policies.SKIPS, **options)
    outcome: dict[str, Any] = {}
    for i in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(i))
        losses: list[Tensor] = []
        given = (x,) if index == 0 else ()
        if index == stages - 1:
            schedule.step(*given, target=x, losses=losses)
            heal.observe(torch.stack(losses).mean())
        else:
            schedule.step(*given)
        square = sum((part(p.grad).square().sum() for p in net.parameters()), torch.zeros(()))
        dist.all_reduce(square)
        if i == 2 and dist.get_rank() == 0:
            for p in net.parameters():
                part(p.grad).view(-1)[0] = NAN
        unmoved, added = taken(net, optimizer)
        if i == 1:
            outcome["norms"] = [float(heal.metrics()["heal/grad_norm"]), float(square.sqrt())]
            outcome["loss"] = float(heal.live_engine.pending_record()().loss)
            outcome["observed"] = float(torch.stack(losses).mean()) if losses else None
    skips = float(heal.metrics()["heal/skips"])
    return {**outcome, "added": added, "skips": skips, "unmoved": unmoved}


PARTLY = ("a loss", "a gradient", "an evaluation")


def partly(what: str) -> dict[str, Any]:
    """Ranks 2 and 3 lack a loss or a gradient, or the other ranks lack an evaluation."""
    net = small_net()
    rank = dist.get_rank()
    optimizer = SGD(net.parameters(), lr=1e-3)
    overfit = ("overfit", OverfitConfig(max_gap=4.0, patience=1))
    heal = attach(optimizer, Engine(EngineConfig(detectors=(overfit,))))
    lacks = rank >= 2
    loss = 1.0 + rank
    if not (lacks and what == "a loss"):
        heal.observe(loss)
    if what == "an evaluation" and lacks:
        heal.observe_eval(6.0 + rank)
    for p in net.parameters():
        p.grad = None if lacks and what == "a gradient" else torch.full_like(p, loss)
    own = sum((p.grad.square().sum().item() for p in net.parameters() if p.grad is not None), 0.0)
    optimizer.step()
    metrics = {name: float(value) for name, value in heal.metrics().items()}
    return {"metrics": metrics, "loss": loss, "square": own}


def alone(where: str) -> dict[str, Any]:
    """Each rank trains a model of its own, into a store of its own; rank 1 has a NaN."""
    net = small_net()
    rank = dist.get_rank()
    state = {"model": net, "optimizer": SGD(net.parameters(), lr=0.01)}
    store = folder() / f"alone-{rank}" if where == "disk" else None
    with Healer(state=state, store=store, attach={"process_group": None}) as healer:
        for number in healer.batches(range(6 + rank)):
            factor = NAN if (rank, number) == (1, 2) else 1.0
            loss = net(torch.ones(ROWS, 4)).square().mean() * factor
            healer.observe(loss)
            loss.backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
    return {"steps": healer.step, "skips": healer.report().counts["skips"]}


# -- earlier weights -------------------------------------------------------------------------------

EVALUATED = (
    *LAYOUTS[:4], LAYOUTS[5], "FSDP1", "FSDP2, bfloat16", "FSDP2, offloaded",
    "FSDP2, resharded to two", "DDP, unused parameters", "loss in parts",
)  # fmt: skip
KEPT = 3


def evaluated(kind: str) -> dict[str, Any]:
    """Runs with and without evaluations of the weights of step `KEPT` after each later step."""
    found: dict[str, Any] = {"again": []}
    for compares in (False, True):
        loop = Loop(kind, None)
        state = {"model": loop.model, "optimizer": loop.optimizer}
        driver = TorchDriver(state, policies.SKIPS)
        losses = []
        kept = None
        for i in range(8):
            if i == KEPT and compares:
                kept = driver.copy_weights()
            loss = loop.loss(i)
            losses.append(float(whole(loss)))
            driver.observe(loss)
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            driver.take_dispatch()
            if kept is not None:
                found["again"] += [driver.losses_of(loop.loss, [KEPT], kept) for _ in range(2)]
                driver.losses_of(loop.loss, [i])
        driver.close()
        found[f"compares: {compares}"] = [losses, digest(held(loop.net, loop.optimizer))]
    return found


# -- one rank that differs -------------------------------------------------------------------------

ODD, TAKEN = 12, 20
APART = (
    "NaN gradient", "clipped", "no gradient", "fresh state", "change expected", "no exchange",
)  # fmt: skip


def apart(what: str, where: str) -> dict[str, Any]:
    """Ranks that step with gradients of their own; rank 1 differs at step `ODD`."""
    net = small_net()
    model = DistributedDataParallel(net) if what == "change expected" else net
    optimizer = AdamW(net.parameters(), lr=1e-2, fused=True)
    policy = policies.fixed(0.01) if what == "clipped" else policies.LOSSES
    group = None if what == "no exchange" else "auto"
    heal = attach(optimizer, policy, engine=where, process_group=group)  # type: ignore[arg-type]
    if what == "fresh state" and dist.get_rank() == 1:
        get_optimizer_state_dict(net, optimizer)  # torch makes the state with a step
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    calls: list[int] = []
    for i in range(TAKEN):
        odd = what if i == ODD and dist.get_rank() == 1 else ""
        x = torch.randn(16, 4, generator=random)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if odd == "change expected":
            heal.expect_change()
        heal.observe(loss.detach() * (1e4 if odd == "change expected" else 1.0))
        (loss * (NAN if odd == "NaN gradient" else 1.0)).backward()
        if odd == "no gradient":
            optimizer.zero_grad()
        try:
            calls += taken(net, optimizer)[1]
        except RanksDisagreeError as error:
            return {"raised": f"{i}: {error}"}
    metrics = {name: float(value) for name, value in heal.metrics().items()}
    decided = [metrics["heal/skips"], metrics["heal/grad_scale"]]
    finite = all(bool(p.isfinite().all()) for p in net.parameters())
    return {"raised": "", "calls": calls, "decided": decided, "finite": finite}


KINDS: dict[Callable[..., dict[str, Any]], tuple[str, ...]] = {
    trained: tuple(STEPS),
    judged: LAYOUTS,
    fused: HOST_AND_DEVICE,
    scaled: ("fused", "not fused"),
    limited: HOST_AND_DEVICE,
    late: HOST_AND_DEVICE,
    pipeline: ("four stages", "two stages"),
    partly: PARTLY,
    alone: ("memory", "disk"),
    evaluated: EVALUATED,
}
CASES: dict[str, tuple[Any, ...]] = {
    **{f"{run.__name__}: {kind}": (run, kind) for run, kinds in KINDS.items() for kind in kinds},
    **{f"{what}, {where}": (apart, what, where) for what in APART for where in HOST_AND_DEVICE},
}


def outcome(case: str) -> dict[str, Any]:
    dist.barrier()
    run, *what = CASES[case]
    return run(*what)


if __name__ == "__main__":
    serve(outcome, seconds=SECONDS, cases=CASES)
