"""From the records of a step to a rollback: orders, evidence, budgets, the journal, restoring."""
