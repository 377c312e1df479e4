"""Reads the records of lines that programs print: dicts, JSON after a prefix, and named numbers.

A printed line says its place in many ways. The step may be named (`step 7`, `iter: 40/47`), in
brackets (`Epoch: [110] [0/1299]`), or the count of a progress bar (`40/47 [00:10<00:02]`). Each
record gets the keys "step", "epoch" and "epoch_length" as far as the line says them. `columns`
counts the places over all epochs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.tools.traces.columns import (
    EPOCH,
    EPOCH_LENGTH,
    STEP,
    RowProblem,
    open_text,
    quote_excerpt,
)
from healcore.tools.traces.names import (
    is_judged,
    is_loss,
    is_signal,
    is_step,
    normalize,
)

Fields = dict[str, Any]
"""A record: JSON values by name."""

Records = Iterator[tuple[int, Fields]]
"""Line number (0 in a format without lines) and fields of each record."""

_MAX_PRINTED = 1 << 12
"""Largest number of characters of a printed record."""
_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_PYTHON = re.compile(
    r"""("[^"\\]*")|'([^'\\]*)'|\b(nan|inf|None|True|False)\b|(?:np\.\w+|tensor)\(|\.?\)"""
)
_JSON_NAMES = {"nan": "NaN", "inf": "Infinity", "None": "null", "True": "true", "False": "false"}
_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+|[kKMBGT])?|nan|inf)"
    r"(?!\w|\.\w)|N/A(?!\w)|None(?!\w)"
)
_NAMED_NUMBER = re.compile(
    r"(?<![\w/.])([a-z]\w*(?:[ /.-]\w+){0,5}?)"  # up to six words, then : or = or a space
    rf"(?:\.?\ *[:=]\ *|\.?\ +)({_NUMBER})",
    re.IGNORECASE,
)
_STEP_TRAIN_NUMBER = re.compile(rf"\s*(\d+)\s+(train|val)\s+({_NUMBER})\s*$", re.IGNORECASE)
"""The lines of build-nanogpt: `250 train 5.91`, `250 val 5.88`."""
_EVALUATION = re.compile(
    r"(?:^|[\s|\[(])(?:test|val|valid|validation|validating|eval|evaluation|evaluating)(?!\w)",
    re.IGNORECASE,
)
"""A word before the numbers that makes the loss of the line a loss of the evaluation."""

_WORDS = r"(?:steps?|iters?|iterations?|batch|batches|updates?|it)"
_SLASH = r"\s*(?:/|of)\s*"
_EPOCH = re.compile(
    r"\bepoch\b\s*(?:\(train\))?\s*[:=#]?\s*[\[(]?\s*(\d+)(?![\d.]*\d|%)", re.IGNORECASE
)
_EPOCH_IN_BRACKETS = re.compile(r"\[\s*(\d+)\s*(?:/\s*\d+\s*)?\]\s*\[\s*\d+\s*/")
_EPOCH_OF_TIMM = re.compile(r"\btrain:\s*(\d+)\s*\[", re.IGNORECASE)
_PAIR = re.compile(r"^\s*\[\s*(\d+),\s*(\d+)\]\s")
"""`[epoch, batch]`, as in the tutorials of PyTorch."""
_NAMED_PLACE = re.compile(
    rf"(?<![a-z]){_WORDS}\s*(?:\(train\))?\s*[:=#]?\s*[\[(]?\s*(\d[\d,]*){_SLASH}(\d[\d,]*)",
    re.IGNORECASE,
)
_NAMED_BATCH = re.compile(
    r"\b(?:batch|batch_idx|iter|iteration|step)\b\s*[:=#]?\s*[\[(]?\s*(\d+)(?![\d.]*\d)",
    re.IGNORECASE,
)
_PLACES = (
    re.compile(r"\]\s*\[\s*(\d+)\s*/\s*(\d+)"),  # the second of two brackets
    re.compile(r"\[\s*(\d+)\s*/\s*(\d+)"),
    re.compile(r"\bepoch\s+\d+[:\s]\s*(\d+)\s*/\s*(\d+)\s", re.IGNORECASE),  # fairseq
)
_BAR = re.compile(r"(?:^|[\s|%])(\d+)/(\d+)\s*(?:\[|[━─]|-\s)")
"""The count of a progress bar of tqdm or Keras."""


