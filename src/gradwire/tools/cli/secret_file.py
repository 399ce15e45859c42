"""The file of a membership's secret, which the coordinator writes and the workers read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from gradwire.errors import GradwireError, HyperparameterError

MOST_SECRET_BYTES = 1024


def secret_of(path: Path) -> str:
    """Return the secret in a file; draw one, and write it for its owner alone, if there is no file.

    Raises:
        HyperparameterError: the file is empty or not ASCII text.
        GradwireError: it cannot be read or written.
    """
    # Imports torch, which a process that only reads a secret does without.
    from gradwire.publish.disk import removed_on_error

    try:
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            # An empty file, as a full disk leaves, would be refused from then on.
            with removed_on_error(path), os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(24) + "\n")
    except OSError as error:
        raise GradwireError(f"the secret in {path}: {error}") from error
    return secret_in(path)


def secret_in(path: Path) -> str:
    """Return the secret in a file that is there.

    Raises:
        HyperparameterError: the file is empty or not ASCII text.
        GradwireError: it cannot be read.
    """
    try:
        with path.open("rb") as read:
            text = read.read(MOST_SECRET_BYTES).decode("ascii").strip()
    except UnicodeDecodeError:
        raise HyperparameterError(f"{path} holds no secret: 16 to 64 ASCII characters are needed") from None
    except OSError as error:
        raise GradwireError(f"the secret in {path}: {error}") from error
    if not text:
        raise HyperparameterError(f"{path} is empty: `gradwire coordinate` draws a secret where there is no file")
    return text
