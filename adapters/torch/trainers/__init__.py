"""healcore within the trainers that people use; each imports its library on first use."""
