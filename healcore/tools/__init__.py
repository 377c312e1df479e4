"""Command-line tools, and the libraries that they use."""
