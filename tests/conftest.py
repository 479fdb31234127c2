import os
import pathlib
import sys

TESTS = pathlib.Path(__file__).parent
sys.path.insert(0, str(TESTS))

import small_run  # noqa: E402

# Before jax starts. Four devices on a CPU: what shards here shards on a pod. Tests compile the
# same small programs again and again, so they share what is compiled, and it is compiled quickly;
# the commands that tests start are compiled as for a user.
os.environ.update(small_run.settings(devices=4))
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
