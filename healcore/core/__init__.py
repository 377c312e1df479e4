"""Judges training steps by a policy, in pure functions that import no array library.

engine           judges a step: a new state and a `Decision`
detectors        judge the signals of one step, and learn them
clipping         the clipping rules
signals          the signals of one step, raw and checked
decision         the engine's answer for one step, and the flags of causes and actions
step_record      the values of a step and its decision, as the host reads them
baseline         averages that are robust to outliers
ranges           which values a key of a policy may have
trees            states as trees of arrays, and their saved form
array_namespace  the array functions with which the core computes, and its float32 arithmetic
tape             the engine's step as one straight Python function, for NumPy scalars
errors           errors that several adapters raise, and texts that are safe for a terminal
"""
