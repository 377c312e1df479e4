"""What JAX provides to healcore (`healcore.adapter_registry`); each part is imported on use."""

from __future__ import annotations

from typing import Any

from healcore.adapter_registry import register


@register("jax", "driver")
def _driver() -> Any:
    from healcore.jax.driver import JaxDriver

    return JaxDriver


@register("jax", "plain_values")
def _plain_values() -> Any:
    from healcore.jax import plain_values

    return plain_values


@register("jax", "row_runner")
def _row_runner() -> Any:
    from healcore.jax.recorded_rows import JaxRowRunner

    return JaxRowRunner


@register("jax", "sweep_scan")
def _sweep_scan() -> Any:
    from healcore.jax.recorded_rows import JaxSweepScan

    return JaxSweepScan


@register("jax", "demo_training")
def _demo_training() -> Any:
    from healcore.jax.demo import train

    return train
