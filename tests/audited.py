"""Runs commands and prints, as JSON, what the interpreter was asked to do that data may not cause.

`python audited.py HOSTILE WRITABLE COMMANDS`: the folder whose files nobody may run, the folders
that may be written, and lists of arguments, the last two as JSON. Started by test_security.py.
"""

import json
import os
import sys

HOSTILE, WRITABLE, COMMANDS = os.path.realpath(sys.argv[1]), *map(json.loads, sys.argv[2:4])
_PLACES = tuple(os.path.realpath(place) + os.sep for place in WRITABLE)
# Event: how many of its arguments are paths that are changed.
_CHANGES = {"os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1}
_CHANGES |= {"os.symlink": 2, "os.link": 2, "shutil.rmtree": 1, "shutil.move": 2}
_STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "os.spawn")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

found: list[str] = []


def is_hostile(path) -> bool:
    # "<string>" is of no file, and a library without a folder of none here.
    if not isinstance(path, str) or path.startswith("<") or (".so" in path and os.sep not in path):
        return False
    return os.path.realpath(path).startswith(HOSTILE + os.sep)


def may_be_written(path) -> bool:
    if isinstance(path, int) or path is None or os.fspath(path) == os.devnull:
        return True
    return (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(_PLACES)


def may_be_changed(path) -> bool:
    """As `may_be_written`, of a path whose last part is not followed if it is a link."""
    if isinstance(path, int) or path is None:
        return True
    return may_be_written(os.path.dirname(os.path.abspath(os.fsdecode(path))))


def watch(event: str, args: tuple) -> None:
    if event == "exec" and is_hostile(getattr(args[0], "co_filename", None)):
        found.append(f"ran {args[0].co_filename}")
    elif event == "compile" and is_hostile(args[1]):
        found.append(f"compiled {args[1]}")
    elif event in ("import", "ctypes.dlopen") and is_hostile(args[-1 if event != "import" else 1]):
        found.append(f"loaded {args}")
    elif event == "pickle.find_class":
        found.append(f"unpickled {args[1:]}")
    elif event in _STARTS and args[0] != "fc-list":  # Matplotlib asks which fonts there are
        found.append(f"started {args[:2]}")
    elif event == "socket.connect":
        found.append(f"connected {args[1:]}")
    elif event == "open" and args[2] & _WRITES and not may_be_written(args[0]):
        found.append(f"opened {args[0]} to write")
    # Names below an open folder (dir_fd, an integer behind them) belong to a shutil.rmtree.
    elif event in _CHANGES and not any(type(a) is int and a >= 0 for a in args[1:]):
        wrong = [path for path in args[: _CHANGES[event]] if not may_be_changed(path)]
        found.extend(f"{event} {path}" for path in wrong)


def main() -> None:
    from broken import call

    sys.addaudithook(watch)
    codes = [call(command) for command in COMMANDS]
    print(json.dumps({"found": found, "codes": codes}))


main()
