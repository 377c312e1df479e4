"""Why a run ended: the facts, the diagnosis, and the file with both."""
