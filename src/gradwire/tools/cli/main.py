"""Entry point of the ``gradwire`` command, which says in one line if its libraries are missing."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command line and exit with its code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A path, for example, may hold what this encoding does not have: it is shown escaped, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f'gradwire: the command line needs {error.name}: pip install "gradwire[cli]"')
    try:
        # Takes seconds, since it imports torch.
        from gradwire.tools.cli.app import app
    except KeyboardInterrupt:
        print("gradwire: interrupted", file=sys.stderr)
        sys.exit(130)

    app(prog_name="gradwire")


if __name__ == "__main__":
    main()
