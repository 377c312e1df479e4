"""Reads what each tracker has stored, with the tracker's own reader where it has one."""

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BOUND_S = 600.0
"""Seconds after which a test fails, on a machine of any load."""


class Stored(NamedTuple):
    rows: list[tuple[int, dict[str, float]]]
    """Step and numbers, in the order of storage."""
    texts: list[str]
    runs: int = 1


def asked(name: str, folder: Path) -> str:
    """The argument `trackers`: each test has a project of its own, named as its folder."""
    return f"tensorboard:{folder / 'tb'}" if name == "tensorboard" else f"{name}:{folder.name}"


def _wandb(folder: Path) -> Stored:
    rows = []
    texts = []
    ids = set()
    # The name of the folder of an offline run begins with its time.
    for path in sorted(Path(os.environ["WANDB_DIR"]).rglob("*.wandb")):
        until = time.monotonic() + BOUND_S
        while time.monotonic() < until:  # W&B's own process may write when `finish` has returned
            records = [(each.WhichOneof("record_type"), each) for each in wandb_records(path)]
            runs = [each.run for kind, each in records if kind == "run"]
            ended = any(kind == "exit" for kind, _ in records)
            if runs and (ended or runs[0].project != folder.name):
                break
            time.sleep(0.05)
        if runs[0].project != folder.name:
            continue
        ids.add(runs[0].run_id)
        texts += [each.alert.text for kind, each in records if kind == "alert"]
        for kind, each in records:
            if kind == "history":
                items = each.history.item
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                step = row.pop("heal/step", None)
                if "heal/grad_norm" in row:
                    numbers = {k: float(v) for k, v in row.items() if _is_number(k, v)}
                    rows.append((step, numbers))
    return Stored(rows, texts, len(ids))


def wandb_records(path: Path) -> Iterator[Any]:
    """W&B has no reader in Python any more: the format is LevelDB's log of protobuf records."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    at = 7
    record = b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + length > len(data):
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)  # pyright: ignore
            record = b""


def _trackio(folder: Path) -> Stored:
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_runs(folder.name)
    rows, texts = [], []
    for run in runs:
        for row in SQLiteStorage.get_logs(folder.name, run):
            numbers = {k: float(v) for k, v in row.items() if _is_number(k, v)}
            if "heal/grad_norm" in numbers:
                rows.append((row["step"], numbers))
        texts += [each["text"] for each in SQLiteStorage.get_alerts(folder.name, run)]
    return Stored(rows, texts, len(runs))


def _is_number(name: str, value: Any) -> bool:
    return name.startswith("heal/") and isinstance(value, int | float)


def _tensorboard(folder: Path) -> Stored:
    """The scalars with healcore's own reader of logs, the texts with TensorBoard's."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    from healcore.tools.traces.formats import scalars

    rows: list[tuple[int, dict[str, float]]] = []
    texts = []
    for path in sorted((folder / "tb").iterdir()):
        problems: list[Any] = []
        for _, record in scalars(str(path), problems):
            step, (name, value) = record.pop("step"), *record.items()
            if not rows or rows[-1][0] != step or name in rows[-1][1]:
                rows.append((step, {}))
            rows[-1][1][name] = value
        assert not problems
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "text":
                    texts.append(value.tensor.string_val[0].decode())
    return Stored(rows, texts)


STORED = {"wandb": _wandb, "trackio": _trackio, "tensorboard": _tensorboard}
"""Name of a tracker -> its reader, which takes the folder of the test."""
