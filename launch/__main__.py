"""`python -m launch NAME ARGS`: runs the launcher of that name."""

import importlib
import pathlib
import sys


def main() -> int:
    """Returns the launcher's exit code."""
    files = pathlib.Path(__file__).parent.glob("[a-z]*.py")
    names = sorted(path.stem for path in files)
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(f"launch: name one of: {', '.join(names)}", file=sys.stderr)
        return 2
    return importlib.import_module(f"launch.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
