"""How much of its time a run of many ranks trains for good, by policy and checkpoint interval."""
