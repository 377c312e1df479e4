"""Shared by the arms: parameters, an optimizer's part of a program, optional packages."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.healbench.problem import MAIN, Problem


class Unavailable(Exception):
    """The arm cannot be run here, and why. Raised where the arm is made."""


def package(module: str, install: str) -> ModuleType:
    """An optional package's module.

    Args:
        module: what to import.
        install: the requirement that brings it, as in requirements/bench.txt.

    Raises:
        Unavailable: it is not installed, or fails to import.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{install} is not installed here ({error})") from error
    except Exception as error:
        raise Unavailable(f"{install} fails to import: {type(error).__name__}: {error}") from error


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that are not None."""
    return [each.grad for each in parameters(optimizer) if each.grad is not None]


def scaler_skips(problem: Problem, optimizer: Optimizer, norm: float) -> bool:
    """Whether the program's GradScaler leaves this step out by itself, in every arm alike.

    Args:
        problem: whose scaler.
        optimizer: gradients are unscaled.
        norm: of these gradients.
    """
    if problem.scaler is None or abs(norm) < float("inf"):
        return False
    return not all(bool(torch.isfinite(each).all()) for each in gradients(optimizer))


def owned(problem: Problem, optimizer: str) -> nn.Module:
    """The model to pass to a package that handles one model and one optimizer.

    The whole program's modules, or, of a program with several optimizers, the parameters of one.
    """
    if len(problem.optimizers) == 1:
        return nn.ModuleDict(problem.modules)
    return nn.ParameterList(parameters(problem.optimizers[optimizer]))


def principal(problem: Problem) -> str:
    """The optimizer whose loss stands for the run: `main`, or the first."""
    return MAIN if MAIN in problem.optimizers else next(iter(problem.optimizers))


@contextlib.contextmanager
def silent(name: str) -> Iterator[None]:
    """Hides what this logger and those below it log."""
    logger, nobody = logging.getLogger(name), logging.NullHandler()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(nobody)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(nobody)
        logger.propagate = propagate
        logger.setLevel(level)
