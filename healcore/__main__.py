"""The command line as a module: `python -m healcore`."""

from healcore.tools.cli import main

if __name__ == "__main__":
    main()
