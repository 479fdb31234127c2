"""What Orbax need not say: it raises its errors, too, and each of its threads logs them anew."""

import logging
import sys
import warnings
from typing import Any

from absl import logging as absl_logging


def keep() -> None:
    """From here on, in this process."""
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _overhear_closed_loops
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


def _overhear_closed_loops(unraisable: Any) -> None:
    """Passes over what threads of a failed load say when Orbax has gone: their loop is closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
