"""What a step shows: its records, incidents, the user's hooks, and whether the model is damaged."""
