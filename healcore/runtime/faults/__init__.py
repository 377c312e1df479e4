"""Classifies exceptions, describes each kind of failure, and retries network calls.

classification  what kind of trouble an exception is
failures        what each cause means, and what a person should check
microbatches    the parts of a batch, to repeat a step that ran out of memory
retry           repeats calls that fail in the network
"""
