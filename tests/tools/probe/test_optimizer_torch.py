"""The optimizer probe on checkpoints of torch's own optimizers."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from healcore.tools.probe.checks import Report
from tests.runtime.store.store_cases import DCP, TORCH_FILE, over
from tests.tools.probe.trained_networks import probe, saved, train, trained, unjudged, verdicts


def test_a_healthy_optimizer_passes(tmp_path):
    fused = functools.partial(torch.optim.AdamW, amsgrad=True, fused=True)
    for make in (fused, torch.optim.RAdam):
        net, optimizer = trained(make)
        result = probe(saved(tmp_path, net, optimizer))
        assert result.verdict.value == "PASS", result.checks
        assert result.facts["parameters"] == len(list(net.parameters()))
        assert (result.facts["step"], len(result.facts["top"])) == (60, 3)


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
    tensors = {}
    for name, parameter in net.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            is_scalar = value.ndim == 0
            tensors[f"state.{name}.{slot}"] = value.reshape(-1) if is_scalar else value
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


@pytest.mark.parametrize("save", [with_names, dcp, safetensors, trainer, file_of_the_trainer])
def test_an_outlier_is_found_in_every_format(tmp_path, save):
    net, optimizer = trained()
    optimizer.state[net.linear(3).weight]["exp_avg_sq"] *= 1e4
    result = probe(save(net, optimizer, tmp_path))
    assert verdicts(result)["outliers"] == "WARN", result.checks
    top = result.facts["top"][0]
    assert (top["parameter"], top["layer"]) == ("blocks.3.1.weight", "blocks.3")
    assert top["ratio"] > 1e3


@over(DCP, TORCH_FILE)
def test_moments_in_a_store_are_judged(case, tmp_path):
    net, optimizer = trained()
    store = case.make(tmp_path)
    store.save(1, {"model": net, "optimizer": optimizer})
    store.wait()
    store.replace_record(1, {"attempts": [0], "known_good_up_to": 1})
    optimizer.state[net.linear(3).weight]["exp_avg_sq"] *= 1e4
    groups = [{"params": [net.embed.weight]}, {"params": [*net.parameters()][1:]}]
    split = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    split.state.update(optimizer.state)
    store.save(2, {"model": net, "optimizer": split, "epoch": 3})
    store.wait()
    for result in probe(tmp_path, step=2), probe(Path(store.checkpoints()[-1].path or "")):
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
    assert result.score is None
    assert probe(path, min_step=49).verdict.value == "PASS"
    assert probe(path, fail_young=True).verdict.value == "FAIL"


def test_what_a_trainer_saves_about_the_run_is_reported(tmp_path):
    state = trained()[1].state_dict()
    for slots in state["state"].values():
        del slots["step"]
    torch.save({"optimizer": state, "best_val_loss": 0.25}, tmp_path / "training.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 60, "epoch": 1.5, "log": []}')
    (tmp_path / "training_config.json").write_text('{"use_qlora": true, "epoch": "two"}')
    (tmp_path / "broken.json").write_text("{")
    result = probe(tmp_path)
    assert result.verdict.value == "PASS", result.checks
    facts = {"global_step": 60, "epoch": 1.5, "best_val_loss": 0.25, "use_qlora": True}
    assert result.facts["training"] == facts
    (tmp_path / "trainer_state.json").write_text('{"global_step": 49}')
    assert verdicts(probe(tmp_path, fail_young=True))["step"] == "FAIL"
    assert verdicts(probe(tmp_path, global_step=60))["step"] == "PASS"


def adapter(
    layers: int, sizes: Mapping[str, int], level: Callable[[str], float]
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Weights as PEFT names and orders them, and their optimizer with second moments at a level.

    `sizes` are of the outputs of each projection.
    """
    weights = {}
    for layer in range(layers):
        for projection, size in sizes.items():
            name = f"{LAYERS}.{layer}.{projection}"
            weights[f"{name}.lora_A.weight"] = nn.Parameter(torch.zeros(4, 16))
            weights[f"{name}.lora_B.weight"] = nn.Parameter(torch.zeros(size, 4))
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(weights.values())
    for name, each in weights.items():
        square = 1e-8 * level(name) * (0.5 + torch.rand(each.shape, generator=generator))
        optimizer.state[each] = {
            "step": torch.tensor(60.0), "exp_avg": torch.zeros(each.shape), "exp_avg_sq": square,
        }  # fmt: skip
    return weights, optimizer


LAYERS = "base_model.model.model.layers"


