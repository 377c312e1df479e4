"""Classifies exceptions, describes each kind of failure, and retries network calls."""
