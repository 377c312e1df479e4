"""State machines in pure functions; the array namespace is an argument, not a framework."""