class Place(NamedTuple):
    """Where in the run a line says that it is.

    Programs print the step in many ways: after a word, in brackets, or in the count of a progress
    bar. A line may name the epoch only, or no place at all.
    """

    step: int | None
    """Step, or number of the batch in its epoch."""
    length: int | None = None
    """Number of batches in an epoch, or of steps in the run, or None if the line does not say."""
    epoch: int | None = None
    is_bar: bool = False
    """Whether the line is a progress bar, which is printed several times for one step."""


def find_place(line: str) -> Place:
    """Finds the place that a line names in brackets, in a bar or after a word for a step.

    Args:
        line: a printed line, without control characters.

    Returns:
        The place, such as step 40, length 47 and epoch 2 for "Epoch 2 [40/47]". All values are None
        for a line without a place.
    """
    pair = _PAIR.match(line)
    if pair:
        return Place(int(pair[2]), None, int(pair[1]))
    found = _EPOCH.search(line) or _EPOCH_IN_BRACKETS.search(line) or _EPOCH_OF_TIMM.search(line)
    epoch = None
    rest = line
    if found:
        epoch = int(found[1])
        # "Epoch [1/5]" is no place within the epoch.
        rest = line[: found.start(1)] + re.sub(r"^\d+(\s*/\s*\d+)?", "e", line[found.start(1) :])
    named = _NAMED_PLACE.search(rest)
    if named:
        return Place(int(named[1].replace(",", "")), int(named[2].replace(",", "")), epoch)
    for pattern, text in zip(_PLACES, (rest, rest, line), strict=True):
        match = pattern.search(text)
        if match:
            return Place(int(match[1]), int(match[2]), epoch)
    bar = _BAR.search(rest)
    if bar:
        return Place(int(bar[1]), int(bar[2]), epoch, is_bar=True)
    if epoch is not None:
        batch = _NAMED_BATCH.search(rest)
        if batch:
            return Place(int(batch[1]), None, epoch)
    return Place(None, None, epoch)


class _Printed(NamedTuple):
    """A line with a record."""

    line: int
    record: Fields
    place: Place
    before: Place | None
    """The last place that the lines between the previous and this record name, or None."""
    after: Place | None
    """The first place that the lines after this record name, or None."""
    is_summary: bool
    """Whether the line may be the mean of an epoch: it names an epoch or a step, or says so."""


_SUMMARY = re.compile(r"\b(?:averaged?|avg|mean|summary|total|final)\b", re.IGNORECASE)


def printed_lines(
    parse: Callable[[str], Fields | None],
    path: str,
    problems: list[RowProblem],
    chosen: Container[str] = (),
) -> Records:
    """Yields line number and record of each line in which `parse` finds a record with a signal.

    A line with the other numbers of such a line is a record too: some programs do not print a loss
    that is NaN. `chosen` has the names of signals that the user has named.

    A log whose records name no step may name it in other lines: in a header, or in a progress bar.
    Then the records have these places, if this gives each record another one. In a log whose lines
    name places, a line without a place is the mean of an epoch, and not a step.
    """
    records = _collect(parse, path, problems, chosen)
    if not any(each.place.step is not None or _has_step(each.record) for each in records):
        records = _with_places_of_other_lines(records)
    yield from _emit(records)


def _collect(
    parse: Callable[[str], Fields | None],
    path: str,
    problems: list[RowProblem],
    chosen: Container[str],
) -> list[_Printed]:
    """The records of all lines, each with its place and the places of the lines around it."""
    records: list[_Printed] = []
    others: set[frozenset[str]] = set()  # the other names of each record
    epoch: int | None = None
    between: Place | None = None
    for number, line in _split_lines(path):
        record = parse(line) or {}
        signals = set(signals_of(record, chosen))
        names = frozenset(record).difference(signals)
        if signals:
            others.add(names)
        elif names not in others or len(names) < 2:  # a line with a step only may be any text
            record = {}
        place = find_place(line)
        if place.epoch is not None:
            epoch = place.epoch
        if not record:
            found = None
            if place.step is not None:
                found = place
            elif parse is not printed_record:
                found = _named_step(line)
            if found is not None:
                if records and between is None:
                    records[-1] = records[-1]._replace(after=found)
                between = found
            if parse is printed_record and "loss" in line and ("{'" in line or '{"' in line):
                text = f"not a dict: {quote_excerpt(line.strip())}: skipped"
                problems.append(RowProblem(number, text, unusable=True))
            continue
        is_summary = place.epoch is not None or _has_step(record) or bool(_SUMMARY.search(line))
        place = place._replace(epoch=epoch)
        if parse is printed_record:  # the progress bar before a dict is another text
            if place.step is not None:
                between = place
            place = Place(None)
        elif _is_evaluation(record):  # its bar counts the batches of the evaluation
            place = Place(None, None, epoch)
        if records and _continues(records[-1], record, place):
            records[-1].record.update(record)
            continue
        records.append(_Printed(number, record, place, between, None, is_summary))
        between = None
    return records


