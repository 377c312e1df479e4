"""Small nets that train well: healthy states for the optimizer probe.

    python -m tests.tools.probe.healthy_nets

prints the verdicts, how often a parameter is named when its second moments are multiplied, and how
often half of the blocks of a transformer fail when all their second moments are.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from healcore.tools.probe.result import ProbeResult
from tests.tools.probe.trained_networks import probe, saved

Batch = tuple[torch.Tensor, torch.Tensor]
STEPS = (60, 201)


class Case(NamedTuple):
    name: str
    net: Callable[[], nn.Module]
    batch: Callable[[], Batch]


class Transformer(nn.Module):
    def __init__(self, depth: int, *, norm_first: bool, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.place = nn.Parameter(0.02 * torch.randn(16, 32))
        layer = nn.TransformerEncoderLayer(
            32, 4, 128, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(16)
        hidden = self.blocks(self.embed(tokens) + self.place, mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.lstm = nn.LSTM(32, 32, 3, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def convolutions(depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in (3, *[16] * depth):
        layers += [nn.Conv2d(inputs, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def perceptron(depth: int, activation: Callable[[], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in (20, *[32] * depth):
        layers += [nn.Linear(inputs, 32), activation()]
    return nn.Sequential(*layers, nn.Linear(32, 10))


def sequences() -> Batch:
    """Arithmetic progressions, whose next number can be learnt."""
    start, pace = torch.randint(0, 50, (8, 1)), torch.randint(1, 5, (8, 1))
    tokens = (start + pace * torch.arange(17)) % 50
    return tokens[:, :-1], tokens[:, 1:]


def pictures() -> Batch:
    kinds = torch.randint(0, 10, (32,))
    patterns = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return patterns[kinds] + 0.7 * torch.randn(32, 3, 8, 8), kinds


def vectors() -> Batch:
    inputs = torch.randn(64, 20)
    matrix = torch.randn(20, 10, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs @ matrix).argmax(1)


CASES = [
    Case("transformer, 4 blocks", lambda: Transformer(4, norm_first=True), sequences),
    Case("transformer, 6, norm after", lambda: Transformer(6, norm_first=False), sequences),
    Case("transformer, 8, tied", lambda: Transformer(8, norm_first=True, tied=True), sequences),
    Case("convolutions, 7, batch norm", lambda: convolutions(6), pictures),
    Case("perceptron, 5, relu", lambda: perceptron(4, nn.ReLU), vectors),
    Case("perceptron, 9, tanh", lambda: perceptron(8, nn.Tanh), vectors),
    Case("perceptron, 6, sigmoid", lambda: perceptron(5, nn.Sigmoid), vectors),
    Case("LSTM, 3", Recurrent, sequences),
]


def trainings(
    case: Case, lr: float, seed: int
) -> Iterator[tuple[int, nn.Module, torch.optim.Optimizer]]:
    """The net and its optimizer after some steps, the same objects each time."""
    torch.manual_seed(seed)
    net = case.net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    for step in range(1, max(STEPS) + 1):
        inputs, targets = case.batch()
        outputs = net(inputs)
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in STEPS:
            yield step, net, optimizer


def named_when_multiplied(
    folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, factor: float
) -> tuple[int, int]:
    """Multiplies every seventh parameter by a factor; returns how many are reported as outliers."""
    hits = tries = 0
    for name, parameter in list(net.named_parameters())[::7]:
        second = optimizer.state[parameter]["exp_avg_sq"]
        kept = second.clone()
        second.mul_(factor)
        top = probe(saved(folder, net, optimizer)).facts["top"]
        hits += any(each["parameter"] == name and each["outlier"] for each in top)
        tries += 1
        second.copy_(kept)
    return hits, tries


def verdict_of_half(
    folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, factor: float, named: bool
) -> str:
    """The verdict when the second moments of every second block are multiplied by a factor."""
    path = folder / "half.pt"
    for of, parameter in net.named_parameters():
        block = of.split("layers.")[-1].partition(".")[0]
        if "layers." in of and int(block) % 2:
            optimizer.state[parameter]["exp_avg_sq"].mul_(factor)
    if named:
        path = saved(folder, net, optimizer, path.name)
    else:
        torch.save(optimizer.state_dict(), path)
    return probe(path).verdict.value


def llama(depth: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=depth,
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(config)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=tokens).logits

    return Logits()


DEEP = [
    *CASES[:3],
    *(Case(f"Llama, {depth}", partial(llama, depth), sequences) for depth in (4, 8, 12)),
]


def main() -> None:
    """Prints it all."""
    passed = total = 0
    found: dict[float, list[int]] = {factor: [0, 0] for factor in (1e2, 1e3, 1e4, 1e-3)}
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        for case in CASES:
            for lr in (1e-3, 1e-2):
                for seed in (0, 1):
                    for step, net, optimizer in trainings(case, lr, seed):
                        result: ProbeResult = probe(saved(folder, net, optimizer))
                        total += 1
                        passed += result.verdict.value == "PASS"
                        top = result.facts["top"][0]
                        print(
                            f"{result.verdict.value}  {case.name}, LR {lr:g}, seed {seed}, "
                            f"step {step}: {top['parameter']} {top['ratio']:.3g}"
                        )
                        if lr == 1e-3 and seed == 0 and step == STEPS[0]:
                            for factor, counts in found.items():
                                hits, tries = named_when_multiplied(folder, net, optimizer, factor)
                                counts[0] += hits
                                counts[1] += tries
        half: dict[tuple[str, float], Counter[str]] = {}
        for case in DEEP:
            for lr in (1e-3, 1e-2):
                for seed in (0, 1):
                    for _, net, optimizer in trainings(case, lr, seed):
                        for named in (True, False):
                            kind = "with names" if named else "without names"
                            for factor in (1.0, 1e3):
                                made = copy.deepcopy((net, optimizer))
                                verdict = verdict_of_half(folder, *made, factor, named)
                                half.setdefault((kind, factor), Counter())[verdict] += 1
    print(f"{passed} of {total} healthy states pass")
    for (kind, factor), verdicts in half.items():
        print(f"every second block times {factor:g}, {kind}: {dict(verdicts)}")
    for factor, (hits, tries) in found.items():
        print(f"one parameter times {factor:g}: {hits} of {tries} named as outliers")


if __name__ == "__main__":
    main()
