"""What torch provides to healcore (`healcore.adapter_registry`); each part is imported on use."""

from __future__ import annotations

from typing import Any

from healcore.adapter_registry import register


@register("torch", "driver")
def _driver() -> Any:
    from healcore.torch.driver import TorchDriver

    return TorchDriver


@register("torch", "plain_values")
def _plain_values() -> Any:
    from healcore.torch import plain_values

    return plain_values


@register("torch", "row_runner")
def _row_runner() -> Any:
    from healcore.torch.recorded_rows import TorchRowRunner

    return TorchRowRunner


@register("torch", "demo_training")
def _demo_training() -> Any:
    from healcore.torch.demo import train

    return train


@register("torch", "checkpoint_reader")
def _checkpoint_reader() -> Any:
    from healcore.torch import checkpoint_contents

    return checkpoint_contents
