"""How a command fails: one line on stderr and an exit code, 1 for what did not work, 2 for what was asked wrongly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dualmap.core.errors import DualMapError
from dualmap.rpc.route_calls import CallFailed
from dualmap.runtime.lifetime import StartError


class CommandError(Exception):
    """What a user can act on, in one line. ``exit_code`` 2 says that the command line itself is wrong."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def plain(error: CallFailed) -> str:
    """A failed call in words for a person: the server's own where it answered."""
    if not error.reason:
        match error.code:
            case "UNAVAILABLE":
                return f"{error.target} does not answer; is it running, and is the address right?"
            case "DEADLINE_EXCEEDED":
                return f"{error.target} did not answer in time"
            case "UNIMPLEMENTED":
                return f"{error.target}: another service listens at this address"
    return f"{error.target}: {error.message or error.code}"


def say(message: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"dualmap: {' '.join(message.split())}\n")


@contextmanager
def failing_plainly() -> Iterator[None]:
    """Turns what a user can act on into its line and exit code; anything else is a defect and shows itself."""
    try:
        yield
    except CommandError as error:
        say(str(error))
        raise typer.Exit(error.exit_code) from None
    except CallFailed as error:
        say(plain(error))
        raise typer.Exit(1) from None
    except (DualMapError, StartError) as error:
        say(str(error))
        raise typer.Exit(1) from None
