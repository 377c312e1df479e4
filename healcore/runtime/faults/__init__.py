"""Classifies exceptions, describes each kind of failure, and retries network calls."""

from healcore.runtime.faults.classify import classify
from healcore.runtime.faults.failures import FAILURES, Failure, Fault, Severity

__all__ = ["FAILURES", "Failure", "Fault", "Severity", "classify"]
