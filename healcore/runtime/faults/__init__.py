"""Failures on the host: what an exception means, which policy rule answers it, and retries."""

from healcore.runtime.faults.classify import classify
from healcore.runtime.faults.failures import FAILURES, Failure, Severity
from healcore.runtime.faults.fault import Fault

__all__ = ["FAILURES", "Failure", "Fault", "Severity", "classify"]
