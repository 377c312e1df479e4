"""What a run shows its user, while it runs and at its end.

run_log          writes events and metrics to files, and lines to the console
trackers         passes events and metrics to tracking services
run_outcome      how a run has ended, as data
diagnosis        explains the outcome of a run as text
faults_found     lists the faults of a run, as a part of the diagnosis
nonfinite_steps  explains steps whose loss, gradient or update is not finite
postmortem       writes the outcome and its diagnosis to a file, and reads the file
"""
