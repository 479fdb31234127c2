"""`python -m launch NAME ARGS`: runs the launcher, or asks what was launched."""

import importlib
import sys

# Each command's module and function.
COMMANDS = {
    "local_pod": ("launch.local_pod", "main"),
    "tpu_vm": ("launch.tpu_vm", "main"),
    "gke": ("launch.gke", "main"),
    "status": ("launch.asked", "status"),
    "logs": ("launch.asked", "logs"),
    "stop": ("launch.asked", "stop"),
}


def main() -> int:
    """Returns the command's exit code."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"launch: name one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, function = COMMANDS[sys.argv[1]]
    return getattr(importlib.import_module(module), function)(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
