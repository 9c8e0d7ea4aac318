"""Tells what a user can mend from what only we can: the first is said in lines, the second keeps its traceback."""

from __future__ import annotations

import dis
from types import TracebackType

from roll.config.problems import ConfigError

OURS = "roll."
RAISE = dis.opmap["RAISE_VARARGS"]


def mistake(error: BaseException) -> str | None:
    """The lines that tell a user what to mend; None for an error of the program.

    A ValueError that a `raise` in this package made is a user's mistake, since what cannot happen is an assertion here.
    One that Python or a library raised is an error of the program. So is every OSError that names no file.
    """
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError) and error.__traceback__ is not None and _raised_here(error.__traceback__):
        return str(error)
    return None


def _raised_here(trace: TracebackType) -> bool:
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_code
    return trace.tb_frame.f_globals.get("__name__", "").startswith(OURS) and code[trace.tb_lasti] == RAISE
