"""Classifies exceptions, describes each kind of failure, and retries network calls."""

from healcore.runtime.faults.failures import FAILURES, Failure, Fault, Severity, classify

__all__ = ["FAILURES", "Failure", "Fault", "Severity", "classify"]