def save_adapter(weights: Mapping[str, nn.Parameter], folder: Path) -> None:
    tensors = {name: each.detach() for name, each in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def test_the_layers_of_an_adapter_are_named_by_the_weights_beside(tmp_path):
    sizes = {"q_proj": 16, "o_proj": 16, "v_proj": 8}
    weights, optimizer = adapter(12, sizes, lambda name: 1e6 if "v_proj" in name else 1)
    save_adapter(weights, tmp_path)

    def probed(factors: dict[str, float]) -> Report:
        for name, each in weights.items():
            for part, factor in factors.items():
                optimizer.state[each]["exp_avg_sq"] *= factor if part in name else 1
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        result = probe(tmp_path, top=12)
        assert probe(tmp_path / "optimizer.pt", top=12).facts["top"] == result.facts["top"]
        return result

    result = probed({})
    assert result.verdict.value == "PASS", result.checks
    assert result.score == 1.0
    assert {each["layer"] for each in result.facts["top"]} == {f"{LAYERS}.{i}" for i in range(12)}
    result = probed({"layers.10.v_proj.lora_B": 1e5, "layers.10.q_proj.lora_A": 1e5})
    (far,) = [each for each in result.facts["top"] if each["outlier"]]
    assert far["layer"] == f"{LAYERS}.10"
    assert far["parameter"].startswith(f"{LAYERS}.10.")
    assert result.score == 7 / 8
    half = probed({f"layers.{at}.": 1e3 for at in range(0, 12, 2)})
    assert verdicts(half)["outliers"] == "FAIL"


@pytest.mark.parametrize(
    "sizes",
    [{"q_proj": 16, "v_proj": 16}, {"q_proj": 16, "v_proj": 8}, {"q_proj": 16, "down_proj": 64}],
)
def test_a_healthy_adapter_of_two_layers_passes(sizes, tmp_path):
    """The gradients of queries are far smaller than those of values, in each layer."""

    def level(name: str) -> float:
        return (1 if "q_proj" in name else 300) * (30 if "lora_B" in name else 1)

    weights, optimizer = adapter(2, sizes, level)
    path = tmp_path / "optimizer.pt"
    torch.save(optimizer.state_dict(), path)
    assert probe(path).verdict.value == "PASS", "without the names"
    save_adapter(weights, tmp_path)
    for subject in (path, tmp_path):
        result = probe(subject, top=12)
        assert result.verdict.value == "PASS", result.checks
        layers = {each["layer"] for each in result.facts["top"]}
        assert layers == {f"{LAYERS}.0", f"{LAYERS}.1"}


def test_one_nan_in_any_parameter_warns(tmp_path):
    net, optimizer = trained()
    for at, (name, parameter) in enumerate([*net.named_parameters()][::6]):
        slot, bad = (("exp_avg_sq", "nan"), ("exp_avg", "inf"))[at % 2]
        values = optimizer.state[parameter][slot].view(-1)
        kept = values[-1].clone()
        values[-1] = float(bad)
        path = saved(tmp_path, net, optimizer)
        result = probe(path)
        assert verdicts(result)["finite"] == result.verdict.value == "WARN", name
        assert result.facts["nonfinite"] == [name]
        assert probe(path, fail_nonfinite=1).score == 0.0
        values[-1] = kept


def test_second_moments_of_exactly_0_are_dead_and_not_outliers(tmp_path):
    net, optimizer = trained()
    optimizer.state[net.linear(1).weight]["exp_avg_sq"].zero_()
    optimizer.state[net.linear(4).weight]["exp_avg_sq"] *= 1e6
    result = probe(saved(tmp_path, net, optimizer))
    assert verdicts(result)["dead"] == verdicts(result)["outliers"] == "WARN"
    assert result.facts["dead"] == ["blocks.1.1.weight"]
    assert result.facts["top"][0]["parameter"] == "blocks.4.1.weight"
    assert result.score == 0.75
    optimizer.state[net.head.bias]["exp_avg_sq"][3] = -1e-3  # impossible
    result = probe(saved(tmp_path, net, optimizer))
    assert verdicts(result)["finite"] == "WARN"
    assert result.facts["nonfinite"] == ["head.bias"]
    for slots in optimizer.state.values():
        slots["exp_avg_sq"].zero_()
    result = probe(saved(tmp_path, net, optimizer))
    assert verdicts(result)["dead"] == "FAIL"
    assert result.score == 0.3


FACTORS: dict[str, tuple[Callable[[int], float], str, set[int]]] = {
    "a benign gradient over depth": (lambda depth: 2.5 ** (2 * depth / 11), "PASS", set()),
    "one layer far below": (lambda depth: 1e-4 if depth == 5 else 1.0, "WARN", {5}),
    "half of the layers": (lambda depth: 1e3 if depth > 5 else 1.0, "FAIL", set(range(6, 12))),
}
"""Factors of the second moments at a depth, the verdict, and the depths that are far off."""


@pytest.mark.parametrize("name", FACTORS)
def test_layers_with_unusual_moments_are_outliers(tmp_path, name):
    factor, verdict, far = FACTORS[name]
    net, optimizer = trained(blocks=12)
    for depth, block in enumerate(net.blocks):
        for parameter in block.parameters():
            optimizer.state[parameter]["exp_avg_sq"] *= factor(depth)
    path = saved(tmp_path, net, optimizer)
    labels = {f"blocks.{depth}" for depth in far}
    result = probe(path, top=12)
    assert verdicts(result)["outliers"] == result.verdict.value == verdict
    assert {each["layer"] for each in result.facts["top"] if each["outlier"]} == labels


def test_a_younger_parameter_is_corrected_for_its_own_age(tmp_path):
    state = {}
    for i in range(12):
        step = 60 if i == 5 else 3000
        v = torch.full((4,), 1e-6 * (1 - 0.999**step))
        state[i] = {"step": step, "exp_avg": torch.zeros(4), "exp_avg_sq": v}
    torch.save({"state": state, "param_groups": []}, tmp_path / "o.pt")
    result = probe(tmp_path / "o.pt")
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


def test_an_optimizer_without_second_moments_is_skipped_with_the_reason(tmp_path):
    with_momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for make in (with_momentum, torch.optim.Adafactor):
        unjudged(saved(tmp_path, *trained(make, steps=2)), "SKIP", "no exp_avg_sq")
