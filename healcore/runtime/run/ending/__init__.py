"""The end of a run.

`requests` asks for it (signals, the stop file, votes of the ranks), `exits` has the exceptions that
end the program, and `shutdown` saves, writes the reports and closes. `stopping` ends a run that
cannot train on, and `outcome` collects how a run ends. `completeness` says what is missing in a run
whose loop has ended by itself, and `judgement` whether such a run has trained.
"""
