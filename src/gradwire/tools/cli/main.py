"""Entry point of the ``gradwire`` command, which says in one line if its libraries are missing."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Run the command line and exit with its code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A path, for example, may hold what this encoding does not have: it is shown escaped, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            import rich  # noqa: F401
            import typer  # noqa: F401
        except ImportError as error:
            sys.exit(f'gradwire: the command line needs {error.name}: pip install "gradwire[cli]"')
        from gradwire.tools.cli.app import app
    except KeyboardInterrupt:
        print("gradwire: interrupted", file=sys.stderr)
        sys.exit(130)

    app(prog_name="gradwire")


def _open_missing_streams() -> None:
    """Open the null device in place of each standard stream that was closed when this process began, as by ``>&-``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, that of the stream. A file that is opened later would get it otherwise,
            # and with it what libraries and child processes print.
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode))


if __name__ == "__main__":
    main()
