"""Notices a step that never returns, from a small child process of the training process.

The training process writes a `heartbeat`. Its `guard`, a child process that imports the standard
library only, reads it. At a time-out the guards of all ranks collect the Python stacks (`alarm`,
`watched_process`), a `report` writes them into the events and the postmortem, and if the policy
says so, every guard ends its process. `hang_guard` is the training process's side. docs/hang.md
describes what counts as a hang.
"""
