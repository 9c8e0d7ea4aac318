"""Exit statuses of the commands in examples/, and the lines that tell a mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable

from roll.errors import UserError, mistake
from roll.workers.errors import WorkerError

FAILED = 1
MISTAKE = 2
STOPPED = 130


def exit_status(command: Callable[[], None]) -> int:
    """Run a command to its end: 0 done, 1 a worker failed, 2 something that the user can mend, 130 stopped by Ctrl-C.

    A mistake is told in lines on standard error, the failure of a worker with that rank's own traceback. Errors of the
    program pass through with theirs.
    """
    try:
        command()
    except KeyboardInterrupt:
        sys.stdout.write("stopped; every file that was begun is whole\n")
        return STOPPED
    except WorkerError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    except (UserError, OSError) as error:
        lines = mistake(error)
        if lines is None:
            raise
        sys.stderr.write(f"{lines}\n")
        return MISTAKE
    return 0
