"""The changes that bert_jax makes to its own processes: the command line and its workers.

In any other process bert_jax is a library. It changes no hook, logger, filter, registry or
environment variable, and it prints nothing.
"""

import logging
import sys
import warnings
from typing import Any

# Whether this process is one of bert_jax's own. Only these keep compiled programs on disk, keep
# freed memory and show progress bars.
is_prepared = False

# The logger of the package: warnings, and the progress of runs that are started from Python.
logger = logging.getLogger("bert_jax")


class _LineHandler(logging.Handler):
    """Prints each message as a plain line on the standard error of that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


def prepare_process() -> None:
    """Prepares one of bert_jax's own processes. Further calls do nothing.

    - Warnings of the package become plain lines on standard error.
    - Orbax, gcsfs and threads that Orbax leaves behind are silent: they log the errors that they
      also raise, and the command line prints each error once, in one line.
    - All connections of fsspec and etils to buckets use `PatientFileSystem`, which retries, and
      they cache no lists, so that they see what other processes have written.
    """
    global is_prepared
    if is_prepared:
        return
    is_prepared = True
    logger.addHandler(_LineHandler(logging.WARNING))
    logger.propagate = False

    import fsspec
    from absl import logging as absl_logging

    # Orbax logs through absl, whose --verbosity asks for its messages.
    silent = ["asyncio", "gcsfs"]
    if absl_logging.get_verbosity() < absl_logging.INFO:
        silent.append("absl")
    for name in silent:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = _report_unraisable
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    # The class is named by a string, since gcsfs is optional.
    fsspec.register_implementation("gcs", "bert_jax.storage.gcs.PatientFileSystem", clobber=True)


def _report_unraisable(unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
