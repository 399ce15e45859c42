"""``python -m gradwire``: the command line."""

from gradwire.tools.cli.main import main

if __name__ == "__main__":
    main()
