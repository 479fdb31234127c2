"""`bert-jax COMMAND`: thin functions over the library, and the table of exit codes."""

import errno
import io
import os
import sys
from collections.abc import Sequence

from bert_jax import arguments, errors
from bert_jax.conformance import command as conformance
from bert_jax.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a usage error leaves by SystemExit."""
    words = _with_layers(conformance.one_command(sys.argv[1:] if argv is None else argv))
    args, unknown = arguments.parser().parse_known_args(words)
    if unknown:
        args.complain_usage(f"unrecognized arguments: {' '.join(unknown)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal speaks UTF-8
    if getattr(args, "cache_dir", None):
        # For all of this process and those it starts: where things lie here is no part of a claim.
        os.environ["BERT_JAX_CACHE_DIR"] = os.path.abspath(args.cache_dir)
    try:
        code = args.command(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()
        return errors.FAILED
    except (Exception, KeyboardInterrupt) as error:
        if args.debug and isinstance(error, Exception):
            raise
        return _complain(error)


def _with_layers(words: list[str]) -> list[str]:
    """`--layers -4,-3` as one word: argparse takes the second for a flag."""
    found: list[str] = []
    for word in words:
        if found and found[-1] == "--layers":
            word = f"{found.pop()}={word}"
        found.append(word)
    return found


def _complain(error: BaseException) -> int:
    """Says in one line what is at fault; returns the exit code."""
    if isinstance(error, OSError):
        if error.filename is None and error.errno == errno.ENOSPC:
            error.filename = "standard output"  # all other files are named where they are written
            _drop_output()
        if error.filename is not None:
            error = InputError(f"{error.filename}: {error.strerror}")
    line, code = errors.of_error(error)
    print(line, file=sys.stderr)
    return code


def _drop_output() -> None:
    """Nobody takes our output any more, and the interpreter must not write to it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
