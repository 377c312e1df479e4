"""Declares the keys of a policy with text: strings, and lists of strings."""

from __future__ import annotations

from typing import Any

from healcore.core.ranges import RuleBroken, Value


def text(*, empty: bool = True) -> Value:
    """A string."""
    rule = "a string" if empty else "a non-empty string on one line"

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise RuleBroken(rule)
        if not empty and (not value.strip() or len(value.splitlines()) != 1):
            raise RuleBroken(rule)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RuleBroken(f"{rule}, that UTF-8 can encode") from error
        return value

    return Value(rule, check)


def listed(kind: Value, *, empty: bool = False) -> Value:
    """A list without duplicates; all entries are strings of one kind."""
    rule = f"{'a list' if empty else 'a non-empty list'}, each entry {kind.rule}"

    def check(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not (value or empty):
            raise RuleBroken(rule)
        for i, entry in enumerate(value):
            try:
                kind.check(entry)
            except RuleBroken as error:
                raise RuleBroken(error.rule, error.choices, i) from error
            if entry in value[:i]:
                repeated = "in the list once; this is a repetition"
                raise RuleBroken(repeated, tuple(value[:i]), i)
        return tuple(value)

    return Value(rule, check)
