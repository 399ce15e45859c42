"""From exceptions to exit codes: one line on standard error, no traceback unless asked for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer

__all__ = ["FAILED", "INTERRUPTED", "USAGE", "handled"]

FAILED, USAGE, INTERRUPTED = 1, 2, 130


@contextlib.contextmanager
def handled(debug: bool) -> Iterator[None]:
    """Turn gradwire's errors and Ctrl-C into one line and an exit code; ``debug`` lets exceptions through."""
    from gradwire.errors import GradwireError, HyperparameterError
    from gradwire.tools.experiments.errors import UsageError

    try:
        yield
    except KeyboardInterrupt:
        print("gradwire: interrupted; all workers are ended", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except GradwireError as error:
        if debug:
            raise
        print(f"gradwire: {' '.join(str(error).split())}", file=sys.stderr)
        usage = isinstance(error, (HyperparameterError, UsageError))
        raise typer.Exit(USAGE if usage else FAILED) from None