def _emit(records: Sequence[_Printed]) -> Records:
    """Yields line number and record of each step and evaluation, without the means of epochs."""
    have_places = _have_places(records)
    last_place = Place(None)
    for each in records:
        place = each.place
        if _is_evaluation(each.record) and place.step is None and not _has_step(each.record):
            place = last_place  # an evaluation belongs to the step before it
        elif place.step is not None or not have_places or _is_evaluation(each.record):
            last_place = place
        elif each.is_summary:
            continue
        yield each.line, _with_place(each.record, place)


def _have_places(records: Sequence[_Printed]) -> bool:
    """Whether more than half of the records that are no evaluations have a place."""
    steps = 0
    with_place = 0
    for each in records:
        if _is_evaluation(each.record):
            continue
        steps += 1
        if each.place.step is not None:
            with_place += 1
    return 2 * with_place > steps


def _split_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yields number and text of each line, and of each state of a progress bar in a line."""
    with open_text(path) as file:
        number = 1
        for line in file:
            states = [line]
            if "\b" in line:
                states = re.split("\b+", _CONTROL.sub("", line))
            for text in states:
                yield number, _CONTROL.sub("", text)
            number += line.endswith("\n")


def _has_step(record: Fields) -> bool:
    """Whether a record names its step."""
    return any(map(is_step, record))


def _is_evaluation(record: Fields) -> bool:
    """Whether a record has a loss of an evaluation, and nothing of a step."""
    return "eval_loss" in record and not any(is_judged(name) for name in record)


def _continues(last: _Printed, record: Fields, place: Place) -> bool:
    """Whether a line is a progress bar, or an evaluation, that is printed again."""
    if _is_evaluation(record) and not _has_step(record):
        return _is_evaluation(last.record) and not _has_step(last.record)
    return place.is_bar and last.place == place


def _named_step(line: str) -> Place | None:
    """The place of a line that names a step, as "GLOBAL_STEP: 25"."""
    for name, number in _NAMED_NUMBER.findall(line[:_MAX_PRINTED]):
        if is_step(name) and number.isdecimal():
            return Place(int(number))
    return None


def _with_places_of_other_lines(records: list[_Printed]) -> list[_Printed]:
    """The records with the places of the lines around them, or unchanged if these do not increase.

    A header names the step before its numbers, and the place holds until the next one. A progress
    bar may be older than the text below it, because it is drawn a few times in a second only. But
    it is drawn again after a text. Texts come at regular steps, so the places in regular distances
    are right.
    """
    befores: list[Place | None] = []
    afters: list[Place | None] = []
    newest: Place | None = None
    for each in records:
        if each.before is not None:
            newest = each.before
        befores.append(newest)
        afters.append(each.after)
    chosen = _in_order(records, befores)
    ordered_afters = _in_order(records, afters)
    if _count_distances(ordered_afters, len(records)) < _count_distances(chosen, len(records)):
        chosen = ordered_afters
    if not chosen:
        return records
    return [each._replace(place=place) for each, place in zip(records, chosen, strict=True)]


def _count_distances(places: Sequence[Place], limit: int) -> int:
    """Counts the different distances of neighbours; `limit` for fewer than two places."""
    if len(places) < 2:
        return limit
    distances = np.diff([place.step or 0 for place in places])
    return len(np.unique(distances))


def _in_order(records: list[_Printed], places: Sequence[Place | None]) -> list[Place]:
    """The places; empty if a place is missing, is before the last or has the same numbers twice."""
    reached: tuple[int, int] = (-1, -1)
    names: set[str] = set()
    found = []
    for each, place in zip(records, places, strict=True):
        own = set(filter(is_signal, each.record))
        if place is None or place.step is None:
            return []
        at = (place.epoch or 0, place.step)
        if at < reached or (at == reached and own & names):
            return []
        if at > reached:
            names = set()
        names |= own
        reached = at
        found.append(place)
    return found


def _with_place(record: Fields, place: Place) -> Fields:
    """The record with its place as "step", "epoch" and "epoch_length".

    A step that the record names is the step of the run, and preferred. If it equals the place, as
    in "iter: 40/47", the place has the length of the epoch.
    """
    named = None
    has_named = False
    epochs: list[str] = []
    is_fraction = False  # whether the record names a part of an epoch, such as 1.25
    for name, value in record.items():
        if not has_named and is_step(name):
            named = value
            has_named = True
        if normalize(name) == EPOCH:
            epochs.append(name)
            if "." in str(value):
                is_fraction = True
    if place.epoch is not None and not is_fraction:
        record = {name: value for name, value in record.items() if name not in epochs}
        record[EPOCH] = place.epoch
    if place.step is not None and (named is None or str(named) == str(place.step)):
        record = {name: value for name, value in record.items() if not is_step(name)}
        record[STEP] = place.step
        record[EPOCH_LENGTH] = place.length
    return record


def printed_record(line: str) -> Fields | None:
    """Parses the dict at the end of a printed line, after a progress bar or other text.

    Args:
        line: a line such as `{'loss': 2.5, 'epoch': 0.1}`, or with a JSON object after other text,
            as in `2026-01-01 | INFO | train | {"loss": "2.5"}`.

    Returns:
        The dict, or None for a line without one.
    """
    text = line.rstrip()
    if not text.endswith("}"):
        return None
    _, is_python, rest = text.partition("{'")
    if is_python:
        if len(rest) > _MAX_PRINTED:
            return None
        document = _PYTHON.sub(_to_json, is_python + rest)
    else:
        prefix, begin, rest = text.partition('{"')
        if not prefix.strip() or len(rest) > _MAX_PRINTED:
            return None
        document = begin + rest
    try:
        record = json.loads(document)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return record


def _to_json(token: re.Match[str]) -> str:
    """Translates a token of a printed Python dict that `_PYTHON` matches."""
    quoted, text, name = token.groups()
    if quoted:
        return quoted
    if text is not None:
        return json.dumps(text)
    return _JSON_NAMES.get(name, "")


def signals_of(record: Fields | None, chosen: Container[str] = ()) -> list[str]:
    """Finds the names that may be a loss or a norm, in a spelling that healcore may not know.

    Args:
        record: a record of a printed line. Programs print other dicts and numbers too.
        chosen: names of signals that the user has named.

    Returns:
        The names, in their order.
    """
    found: list[str] = []
    for name in record or ():
        lower = name.lower()
        if name in chosen or "loss" in lower or "norm" in lower or is_signal(name):
            found.append(name)
    return found


def named_numbers(line: str) -> Fields:
    """Finds the numbers of a line by their names.

    The first name of a step is "step", because a program may print "step 0" in one line and
    "iter 0" in another. The loss of a line that begins with a word for an evaluation, as
    "Test: loss 2.5", is "eval_loss".

    Args:
        line: a line such as ` iteration 7/ 900 | lm loss: 2.5E+00 |`.

    Returns:
        The texts of the numbers by name, such as {"step": "7", "lm loss": "2.5E+00"}.
    """
    line = re.sub(r"^s:(?=\d)", "step:", _CONTROL.sub("", line[:_MAX_PRINTED]))  # llm.c
    short = _STEP_TRAIN_NUMBER.match(line)
    if short:
        step, kind, number = short.groups()
        if kind.lower() == "train":
            return {STEP: step, "loss": number}
        return {STEP: step, "eval_loss": number}
    record: Fields = {}
    head: str | None = None  # the text before the first number that is no place
    for match in _NAMED_NUMBER.finditer(line):
        name, number = match.groups()
        if is_step(name):
            name = STEP
        elif head is None and not normalize(name).endswith(("epoch", "eta", "lr", "time")):
            head = line[: match.start()]
            if "loss" in name.lower() and not is_signal(name):
                head += name  # "validation loss at iteration 490" is no loss of 490
        record.setdefault(name, number.replace(",", ""))
    if _EVALUATION.search(head or ""):
        return _evaluation_of(record)
    return record


def _evaluation_of(record: Fields) -> Fields:
    """The step and the first loss of a printed evaluation, or nothing if it names no loss."""
    for name, number in record.items():
        if is_loss(name):
            evaluation: Fields = {}
            if STEP in record:
                evaluation[STEP] = record[STEP]
            evaluation["eval_loss"] = number
            return evaluation
    return {}
