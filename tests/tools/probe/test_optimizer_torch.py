"""The optimizer probe on checkpoints of torch's own optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from healcore.torch.store import DCPStore
from tests.tools.probe.trained_networks import probe, saved, train, trained, unjudged, verdicts

ADAMS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
}


@pytest.mark.parametrize("name", ADAMS)
def test_a_healthy_one_passes(tmp_path, name):
    net, optimizer = trained(ADAMS[name])
    result = probe(saved(tmp_path, net, optimizer))
    assert result.verdict.value == "PASS", result.checks
    assert result.facts["parameters"] == len(list(net.parameters()))
    assert result.facts["step"] == 60
    assert len(result.facts["top"]) == 3


def with_names(net, optimizer, folder):
    named = torch.optim.AdamW(net.named_parameters())
    named.state.update(optimizer.state)
    torch.save(named.state_dict(), folder / "optimizer.pt")
    return folder / "optimizer.pt"


def dcp(net, optimizer, folder):
    model, state = get_state_dict(net, optimizer)
    save_dcp({"model": model, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    return folder


def safetensors(net, optimizer, folder):
    tensors = {
        f"state.{name}.{slot}": value.reshape(-1) if not value.ndim else value
        for (name, _), slots in zip(net.named_parameters(), optimizer.state.values(), strict=True)
        for slot, value in slots.items()
    }
    save_file(tensors, folder / "optimizer.safetensors")
    return folder / "optimizer.safetensors"


def trainer(net, optimizer, folder):
    """A Trainer's directory: groups with and without decay, weights in a file beside them."""
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    split = torch.optim.AdamW(groups)
    split.state.update(optimizer.state)
    torch.save(split.state_dict(), folder / "optimizer.pt")
    torch.save(net.state_dict(), folder / "pytorch_model.bin")
    return folder


def file_of_the_trainer(net, optimizer, folder):
    """The names in its weights are sorted, which keeps the order of the layers."""
    trainer(net, optimizer, folder)
    save_file(net.state_dict(), folder / "model.safetensors")
    return folder / "optimizer.pt"


def one_file(net, optimizer, folder):
    return saved(folder, net, optimizer)


@pytest.mark.parametrize(
    "save", [one_file, with_names, dcp, safetensors, trainer, file_of_the_trainer]
)
def test_one_state_in_every_format(tmp_path, save):
    net, optimizer = trained()
    optimizer.state[net.linear(3).weight]["exp_avg_sq"] *= 1e4
    result = probe(save(net, optimizer, tmp_path))
    assert verdicts(result)["outliers"] == "WARN", result.checks
    top = result.facts["top"][0]
    assert (top["parameter"], top["layer"]) == ("blocks.3.1.weight", "blocks.3")
    assert top["ratio"] > 1e3


def test_our_store(tmp_path):
    net, optimizer = trained()
    store = DCPStore(tmp_path)
    store.save(1, {"model": net, "optimizer": optimizer})
    store.wait()
    store.commit(1, {"attempts": [0], "proven": 1})
    optimizer.state[net.linear(3).weight]["exp_avg_sq"] *= 1e4
    groups = [{"params": [net.embed.weight]}, {"params": [*net.parameters()][1:]}]
    split = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    split.state.update(optimizer.state)
    store.save(2, {"model": net, "optimizer": split, "epoch": 3})
    store.wait()
    for result in probe(tmp_path, step=2), probe(Path(store.steps()[-1].path or "")):
        assert result.facts["training"] == {"epoch": 3}
        assert result.facts["top"][0]["layer"] == "blocks.3"
    newest_good = probe(tmp_path)
    assert newest_good.verdict.value == "PASS"
    assert "step 1 (good)" in newest_good.notes[0]
    unjudged(tmp_path, "SKIP", "step 7", step=7)


def test_before_step_50_nothing_is_judged(tmp_path):
    path = saved(tmp_path, *trained(steps=49))
    result = probe(path)
    assert result.verdict.value == "SKIP"
    assert "step 49" in result.checks[0].message
    assert result.facts["score"] is None
    assert probe(path, min_step=49).verdict.value == "PASS"
    assert probe(path, fail_young=True).verdict.value == "FAIL"


