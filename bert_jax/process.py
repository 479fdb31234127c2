"""The changes that bert_jax makes to its own processes: the command line and its workers.

In any other process bert_jax is a library. It changes no hook, logger, filter, registry or
environment variable, and it prints nothing.
"""

import logging
import sys
import time
import warnings
from typing import Any

# Whether this process is one of bert_jax's own. Only such a process enables the compilation cache,
# changes settings of the memory allocator and shows progress bars.
is_own_process = False

# The index of this process among those of a run; `distributed.peers` sets it.
index = 0

# The logger of the package: warnings, and the progress of runs that are started from Python.
logger = logging.getLogger("bert_jax")


class _LineHandler(logging.Handler):
    """Prints each message as a line on standard error.

    Lines are plain on a terminal. Elsewhere they begin with severity, time and process index, as
    absl's do: `W1129 14:05:31 process 2] `.
    """

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if not sys.stderr.isatty():
            when = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
            line = f"{record.levelname[0]}{when} process {index}] {line}"
        print(line, file=sys.stderr, flush=True)


def prepare_process() -> None:
    """Prepares one of bert_jax's own processes. Further calls do nothing.

    - Warnings of the package become lines on standard error.
    - Logs of Orbax and gcsfs are off: they log the errors that they also raise, and the command
      line prints each error once, in one line. So are those of bm25s, which log each call.
    - fsspec and etils read and write buckets through `RetryingFileSystem`, which retries requests.
      Lists of folders are not cached, so that files of other processes are seen.
    """
    global is_own_process
    if is_own_process:
        return
    is_own_process = True
    logger.addHandler(_LineHandler(logging.WARNING))
    logger.propagate = False

    import fsspec
    from absl import logging as absl_logging

    # Orbax logs through absl: its messages are shown if --verbosity asks for them.
    silent = ["asyncio", "gcsfs"]
    if absl_logging.get_verbosity() < absl_logging.INFO:
        silent.append("absl")
    for name in silent:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("bm25s").disabled = True  # its import sets the level DEBUG
    sys.unraisablehook = _report_unraisable
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    # fsspec opens gs:// by the class that is registered as "gcs". Its name is a string, since gcsfs
    # may not be installed.
    fsspec.register_implementation("gcs", "bert_jax.storage.gcs.RetryingFileSystem", clobber=True)


def _report_unraisable(unraisable: Any) -> None:
    # gcsfs and aiohttp raise this when they are finalized after the loop has ended.
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
