"""The end of a run.

`requests` asks for it (signals, the stop file, votes of the ranks), `exits` has the exceptions that
end the program, and `shutdown` saves, writes the reports and closes. `completeness` says whether a
run whose loop has ended by itself is complete.
"""
