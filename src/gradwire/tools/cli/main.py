"""Entry point of the ``gradwire`` command, which says in one line if its libraries are missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f'gradwire: the command line needs {error.name}: pip install "gradwire[cli]"')
    from gradwire.tools.cli.app import app

    app(prog_name="gradwire")


if __name__ == "__main__":
    main()
