"""What healcore does on one GPU: checks and measurements."""
