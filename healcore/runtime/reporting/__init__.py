"""What a run shows its user, while it runs and at its end.

run_log          writes events and metrics to files, and lines to the console
trackers         passes events and metrics to tracking services
diagnosis        how a run has ended, as data and as text
nonfinite_steps  explains steps whose loss, gradient or update is not finite
postmortem       writes the outcome and its diagnosis to a file, and reads the file
"""
