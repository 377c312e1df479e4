"""Failures on the host: what an exception means, which policy rule answers it, and retries."""
