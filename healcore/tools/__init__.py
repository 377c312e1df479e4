"""Command-line tools, and the libraries that they use.

cli           the command `healcore`, with its subcommands
traces        reads the logs of recorded runs
replay        runs a policy over a recorded run
probe         judges a loss curve, an optimizer state or a checkpoint
report        reports a run or a replay, as a page or a figure
demo          trains the runs of `healcore demo`
output        what the commands print and write
"""