def test_what_a_trainer_saves_about_the_run_is_reported(tmp_path):
    _, optimizer = trained()
    state = optimizer.state_dict()
    for slots in state["state"].values():
        del slots["step"]
    torch.save({"optimizer": state, "best_val_loss": 0.25}, tmp_path / "training.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 60, "epoch": 1.5, "log": []}')
    (tmp_path / "training_config.json").write_text('{"use_qlora": true, "epoch": "two"}')
    (tmp_path / "broken.json").write_text("{")
    result = probe(tmp_path)
    assert result.verdict.value == "PASS", result.checks
    assert "global_step 60, epoch 1.5, best_val_loss 0.25, use_qlora True" in result.notes
    (tmp_path / "trainer_state.json").write_text('{"global_step": 49}')
    assert verdicts(probe(tmp_path, fail_young=True))["step"] == "FAIL"
    assert verdicts(probe(tmp_path, global_step=60))["step"] == "PASS"


class Adapter(nn.Module):
    """Low-rank matrices beside projections in each layer, as PEFT names and orders them."""

    def __init__(self, outputs: dict[str, int], layers: int = 12, rank: int = 4) -> None:
        super().__init__()

        def pair(out: int) -> nn.ModuleDict:
            low, high = nn.Linear(16, rank, bias=False), nn.Linear(rank, out, bias=False)
            return nn.ModuleDict({"lora_A": low, "lora_B": high})

        self.layers = nn.ModuleList(
            nn.ModuleDict({name: pair(out) for name, out in outputs.items()}) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            low = [each["lora_B"](each["lora_A"](x)) for each in layer.values()]  # type: ignore[index]
            *others, last = (nn.functional.pad(each, (0, 16 - each.shape[-1])) for each in low)
            # The last projection has gradients that are 1000 times larger.
            x = x + torch.tanh(torch.stack(others).sum(0)) + 1e3 * last
        return x


@pytest.mark.parametrize(
    "outputs", [{"q_proj": 16, "v_proj": 16}, {"q_proj": 16, "o_proj": 16, "v_proj": 8}], ids=str
)
def test_the_layers_of_an_adapter_are_named_by_the_weights_beside(tmp_path, outputs):
    torch.manual_seed(0)
    net = Adapter(outputs)
    for name, each in net.named_parameters():
        each.data *= 1e-3 if "v_proj" in name else 1
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6)
    for _ in range(60):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        (net(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    weights = {f"base_model.model.model.{name}": p.detach() for name, p in net.named_parameters()}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    for path in (tmp_path, tmp_path / "optimizer.pt"):
        result = probe(path, top=12)
        assert result.verdict.value == "PASS", result.checks
        assert result.facts["score"] == 1.0
        layers = {f"base_model.model.model.layers.{at}" for at in range(12)}
        assert {each["layer"] for each in result.facts["top"]} == layers
    for kind in ("v_proj.lora_B", "q_proj.lora_A"):
        weight = net.get_parameter(f"layers.10.{kind}.weight")
        optimizer.state[weight]["exp_avg_sq"] *= 1e5
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    result = probe(tmp_path, top=12)
    (far,) = [each for each in result.facts["top"] if each["outlier"]]
    assert far["layer"] == "base_model.model.model.layers.10"
    assert far["parameter"].startswith("base_model.model.model.layers.10.")
    assert result.facts["score"] == 7 / 8
    spike_layers(net.layers[::2], optimizer, 1e3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert verdicts(probe(tmp_path))["outliers"] == "FAIL"


def spike_layers(layers: Iterable[nn.Module], optimizer: Any, factor: float) -> None:
    for layer in layers:
        for parameter in layer.parameters():
            optimizer.state[parameter]["exp_avg_sq"] *= factor


@pytest.mark.parametrize(("slot", "bad"), [("exp_avg_sq", "nan"), ("exp_avg", "inf")])
def test_one_nan_in_any_parameter_warns(tmp_path, slot, bad):
    net, optimizer = trained()
    for name, parameter in [*net.named_parameters()][::6]:
        values = optimizer.state[parameter][slot].view(-1)
        kept, values[-1] = values[-1].clone(), float(bad)
        path = saved(tmp_path, net, optimizer)
        result = probe(path)
        assert verdicts(result)["finite"] == result.verdict.value == "WARN", name
        assert result.facts["nonfinite"] == [name]
        assert probe(path, fail_nonfinite=1).facts["score"] == 0.0
        values[-1] = kept


def test_second_moments_of_exactly_0(tmp_path):
    net, optimizer = trained()
    optimizer.state[net.linear(1).weight]["exp_avg_sq"].zero_()
    optimizer.state[net.linear(4).weight]["exp_avg_sq"] *= 1e6
    result = probe(saved(tmp_path, net, optimizer))
    assert verdicts(result)["dead"] == verdicts(result)["outliers"] == "WARN"
    assert result.facts["dead"] == ["blocks.1.1.weight"]
    assert result.facts["top"][0]["parameter"] == "blocks.4.1.weight"
    assert result.facts["score"] == 0.75
    optimizer.state[net.head.bias]["exp_avg_sq"][3] = -1e-3  # impossible
    result = probe(saved(tmp_path, net, optimizer))
    assert verdicts(result)["finite"] == "WARN"
    assert result.facts["negative"] == ["head.bias"]
    for slots in optimizer.state.values():
        slots["exp_avg_sq"].zero_()
    assert verdicts(probe(saved(tmp_path, net, optimizer)))["dead"] == "FAIL"


class TestOutliers:
    def test_a_benign_gradient_over_depth_passes(self, tmp_path):
        net, optimizer = trained(blocks=12)
        for depth, block in enumerate(net.blocks):
            spike_layers([block], optimizer, 2.5 ** (2 * depth / 11))
        assert probe(saved(tmp_path, net, optimizer)).verdict.value == "PASS"

    @pytest.mark.parametrize("factor", [1e-4, 1e2, 1e20])
    def test_one_layer_far_off_warns(self, tmp_path, factor):
        net, optimizer = trained(blocks=8)
        spike_layers(net.blocks[5:6], optimizer, factor)
        result = probe(saved(tmp_path, net, optimizer))
        assert verdicts(result)["outliers"] == "WARN"
        assert result.facts["top"][0]["layer"] == "blocks.5"

    @pytest.mark.parametrize(("blocks", "first", "names"), [(8, 0, True), (12, 6, False)])
    def test_half_of_the_layers_far_off_fail(self, tmp_path, blocks, first, names):
        net, optimizer = trained(blocks=blocks)
        risen = list(net.blocks)[first : first + blocks // 2]
        spike_layers(risen, optimizer, 1e3)
        path = saved(tmp_path, net, optimizer)
        if not names:
            torch.save(optimizer.state_dict(), path)
        result = probe(path, top=blocks)
        assert verdicts(result)["outliers"] == "FAIL"
        assert f"{blocks // 2} of {blocks} similar layers" in result.checks[-1].message
        far = {each["layer"] for each in result.facts["top"] if each["outlier"]}
        if names:
            assert far == {f"blocks.{at}" for at in range(first, first + blocks // 2)}
        else:
            begins = [1 + 4 * at for at in range(first, first + blocks // 2)]
            assert far == {f"group 0, parameters {at} to {at + 3}" for at in begins}

    def test_a_younger_parameter_is_corrected_for_its_own_age(self, tmp_path):
        state = {}
        for i in range(12):
            step = 60 if i == 5 else 3000
            v = torch.full((4,), 1e-6 * (1 - 0.999**step))
            state[i] = {"step": step, "exp_avg": torch.zeros(4), "exp_avg_sq": v}
        path = tmp_path / "o.pt"
        torch.save({"state": state, "param_groups": []}, path)
        result = probe(path)
        assert result.verdict.value == "PASS"
        assert abs(result.facts["top"][0]["ratio"] - 1) < 1e-3


def test_a_bias_before_a_norm_is_not_ill(tmp_path):
    """Its true gradient is 0; what it has is rounding, 1e-10 of what the other biases have."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(20, 16)]
    for _ in range(6):
        layers += [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU()]
    net = nn.Sequential(*layers, nn.Linear(16, 20))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    train(net, optimizer, 60)
    result = probe(saved(tmp_path, net, optimizer))
    assert result.verdict.value == "PASS", result.checks
    assert any("6 parameters have only rounding errors" in note for note in result.notes)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum_buffer"),
        (lambda p: torch.optim.Adafactor(p), "no exp_avg_sq"),
    ],
)
def test_an_optimizer_without_second_moments_is_skipped_with_the_reason(tmp_path, make, why):
    net, optimizer = trained(make, steps=2)
    unjudged(saved(tmp_path, net, optimizer), "SKIP", why)
