"""A work item of `prepare` that ends its process; a worker imports it by its name."""

import dataclasses
import os
import signal


@dataclasses.dataclass(frozen=True)
class Item:
    """See `bert_jax.data.workers.WorkItem`."""

    location: str
    name: str
    bytes: int = 1

    def make(self, folder, tick):
        """Ends the process as the kernel does where memory is short."""
        os.kill(os.getpid(), signal.SIGKILL)
