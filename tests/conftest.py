import os
import pathlib
import sys

# Four devices on a CPU, before jax starts: what shards here shards on a pod.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()
sys.path.insert(0, str(pathlib.Path(__file__).parent))
