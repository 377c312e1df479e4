"""Reads the records of lines that programs print: dicts, JSON after a prefix, and named numbers.

A printed line says its place in many ways. The step may be named (`step 7`, `iter: 40/47`), in
brackets (`Epoch: [110] [0/1299]`), or the count of a progress bar (`40/47 [00:10<00:02]`). Each
record gets the keys "step", "epoch" and "epoch_length" as far as the line says them. `trace`
counts the places over all epochs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from healcore.tools.traces.formats import (
    Fields,
    Records,
    RowProblem,
    flatten,
    open_text,
    quote_excerpt,
)
from healcore.tools.traces.names import (
    EPOCH,
    EPOCH_LENGTH,
    JUDGED_SIGNALS,
    SIGNALS,
    STEP,
    has_role,
    normalize,
)

_MAX_PRINTED = 1 << 12
"""Largest number of characters of a printed record."""
_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_DICT = re.compile(r"""(?:.*?(?=\{')|\s*[^\s{].*?(?=\{"))(\{.*\})$""")
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
_EVALUATION = re.compile(
    r"(?:^|[\s|\[(])(?:test|val|valid|validation|validating|eval|evaluation|evaluating)(?!\w)",
    re.IGNORECASE,
)
"""A word before the numbers that makes the loss of the line a loss of the evaluation."""

_EPOCH = re.compile(
    r"(?:\bepoch\b\s*(?:\(train\))?\s*[:=#]?\s*[\[(]?"
    r"|\btrain:(?=\s*\d+\s*\[)"  # timm: `Train: 110 [0/1299]`
    r"|\[(?=\s*\d+[\s\d/]*\]\s*\[\s*\d+\s*/))"  # `[110/200][0/1299]`
    r"\s*(\d+)(?![\d.]*\d|%)(?:\s*/\s*\d+)?",
    re.IGNORECASE,
)
_PAIR = re.compile(r"^\s*\[\s*(\d+),\s*(\d+)\]\s")
"""`[epoch, batch]`, as in the tutorials of PyTorch."""
_WORDS = r"(?:steps?|iters?|iterations?|batch|batches|updates?|it)"
_OF = r"(\d[\d,]*)\s*(?:/|of)\s*(\d[\d,]*)(?![\d/]| \d+:)"  # `08/03 22:09` is a date
_NAMED_PLACE = re.compile(
    rf"(?<![a-z]){_WORDS}\s*(?:\(train\))?\s*[:=#]?\s*[\[(]?\s*{_OF}", re.IGNORECASE
)
_PLACE = re.compile(rf"(?:[\[|%]|\0\]?:?|^)\s*{_OF}(\s*(?:\[|[━─]|-\s))?")
"""A place in a bracket, in the bar of tqdm or Keras (with the third group), or after an epoch."""
_NAMED_BATCH = re.compile(
    r"\b(?:batch|batch_idx|iter|iteration|step)\b\s*[:=#]?\s*[\[(]?\s*(\d+)(?![\d.]*\d)",
    re.IGNORECASE,
)
_SUMMARY = re.compile(r"\b(?:averaged?|avg|mean|summary|total|final)\b", re.IGNORECASE)


class _Line(NamedTuple):
    """A line with a record."""

    number: int
    record: Fields
    is_evaluation: bool
    """Whether the record has a loss of an evaluation, and nothing of a step."""
    has_place: bool
    """Whether the line says the step, or the number of the batch in its epoch."""
    is_summary: bool
    """Whether the line may be the mean of an epoch: it names an epoch or a step, or says so."""


def _find_place(line: str) -> tuple[int | None, int | None, int | None, bool]:
    """Finds the place that a line names in brackets, in a bar or after a word for a step.

    Returns the step or the number of the batch in its epoch, the number of batches, the epoch, and
    whether the line is a progress bar, which is printed several times for one step: (40, 47, 2,
    False) for "Epoch 2 [40/47]".
    """
    if pair := _PAIR.match(line):
        return int(pair[2]), None, int(pair[1]), False
    epoch = None
    if found := _EPOCH.search(line):
        epoch = int(found[1])
        line = f"{line[: found.start()]}\0{line[found.end() :]}"  # "Epoch [1/5]" is no place in it
    if place := _NAMED_PLACE.search(line) or _PLACE.search(line):
        step, length, *bar = place.groups()
        return int(step.replace(",", "")), int(length.replace(",", "")), epoch, any(bar)
    batch = _NAMED_BATCH.search(line)
    if epoch is not None and batch:
        return int(batch[1]), None, epoch, False
    return None, None, epoch, False


def printed_dicts(path: str, problems: list[RowProblem]) -> Records:
    """Reads lines that end in a dict as Python prints it, or in JSON after other text.

    Args:
        path: the file.
        problems: gets a problem for each line whose dict is damaged.

    Yields:
        Line number and dict of each line, without the last record of a Trainer, as in
        `formats.json_document`.
    """
    for number, line in _split_lines(path):
        record = printed_record(line)
        if record is not None and "train_runtime" not in record:
            yield number, flatten(record)
        elif record is None and "loss" in line and ("{'" in line or '{"' in line):
            text = f"not a dict: {quote_excerpt(line.strip())}: skipped"
            problems.append(RowProblem(number, text, unusable=True))


def printed_numbers(path: str, problems: list[RowProblem], chosen: Iterable[str] = ()) -> Records:
    """Reads lines that name their numbers, as "iter 10: loss 3.14".

    In a log whose lines name places, a line without a place is the mean of an epoch, and not a
    step.

    Args:
        path: the file.
        problems: not used, because other lines of a program are no damage.
        chosen: names of signals that the user has named.

    Yields:
        Line number and record of each line with a signal. A line with other numbers of such a line
        is a record too: some programs do not print a loss that is NaN.
    """
    lines: list[_Line] = []
    known: set[str] = set()  # the names in all records
    epoch: int | None = None
    for number, text in _split_lines(path):
        record = named_numbers(text)
        step, length, own_epoch, is_bar = _find_place(text[:_MAX_PRINTED])
        if own_epoch is not None:
            epoch = own_epoch
        if has_signal(record, chosen):
            known.update(record)
        elif len(record) < 2 or not known.issuperset(record):  # a step only may be any text
            continue
        is_summary = own_epoch is not None or STEP in record or bool(_SUMMARY.search(text))
        # A part of an epoch, such as 1.25, says more than the epoch.
        if epoch is not None and "." not in str(record.get(EPOCH)):
            record[EPOCH] = epoch
        is_evaluation = "eval_loss" in record and not has_role(record, JUDGED_SIGNALS)
        if is_evaluation:
            step = None  # its bar counts the batches of the evaluation
        elif step is not None and record.get(STEP) in (None, str(step)):
            # A step that the record names is the step of the run, and preferred.
            record |= {STEP: step, EPOCH_LENGTH: length}
        line = _Line(number, record, is_evaluation, step is not None, is_summary)
        # A progress bar, or an evaluation, is printed again.
        if (is_evaluation or is_bar) and lines and _is_again(lines[-1], line):
            lines[-1].record.update(record)
        else:
            lines.append(line)
    places = [line.has_place for line in lines if not line.is_evaluation]
    have_places = 2 * sum(places) > len(places)
    for line in lines:
        if line.is_evaluation or line.has_place or not (have_places and line.is_summary):
            yield line.number, line.record


def _is_again(last: _Line, line: _Line) -> bool:
    """Whether two lines have the same step and epoch, and are of one kind."""
    same_place = all(last.record.get(name) == line.record.get(name) for name in (STEP, EPOCH))
    return same_place and last.is_evaluation == line.is_evaluation


def _split_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yields number and text of each line, and of each state of a progress bar in a line."""
    with open_text(path) as file:
        number = 1
        for line in file:
            for text in re.split("\b+", _CONTROL.sub("", line)):
                yield number, text
            number += line.endswith("\n")


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
    found = _DICT.match(text)
    if not found or len(found[1]) > _MAX_PRINTED:
        return None
    try:
        return json.loads(_PYTHON.sub(_to_json, found[1]))
    except (ValueError, RecursionError):
        return None


def _to_json(token: re.Match[str]) -> str:
    """Translates a token of a printed Python dict that `_PYTHON` matches."""
    quoted, text, name = token.groups()
    if quoted:
        return quoted
    if text is not None:
        return json.dumps(text)
    return _JSON_NAMES.get(name, "")


def has_signal(record: Fields | None, chosen: Iterable[str] = ()) -> bool:
    """Whether a record may have a loss or a norm, in a spelling that healcore may not know.

    Args:
        record: a record of a printed line. Programs print other dicts and numbers too.
        chosen: names of signals that the user has named.
    """
    for name in record or ():
        lower = name.lower()
        if name in chosen or "loss" in lower or "norm" in lower or has_role([name], SIGNALS):
            return True
    return False


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
    line = line[:_MAX_PRINTED]
    record: Fields = {}
    head: str | None = None  # the text before the first number that is no place
    for match in _NAMED_NUMBER.finditer(line):
        name, number = match.groups()
        if has_role([name], [STEP]):
            name = STEP
        elif normalize(name) == EPOCH:
            name = EPOCH
        elif head is None and not normalize(name).endswith(("epoch", "eta", "lr", "time")):
            head = line[: match.start()]
            if "loss" in name.lower() and not has_role([name], SIGNALS):
                head += name  # "validation loss at iteration 490" is no loss of 490
        record.setdefault(name, number.replace(",", ""))
    if _EVALUATION.search(head or ""):
        for name in record:
            if has_role([name], ["loss"]):
                step = {key: record[key] for key in record if key == STEP}
                return step | {"eval_loss": record[name]}
        return {}
    return record
