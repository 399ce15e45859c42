"""What a report cannot be made of."""

from __future__ import annotations

from gradwire.errors import GradwireError

__all__ = ["ReportError"]


class ReportError(GradwireError):
    """A run folder is missing, incomplete or corrupt; the message names the file and the line."""
