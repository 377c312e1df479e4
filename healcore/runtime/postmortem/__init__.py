"""The postmortem of a run: what happened, why the run ended, and the file with both."""
