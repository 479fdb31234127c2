"""`rehearsed.py NOTES PROGRAM ARGS...`: runs PROGRAM, and notes down which faults came to us.

A line of JSON for each error of the network that the clients of buckets did not get over by
themselves: what `storage.retry` was asked about and took for one that passes.
"""

import json
import os
import runpy
import sys
import threading
import time

from bert_jax.storage import retry

NOTES = sys.argv[1]
_LOCK = threading.Lock()


def noting(judge):
    def judged(error):
        verdict = judge(error)
        if verdict:
            text = f"{type(error).__name__}: {error}"[:300]
            with _LOCK, open(f"{NOTES}-{os.getpid()}", "a") as file:
                file.write(json.dumps([time.monotonic(), text]) + "\n")
        return verdict

    return judged


retry.is_transient, retry.is_denied = noting(retry.is_transient), noting(retry.is_denied)
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
