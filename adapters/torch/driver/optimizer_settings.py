"""The learning rates and other numbers of all optimizers of a run."""

from __future__ import annotations

from collections.abc import Mapping

from healcore.runtime.driver import NumberRange
from healcore.torch.attachment import Healing


def learning_rates(healings: Mapping[str, Healing]) -> dict[str, float | None]:
    """The learning rates that the program has set now, as the engines read them.

    Args:
        healings: the handle of each optimizer, by name.

    Returns:
        Optimizer name -> the largest rate of its groups, or None without one. A rate in a tensor on
        an accelerator is a sync.
    """
    largest: dict[str, float | None] = {}
    for name, healing in healings.items():
        rates: list[float] = []
        for group in healing.optimizer.param_groups:
            if group.get("lr") is not None:
                rates.append(float(group["lr"]))
        largest[name] = max(rates, default=None)
    return largest


def trained_rates(healings: Mapping[str, Healing]) -> dict[str, float | None]:
    """The learning rates with which the optimizers took their last step.

    A scheduler may have changed the rates since. What a step has trained with is known only for an
    optimizer whose numbers are watched; other optimizers have their present rate.

    Args:
        healings: the handle of each optimizer, by name.

    Returns:
        Name of the optimizer -> learning rate, as in `learning_rates`.
    """
    rates = learning_rates(healings)
    for name, healing in healings.items():
        numbers = healing.healed_step.numbers
        if numbers is not None and numbers.rate is not None:
            rates[name] = numbers.rate
    return rates


def number_ranges(healings: Mapping[str, Healing]) -> dict[str, NumberRange]:
    """The values that the watched numbers have had. No sync: tensors on a device are not read.

    Args:
        healings: the handle of each optimizer, by name.

    Returns:
        Name of the optimizer and place in its groups, as one text -> range.
    """
    ranges: dict[str, NumberRange] = {}
    for name, healing in healings.items():
        numbers = healing.healed_step.numbers
        if numbers is not None:
            for place, number_range in numbers.ranges().items():
                ranges[f"{name}{place}"] = number_range
    return ranges


def hold_numbers(healings: Mapping[str, Healing], ranges: Mapping[str, NumberRange]) -> None:
    """Holds each number in its range from the next step on, and releases all other numbers.

    Args:
        healings: the handle of each optimizer, by name.
        ranges: names as in `number_ranges` -> range.
    """
    for name, healing in healings.items():
        numbers = healing.healed_step.numbers
        if numbers is None:
            continue
        own: dict[str, NumberRange] = {}
        for full_name, number_range in ranges.items():
            if full_name.startswith(name):
                own[full_name.removeprefix(name)] = number_range
        numbers.hold(own)
