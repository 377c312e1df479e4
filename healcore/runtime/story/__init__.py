"""Reports of a run: console lines and events, the postmortem, trackers.

`run_log` writes events, metrics and lines; `trackers` passes them to tracking services. `diagnosis`
explains the end of a run, `postmortem` writes it to a file, and `program_clip` notices that a
program clips its gradients itself.
"""
