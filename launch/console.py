"""What launchers say, and the one question they ask."""

import codecs
import contextlib
import os
import selectors
import sys
from collections.abc import Callable

from bert_jax.errors import printable

_ANSWER_SECONDS = 60.0


def say(line: str) -> None:
    """A line of ours; a terminal that has gone away ends nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(f"launch: {printable(line)}", file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """A line of a result."""
    print(line, flush=True)


def shower() -> Callable[[bytes], None]:
    """Shows pieces of a log, without what would command a terminal."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(piece: bytes) -> None:
        text = decoder.decode(piece)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write("".join(c if c in "\n\t" else printable(c) for c in text))
            sys.stdout.flush()

    return show


def has_terminal() -> bool:
    """Whether somebody can be asked: a job in the background would be stopped for reading."""
    try:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # closed, or none, or not ours
        return False


def agreed(question: str) -> bool:
    """Whether somebody says yes; nobody's answer within a minute is a yes, and Ctrl-C, too."""
    if not has_terminal():
        return True
    say(f"{question} [Y/n; yes after {_ANSWER_SECONDS:g} seconds]")
    try:
        with selectors.PollSelector() as terminal:  # select() knows no file above 1,023
            terminal.register(sys.stdin, selectors.EVENT_READ)
            ready = terminal.select(_ANSWER_SECONDS)
        return not (ready and sys.stdin.readline().strip().lower().startswith("n"))
    except (KeyboardInterrupt, OSError, ValueError):
        return True
