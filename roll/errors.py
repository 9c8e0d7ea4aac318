"""Errors that a user can mend, and the lines that tell them."""

from __future__ import annotations


class UserError(ValueError):
    """A setting, file or argument that cannot be used. The message names it, and the value that was found.

    What cannot happen is an assertion. Every other exception is an error of the program.
    """


def mistake(error: BaseException) -> str | None:
    """The lines that tell a user what to mend; None for an error of the program, which keeps its traceback.

    Beside UserError these are the OSErrors that name a file.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return None
