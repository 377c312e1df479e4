"""Writes logs in the forms of public tools.

Each function gets the losses of a run, one per printed row, and returns the text of its log. A run
has `BATCHES` batches in an epoch, and prints every `EVERY` batches. `STEPS` says which step each
row must have, by tool: the steps of the run, from 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

EVERY, BATCHES = 10, 100


class Row(NamedTuple):
    """One printed row."""

    step: int
    epoch: int
    """From 0."""
    batch: int
    """Batches done in the epoch, from 1."""
    loss: float
    norm: float


def rows_of(losses: Sequence[float]) -> list[Row]:
    """The rows of a run whose epochs have `BATCHES` batches."""
    rows = []
    for number, loss in enumerate(losses):
        step = (number + 1) * EVERY
        epoch, batch = divmod(step - 1, BATCHES)
        norm = float("nan") if loss != loss else 1.0 + number % 3 / 10
        rows.append(Row(step, epoch, batch + 1, loss, norm))
    return rows


def _big(number: int) -> str:
    for size, suffix in ((10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.0f}{suffix}"
    return str(number)


def _mean(row: Row) -> str:
    return f"loss: {row.loss:.4f} ({row.loss:.4f})  grad_norm: {row.norm:.4f} ({row.norm:.4f})"


def _bar(row: Row, width: int = 10) -> str:
    done = width * row.batch // BATCHES
    return f"{row.batch}/{BATCHES} [{'=' * done}>{'.' * (width - done)}]"


TOOLS: dict[str, Callable[[Row], str]] = {
    "mmdet 2": lambda r: (
        f"2021-11-22 01:32:34,502 - mmdet - INFO - Epoch [{r.epoch + 1}][{r.batch}/{BATCHES}]\tlr: "
        f"1.000e-03, eta: 6 days, 15:22:46, time: 0.539, memory: 7239, loss_ce: 1.2, "
        f"loss: {r.loss:.4f}, grad_norm: {r.norm:.4f}"
    ),
    "mmengine": lambda r: (
        f"08/03 22:09:24 - mmengine - INFO - Epoch(train)  [{r.epoch + 1}][{r.batch:4}/{BATCHES}]  "
        f"lr: 2.0000e-02  eta: 0:39:15  time: 0.0578  memory: 2389  grad_norm: {r.norm:.4f}  "
        f"loss: {r.loss:.4f}  loss_cls: 0.5"
    ),
    "mmseg": lambda r: (
        f"2021-03-11 10:00:00,000 - mmseg - INFO - Iter [{r.step}/160000]\tlr: 9.9e-03, eta: 1 day,"
        f" 0:00:00, time: 0.5, memory: 9000, decode.loss_seg: 0.3, loss: {r.loss:.4f}"
    ),
    "MetricLogger": lambda r: (
        f"Epoch: [{r.epoch}]  [{r.batch - 1}/{BATCHES}]  eta: 0:12:00  lr: 0.001435  "
        f"min_lr: 0.001435  {_mean(r)}  time: 0.4944  data: 0.0001  max mem: 19152"
    ),
    "ImageNet": lambda r: (
        f"Epoch: [{r.epoch}][ {r.batch - 1}/{BATCHES}]\tTime  0.523 ( 0.900)\tData  0.1 ( 0.4)\t"
        f"Loss {r.loss:.4e} ({r.loss:.4e})\tAcc@1   0.00 (  0.10)"
    ),
    "timm": lambda r: (
        f"Train: {r.epoch} [{r.batch - 1:>4d}/{BATCHES} ({r.batch:>3.0f}%)]  Loss: {r.loss:.3f} "
        f"({r.loss:.3f})  Time: 0.5s, 250.00/s  LR: 1.000e-06  Data: 0.010 (0.020)"
    ),
    "yunjey": lambda r: f"Epoch [{r.epoch + 1}/50], Step [{r.batch}/{BATCHES}], Loss: {r.loss:.4f}",
    "PyTorch tutorial": lambda r: f"[{r.epoch + 1}, {r.batch:5d}] loss: {r.loss:.3f}",
    "YOLOX": lambda r: (
        f"2021-08-17 | INFO | yolox.core.trainer:238 - epoch: {r.epoch + 1}/300, iter: {r.batch}/"
        f"{BATCHES}, mem: 4320Mb, iter_time: 0.5s, total_loss: {r.loss:.1f}, iou_loss: 1.0"
    ),
    "PaddleDetection": lambda r: (
        f"[01/01 10:00:00] ppdet.engine INFO: Epoch: [{r.epoch}] [{r.batch - 1:>3}/{BATCHES}] "
        f"learning_rate: 0.001 loss: {r.loss:.6f} eta: 1 day, 1:00:00 batch_cost: 0.5 s"
    ),
    "PaddleOCR": lambda r: (
        f"[2021/01/01 10:00:00] root INFO: epoch: [{r.epoch + 1}/500], global_step: {r.step}, "
        f"lr: 0.0001, loss: {r.loss:.6f}, avg_reader_cost: 0.1 s, eta: 1:00:00"
    ),
    "PaddleSeg": lambda r: (
        f"2021-01-01 [INFO] [TRAIN] epoch: {r.epoch + 1}, iter: {r.step}/10000, "
        f"loss: {r.loss:.4f}, lr: 0.01, batch_cost: 0.3 | ETA 00:50:00"
    ),
    "detectron2": lambda r: (
        f"[01/01 10:00:00 d2.utils.events]:  eta: 1:00:00  iter: {r.step}  total_loss: {r.loss:.4f}"
        "  loss_cls: 0.5  time: 0.3  lr: 0.01  max_mem: 2000M"
    ),
    "GDR-Net": lambda r: (
        f"20231023_095643|core.utils.my_writer@171: eta: 15:06:27 iter: {r.step}/102400[49.5%] "
        f"time: 1.05   lr: 1.0000e-04  total_grad_norm: N/A total_loss: {r.loss:.4e} (1.5e+01)  "
        "loss_z: 2.5e-02 (8.6e-02)"
    ),
    "fairseq old": lambda r: (
        f"| epoch {r.epoch + 1:03d}  {r.batch} / {BATCHES} loss={r.loss:.3f} (1.50), wps=962, "
        f"bsz=32, lr=0.001, clip=100%, gnorm={r.norm:.4f}"
    ),
    "fairseq": lambda r: (
        f"2020-10-18 02:34:53 | INFO | train_inner | epoch {r.epoch + 1:03d}:    {r.batch} / "
        f"{BATCHES} loss={r.loss:.3f}, nll_loss=12.4, ppl=5496.24, ups=2.15, num_updates={r.step}, "
        f"lr=1.009, gnorm={r.norm:.3f}, clip=41, wall=54"
    ),
    "fairseq JSON": lambda r: (
        "2020-10-18 02:34:53 | INFO | train_inner | "
        + json.dumps(
            {
                "epoch": r.epoch + 1,
                "update": round(r.step / BATCHES, 3),
                "loss": f"{r.loss:.3f}",
                "nll_loss": "12.4",
                "num_updates": str(r.step),
                "lr": "1.009",
                "gnorm": f"{r.norm:.3f}",
                "wall": "54",
            }
        )
    ),
    "modded-nanogpt": lambda r: (
        f"step:{r.step}/5100 train_loss:{r.loss:.4f} train_time:100ms step_avg:nanms"
    ),
    "LLaMA-Factory": lambda r: json.dumps(
        {
            "current_steps": r.step,
            "total_steps": 4000,
            "loss": r.loss,
            "lr": 1e-5,
            "epoch": round(r.step / BATCHES, 2),
            "percentage": 1.25,
            "elapsed_time": "0:01:10",
        }
    ),
    "ms-swift": lambda r: json.dumps(
        {"loss": r.loss, "grad_norm": r.norm, "global_step/max_steps": f"{r.step}/4000"}
    ),
    "Keras": lambda r: f" {_bar(r)} - ETA: 1:08:46 - loss: {r.loss:.4f} - accuracy: 0.0938",
    "Keras 3": lambda r: (
        f"\x1b[1m {r.batch:>3}/{BATCHES}\x1b[0m \x1b[37m━━━━━━━━━━\x1b[0m \x1b[1m1:23\x1b[0m "
        f"89ms/step - accuracy: 0.0938 - loss: {r.loss:.4f}"
    ),
    "Lightning": lambda r: (
        f"Epoch {r.epoch}:  {r.batch}%|██▏   | {r.batch}/{BATCHES} [00:17<01:02,  4.47s/it, "
        f"v_num=0, train_loss={r.loss:.3f}]\r"
    ),
    "Marian": lambda r: (
        f"[2020-01-01 10:00:00] Ep. {r.epoch + 1} : Up. {r.step} : Sen. 64,000 : Cost "
        f"{r.loss:.8f} * 1,000,000 : Time 100.00s : 8000.00 words/s : gNorm {r.norm:.4f}"
    ),
    "OpenNMT": lambda r: (
        f"[2020-01-01 10:00:00,000 INFO] Step {r.step}/100000; acc:   3.05; ppl: 38725.40; "
        f"xent: {r.loss:.2f}; lr: 0.00001; 5000/6000 tok/s;     18 sec"
    ),
    "monodepth2": lambda r: (
        f"epoch {r.epoch:>3} | lr 0.000100 | batch {r.batch - 1:>6} | examples/s:   1.6 | "
        f"loss: {r.loss:.5f} | time elapsed: 00h00m26s"
    ),
    "MXNet": lambda r: (
        f"Epoch[{r.epoch}] Batch [{r.batch}]\tSpeed: 1000.00 samples/sec\tloss={r.loss:.6f}"
    ),
    "PaddleNLP": lambda r: (
        f"global step {r.step}, epoch: {r.epoch + 1}, batch: {r.batch}, loss: {r.loss:.4f}, "
        "speed: 3.2 step/s"
    ),
    "iter of epoch": lambda r: f"iter: {r.batch}/{BATCHES} loss: {r.loss:.4f}",
}
"""Tool -> the text that it prints for a row."""

FIRST = {"MetricLogger": 1, "ImageNet": 1, "timm": 1, "PaddleDetection": 1, "monodepth2": 1}
"""Tools that print batch 0 for the first batch: their steps are one smaller."""

BETWEEN: dict[str, Callable[[Row], str]] = {
    "MetricLogger": lambda r: (
        f"Averaged stats: lr: 0.0014  {_mean(r)}\nTest:  [  0/391]  eta: 0:01:00  loss: 0.7 (0.7)\n"
        "Test:  [ 10/391]  eta: 0:01:00  loss: 0.8 (0.7)"
    ),
    "ImageNet": lambda r: "Test: [  0/196]\tTime  1.0 ( 1.0)\tLoss 7.0e-01 (7.0e-01)\tAcc@1   1.0",
    "timm": lambda r: "Test: [   0/78]  Time: 1.000 (1.000)  Loss:   0.700 ( 0.700)  Acc@1: 1.0",
    "fairseq": lambda r: (
        f"2020-10-18 | INFO | valid | epoch {r.epoch + 1:03d} | valid on 'valid' subset | loss 0.7 "
        f"| nll_loss 5.2 | num_updates {r.step}\n2020-10-18 | INFO | train | epoch "
        f"{r.epoch + 1:03d} | loss 5.5 | nll_loss 5.2 | num_updates {r.step} | gnorm 1.2"
    ),
    "fairseq JSON": lambda r: (
        '2020-10-18 | INFO | valid | {"epoch": 1, "valid_loss": "0.7", "valid_num_updates": '
        f'"{r.step}"}}\n2020-10-18 | INFO | train | {{"epoch": 1, "train_loss": "5.5", '
        f'"train_num_updates": "{r.step}", "train_gnorm": "1.2"}}'
    ),
    "fairseq old": lambda r: "| epoch 010 | valid on 'valid' subset  1000 / 1311 loss=0.70",
    "modded-nanogpt": lambda r: f"step:{r.step}/5100 val_loss:0.7 train_time:0ms step_avg:nanms",
    "Keras": lambda r: f"Epoch {r.epoch + 2}/10",
    "Keras 3": lambda r: f"Epoch {r.epoch + 2}/10",
    "mmengine": lambda r: "08/03 22:09:24 - mmengine - INFO - Epoch(val) [1][50/500]  loss: 0.7",
}
"""Tool -> what it prints at the end of an epoch."""

BEFORE = {"Keras": "Epoch 1/10\n", "Keras 3": "Epoch 1/10\n"}


def log_of(tool: str, losses: Sequence[float]) -> str:
    """The log of a run by a tool."""
    text = BEFORE.get(tool, "")
    for row in rows_of(losses):
        text += TOOLS[tool](row) + "\n"
        if row.batch == BATCHES and tool in BETWEEN:
            text += BETWEEN[tool](row) + "\n"
    return text
