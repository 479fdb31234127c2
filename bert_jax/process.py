"""What bert_jax changes in a process of its own: the command line, and the workers that it starts.

Everywhere else bert_jax is a library, which changes no hook, logger, filter, registry or
environment variable of the process, and prints nothing.
"""

import logging
import sys
import warnings
from typing import Any

# Whether this process is one of ours. It may keep compiled programs and freed memory, too, once it
# knows its devices, and show progress bars.
is_prepared = False

# Where the package logs what a person should know, and runs from Python their progress.
logger = logging.getLogger("bert_jax")


class _LineHandler(logging.Handler):
    """Prints each message as a plain line on standard error, whatever that is by then."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


def prepare_process() -> None:
    """Prepares a process of our own; once, however often it is called.

    - The package's log becomes plain lines on standard error.
    - Orbax, gcsfs and the threads that Orbax leaves behind are silent: they log errors that they
      raise as well, and ours are one line.
    - All of fsspec's and etils' connections to buckets are as patient as ours, and see what other
      processes have written since.
    """
    global is_prepared
    if is_prepared:
        return
    is_prepared = True
    logger.addHandler(_LineHandler(logging.WARNING))
    logger.propagate = False

    import fsspec
    from absl import logging as absl_logging

    for name in ("asyncio", "gcsfs", "absl"):  # Orbax logs by absl
        if name != "absl" or absl_logging.get_verbosity() < absl_logging.INFO:  # see --verbosity
            logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = _report_unraisable
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    # By its name, since gcsfs need not be installed.
    fsspec.register_implementation("gcs", "bert_jax.storage.gcs.PatientFileSystem", clobber=True)


def _report_unraisable(unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
