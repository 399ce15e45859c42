"""What the package logs, kept for a test."""

from __future__ import annotations

import logging


class LogTexts(logging.Handler):
    """Keeps the messages of a logger, as ``texts``."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
