"""Command-line tools, and the libraries that they use.

cli           the command `healcore`, with its subcommands
traces        reads the logs of recorded runs
replay        runs a policy over a recorded run
probe         judges a loss curve, an optimizer state or a checkpoint
report        reports a run or a replay, as a page or a figure
demo          follows the runs of `healcore demo`, and compares them
demo_process  trains the demo's runs of one framework
output        what the commands print and write
"""
