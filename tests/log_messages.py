"""What a logger is told within a block, in this process or in a rank's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Messages(logging.Handler):
    """Keeps the text of every record."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def messages(logger_name: str) -> Iterator[list[str]]:
    """The messages that the named logger gets, as they come."""
    handler, logger = Messages(), logging.getLogger(logger_name)
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
