"""The optimizer probe on checkpoints of torch's own optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from healcore.torch.store import DCPStore
from tests.tools.probe.trained_networks import Net, probe, saved, train, trained, unjudged, verdicts

ADAMS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
}


@pytest.fixture(scope="module")
def net_and_optimizer():
    return trained()


@pytest.mark.parametrize("name", ADAMS)
def test_a_healthy_one_passes(tmp_path, name):
    net, optimizer = trained(ADAMS[name])
    result = probe(saved(tmp_path, net, optimizer))
    assert result.verdict.value == "PASS", result.checks
    assert result.facts["parameters"] == len(list(net.parameters()))
    assert result.facts["step"] == 60
    assert len(result.facts["top"]) == 3


class TestFormats:
    """The same state, saved in every way."""

    def check(self, path: Path, **inputs: object) -> None:
        result = probe(path, **inputs)
        assert verdicts(result)["outliers"] == "WARN", result.checks
        assert result.facts["top"][0]["parameter"] == "blocks.3.1.weight"
        assert result.facts["top"][0]["layer"] == "blocks.3"
        assert result.facts["top"][0]["ratio"] > 1e3

    @pytest.fixture
    def ill(self):
        net, optimizer = trained()
        optimizer.state[net.linear(3).weight]["exp_avg_sq"] *= 1e4
        return net, optimizer

    def test_torch_file(self, tmp_path, ill):
        self.check(saved(tmp_path, *ill))

    def test_dcp_directory_with_names(self, tmp_path, ill):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(*ill)
        state = {"model": model, "optimizer": optimizer}
        save_dcp(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        self.check(tmp_path / "dcp")

    def test_our_store(self, tmp_path, ill):
        net, optimizer = ill
        healthy = trained()
        store = DCPStore(tmp_path / "store")
        store.save(1, {"model": healthy[0], "optimizer": healthy[1]})
        store.wait()
        store.commit(1, {"attempts": [0], "proven": 1})
        groups = [{"params": [net.embed.weight]}, {"params": [*net.parameters()][1:]}]
        split = torch.optim.AdamW(groups, betas=(0.9, 0.99))
        split.state.update(optimizer.state)
        store.save(2, {"model": net, "optimizer": split, "epoch": 3})
        store.wait()
        result = probe(tmp_path / "store", step=2)
        assert result.facts["training"] == {"epoch": 3}
        assert result.facts["top"][0]["layer"] == "blocks.3"
        store.save(3, {"model": net, "optimizer": optimizer})
        store.wait()
        self.check(Path(store.steps()[2].path or ""))
        newest_good = probe(tmp_path / "store")
        assert newest_good.verdict.value == "PASS"
        assert "step 1 (good)" in newest_good.notes[0]
        unjudged(tmp_path / "store", "SKIP", "step 7", step=7)

    def test_safetensors(self, tmp_path, ill):
        from safetensors.torch import save_file

        net, optimizer = ill
        names = [name for name, _ in net.named_parameters()]
        tensors = {
            f"state.{name}.{slot}": value.reshape(1) if not value.ndim else value
            for name, slots in zip(names, optimizer.state.values(), strict=True)
            for slot, value in slots.items()
        }
        save_file(tensors, tmp_path / "optimizer.safetensors")
        self.check(tmp_path / "optimizer.safetensors")

    @pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
    def test_directory_of_the_trainer(self, tmp_path, ill, weights):
        """Weights next to the optimizer, in groups with and without decay."""
        from safetensors.torch import save_file

        net, optimizer = ill
        decayed = [p for p in net.parameters() if p.ndim > 1]
        others = [p for p in net.parameters() if p.ndim == 1]
        split = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
        for parameter, slots in optimizer.state.items():
            split.state[parameter] = slots
        torch.save(split.state_dict(), tmp_path / "optimizer.pt")
        (tmp_path / "trainer_state.json").write_text("{}")
        if weights.endswith("bin"):
            torch.save(net.state_dict(), tmp_path / weights)
        else:  # sorted by name, which keeps the order of the layers
            save_file(net.state_dict(), tmp_path / weights)
        self.check(tmp_path)

    def test_names_that_the_optimizer_was_given(self, tmp_path, ill):
        net, optimizer = ill
        named = torch.optim.AdamW(net.named_parameters())
        for parameter, slots in optimizer.state.items():
            named.state[parameter] = slots
        torch.save(named.state_dict(), tmp_path / "optimizer.pt")
        self.check(tmp_path / "optimizer.pt")


def test_before_step_50_nothing_is_judged(tmp_path):
    net, optimizer = trained(steps=49)
    result = probe(saved(tmp_path, net, optimizer))
    assert result.verdict.value == "SKIP"
    assert "step 49" in result.checks[0].message
    assert probe(saved(tmp_path, net, optimizer), min_step=49).verdict.value == "PASS"
    assert probe(saved(tmp_path, net, optimizer), fail_young=True).verdict.value == "FAIL"


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
    assert result.facts["training"] == {
        "global_step": 60,
        "epoch": 1.5,
        "best_val_loss": 0.25,
        "use_qlora": True,
    }
    assert "global_step 60, epoch 1.5, best_val_loss 0.25, use_qlora True" in result.notes
    (tmp_path / "trainer_state.json").write_text('{"global_step": 49}')
    assert verdicts(probe(tmp_path, fail_young=True))["step"] == "FAIL"
    assert verdicts(probe(tmp_path, global_step=60))["step"] == "PASS"


class Adapter(nn.Module):
    """Low-rank matrices beside two projections in each layer, as PEFT names and orders them."""

    def __init__(self, layers: int = 12, width: int = 16, rank: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.ModuleDict(
                        {
                            "lora_A": nn.Linear(width, rank, bias=False),
                            "lora_B": nn.Linear(rank, out, bias=False),
                        }
                    )
                    for name, out in (("q_proj", width), ("o_proj", width), ("v_proj", 8))
                }
            )
            for _ in range(layers)
        )
        self.base = nn.Parameter(torch.randn(8, width) / 4, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            low = {name: each["lora_B"](each["lora_A"](x)) for name, each in layer.items()}  # type: ignore[index]
            x = x + torch.tanh(low["q_proj"] + low["o_proj"] + low["v_proj"] @ self.base)
        return x


def test_an_adapter_directory_is_grouped_by_layer_and_named(tmp_path):
    """Its weights are sorted by name, so `q_proj` and `o_proj` are not told apart."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    net = Adapter()
    optimizer = torch.optim.AdamW(net.layers.parameters(), lr=1e-3)
    for _ in range(60):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        (net(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    trained_weights = [(n, p.detach()) for n, p in net.named_parameters() if p.requires_grad]
    weights = {f"base_model.model.model.{name}": each for name, each in trained_weights}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert probe(tmp_path).verdict.value == "PASS"
    for kind in ("v_proj.lora_B", "q_proj.lora_A"):
        weight = net.get_parameter(f"layers.10.{kind}.weight")
        optimizer.state[weight]["exp_avg_sq"] *= 1e5
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    result = probe(tmp_path, top=12)
    (far,) = [each for each in result.facts["top"] if each["outlier"]]
    assert far["layer"] == "base_model.model.model.layers.10"
    names = {each["layer"]: each["parameter"] for each in result.facts["top"]}
    assert names[far["layer"]] in (
        "base_model.model.model.layers.10.v_proj.lora_B.weight",
        "base_model.model.model.layers.10.* (parameter 60)",
    )
    spike_layers(net.layers[::2], optimizer, 1e3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert verdicts(probe(tmp_path))["outliers"] == "FAIL"


def spike_layers(layers: Iterable[nn.Module], optimizer: Any, factor: float) -> None:
    for layer in layers:
        for parameter in layer.parameters():
            optimizer.state[parameter]["exp_avg_sq"] *= factor


@pytest.mark.parametrize("slot", ["exp_avg_sq", "exp_avg"])
def test_one_nan_in_any_parameter_warns(tmp_path, net_and_optimizer, slot):
    """One NaN in one parameter: it is found and named correctly."""
    net, optimizer = net_and_optimizer
    for name, parameter in [*net.named_parameters()][::6]:
        values = optimizer.state[parameter][slot].view(-1)
        kept = values[-1].clone()
        for bad in (float("nan"), float("inf")):
            values[-1] = bad
            result = probe(saved(tmp_path, net, optimizer))
            assert verdicts(result)["finite"] == "WARN", name
            assert result.verdict.value == "WARN"
            assert result.facts["nonfinite"] == [name]
        values[-1] = kept
    assert probe(saved(tmp_path, net, optimizer)).verdict.value == "PASS"


def test_second_moments_below_0_are_impossible(tmp_path):
    net, optimizer = trained()
    optimizer.state[net.head.bias]["exp_avg_sq"][3] = -1e-3
    result = probe(saved(tmp_path, net, optimizer))
    assert verdicts(result)["finite"] == "WARN"
    assert result.facts["negative"] == ["head.bias"]


class TestDead:
    """Second moments of exactly 0."""

    def test_all_of_them_fail(self, tmp_path):
        net, optimizer = trained()
        for slots in optimizer.state.values():
            slots["exp_avg_sq"].zero_()
        result = probe(saved(tmp_path, net, optimizer))
        assert verdicts(result)["dead"] == "FAIL"

    def test_one_warns_and_the_others_are_judged(self, tmp_path):
        net, optimizer = trained()
        optimizer.state[net.linear(1).weight]["exp_avg_sq"].zero_()
        optimizer.state[net.linear(4).weight]["exp_avg_sq"] *= 1e6
        result = probe(saved(tmp_path, net, optimizer))
        assert verdicts(result)["dead"] == "WARN"
        assert result.facts["dead"] == ["blocks.1.1.weight"]
        assert verdicts(result)["outliers"] == "WARN"
        assert result.facts["top"][0]["parameter"] == "blocks.4.1.weight"


class TestOutliers:
    """Layers whose gradients are of another size."""

    def test_a_benign_gradient_over_depth_passes(self, tmp_path):
        net, optimizer = trained(blocks=12)
        for depth, block in enumerate(net.blocks):
            for parameter in block.parameters():
                optimizer.state[parameter]["exp_avg_sq"] *= 2.5 ** (2 * depth / 11)
        assert probe(saved(tmp_path, net, optimizer)).verdict.value == "PASS"

    @pytest.mark.parametrize("factor", [1e-4, 1e2, 1e20])
    def test_one_layer_far_off_warns(self, tmp_path, factor):
        net, optimizer = trained(blocks=8)
        for parameter in net.blocks[5].parameters():
            optimizer.state[parameter]["exp_avg_sq"] *= factor
        result = probe(saved(tmp_path, net, optimizer))
        assert verdicts(result)["outliers"] == "WARN"
        assert result.facts["top"][0]["layer"] == "blocks.5"

    @pytest.mark.parametrize("names", [True, False], ids=["named", "numbered"])
    @pytest.mark.parametrize(("blocks", "first"), [(8, 0), (12, 6)])
    def test_half_of_the_layers_far_off_fail(self, tmp_path, blocks, first, names):
        """Their median is among the risen ones; the lowest group of layers is the baseline."""
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
        """The same gradients for 60 steps and for 3000 give very different running averages."""
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


class TestNotAdam:
    """An optimizer without second moments is skipped, with the reason."""

    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum_buffer"),
            (lambda p: torch.optim.SGD(p, lr=0.1), "no exp_avg_sq"),
            (lambda p: torch.optim.Adafactor(p), "no exp_avg_sq"),
            (lambda p: torch.optim.RMSprop(p), "square_avg"),
        ],
    )
    def test_of_torch(self, tmp_path, make, why):
        net, optimizer = trained(make, steps=2)
        unjudged(saved(tmp_path, net, optimizer), "SKIP", why)

    def test_weights_alone(self, tmp_path):
        torch.save(Net().state_dict(), tmp_path / "model.pt")
        unjudged(tmp_path / "model.pt", "SKIP", "no exp_avg_sq")
