"""The command line tools, and the libraries behind them."""
