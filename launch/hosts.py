"""The files that a host of a TPU slice is given: what to run, and scripts that do it.

They lie in one folder of the user's home, where the run's output and its exit code are left, too:

    install.sh    makes venv/ of the wheel, once
    start.sh      starts run.sh in a session that outlives the connection
    run.sh        the run; its output goes to run.log, its exit code to run.exit
    state.sh      prints in one line how it stands
    stop.sh       asks the run to save and end

Whether it runs is known by a lock that the system frees at its death: the number of a process may
belong to another after a restart of the machine. Those who look at it share it, so that none takes
another for the run.
"""

import os
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Mapping

import bert_jax
from bert_jax.errors import InputError
from bert_jax.storage.workdir import named_errors, write_atomic

from . import checks
from .commands import run, say
from .spec import EXPERIMENT, Spec, staging

CONSTRAINTS = "constraints.txt"
# In the staging folder, while the wheel is built.
_ARCHIVE, _SOURCE = "commit.tar", "source"
_BUILD_SECONDS = 900.0

# Begins the line of state.sh: ssh and gcloud print lines of their own.
_MARK = "bert-jax-host"
_STATE = re.compile(rf"{_MARK} (\S+) (absent|running|ended [0-9]+|lost)\s*$", re.MULTILINE)

# Where jax's coordinator listens: on the address inside the network alone, which all hosts use.
_PORT = 8482
_ADDRESS = "http://metadata.google.internal/computeMetadata/v1/instance/network-interfaces/0/ip"

# Of a Python for machines whose own is older than what we need: of a tool that brings one.
_UV = "uv>=0.8,<1"

_INSTALL = """\
#!/usr/bin/env bash
# Makes venv/ of the wheel, unless it is there, or a run uses the one that is.
set -eu
cd "$(dirname "$0")"
flock --shared --nonblock run.lock true || exit 0
wheel={wheel}
[ "$(cat venv/installed 2>/dev/null)" = "$(sha256sum "$wheel" {constraints})" ] && exit 0
python=
for version in 3.13 3.12 3.11; do
  if "python$version" -c 'import ensurepip' 2>/dev/null; then python="python$version"; break; fi
done
if [ -z "$python" ]; then
  python3 -m pip install --quiet --user {uv}
  python3 -m uv python install --quiet 3.12
  python="$(python3 -m uv python find --managed-python 3.12)"
fi
rm -rf venv
"$python" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \\
  --constraint {constraints} "./$wheel[tpu,gcs]"
sha256sum "$wheel" {constraints} > venv/installed
"""

_START = """\
#!/usr/bin/env bash
# Starts the run, unless it runs, in a session that outlives this connection.
set -eu
cd "$(dirname "$0")"
flock --shared --nonblock run.lock true || exit 0
rm -f run.exit run.pid
[ -f run.log ] && mv run.log run.log.old
: > run.log
setsid nohup bash run.sh < /dev/null >> run.log 2>&1 &
for _ in $(seq 300); do [ -f run.pid ] && exit 0; sleep 0.1; done
echo "start.sh: the run did not start" >&2
exit 1
"""

_RUN = """\
#!/usr/bin/env bash
# The run: its exit code goes to run.exit.
{{  # read as a whole, whatever becomes of this file meanwhile
cd "$(dirname "$0")"
exec 9> run.lock
flock --timeout 10 9 || exit 1  # a look at the lock may hold it for a moment
{environment}
address="$(curl -sf -H 'Metadata-Flavor: Google' \\
  {address})"
if [ -n "$address" ]; then  # the coordinator listens inside the network alone
  export JAX_COORDINATOR_PORT={port} JAX_COORDINATOR_BIND_ADDRESS="$address:{port}"
fi
PATH="$PWD/venv/bin:$PATH"
{command} 9>&- &
echo $! > run.pid
wait $!
echo $? > run.exit.new
mv run.exit.new run.exit
exit
}}
"""

_STATE_SCRIPT = """\
#!/usr/bin/env bash
# Prints how the run stands: absent, running, ended CODE, or lost (killed with this script's like).
cd "$(dirname "$0")"
if ! [ -f run.log ]; then state=absent
elif ! flock --shared --nonblock run.lock true; then state=running
elif [ -f run.exit ]; then state="ended $(cat run.exit)"
else state=lost
fi
echo "{mark} $(hostname) $state"
"""

_STOP = """\
#!/usr/bin/env bash
# Asks the run to save and end.
cd "$(dirname "$0")"
if ! flock --shared --nonblock run.lock true; then kill -s TERM "$(cat run.pid)"; fi
"""


def files(spec: Spec, wheel: str) -> dict[str, str]:
    """Returns the names and texts of the files, except the wheel and the constraints.

    Args:
      spec: what is run.
      wheel: the file's name.
    """
    constraints = shlex.quote(CONSTRAINTS)
    return {
        EXPERIMENT: spec.config,
        **spec.code,
        "install.sh": _INSTALL.format(
            wheel=shlex.quote(wheel), constraints=constraints, uv=shlex.quote(_UV)
        ),
        "start.sh": _START,
        "run.sh": _RUN.format(
            environment=_exports(spec.environment),
            address=shlex.quote(_ADDRESS),
            port=_PORT,
            command=shlex.join(spec.command()),
        ),
        "state.sh": _STATE_SCRIPT.format(mark=_MARK),
        "stop.sh": _STOP,
    }


def folder(name: str) -> str:
    """Returns where the files of a launch lie on a host, below the user's home."""
    return f"bert-jax/{name}"


def parse_states(output: str) -> dict[str, str]:
    """Returns what state.sh printed on several hosts, by the hosts' names.

    A state is "running"; "ended CODE"; "absent": the run was never started there; or "lost": it was
    killed with all around it.
    """
    return dict(_STATE.findall(output))


def exit_codes(states: Mapping[str, str], count: int) -> list[int | None]:
    """Returns the exit codes of `count` hosts; None of one that has none, or does not answer."""
    words = [state.split() for state in states.values()]
    codes = [int(code[0]) if code else None for _, *code in words]
    return [*codes, *[None] * (count - len(codes))]


def _exports(environment: Mapping[str, str]) -> str:
    given = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return f"export {' '.join(given)}" if given else "# no variables of its own"


# --- The wheel ----------------------------------------------------------------------------------


def wheel() -> str:
    """Returns the name of the wheel of the checkout that this is."""
    return f"bert_jax-{bert_jax.__version__}-py3-none-any.whl"


def build_commands(commit: str, folder: pathlib.Path) -> list[list[str]]:
    """Returns the commands that fill a folder with the wheel of a commit, and its constraints.

    What is shipped is the commit, whatever else lies here.
    """
    archive, source = os.fspath(folder / _ARCHIVE), os.fspath(folder / _SOURCE)
    return [
        [
            *("git", "-C", os.fspath(checks.ROOT), "archive", "--format=tar"),
            *(f"--output={archive}", commit),
        ],
        ["mkdir", source],
        ["tar", "-x", "-f", archive, "-C", source],
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--wheel-dir", os.fspath(folder), source),
        ],
        ["cp", os.path.join(source, CONSTRAINTS), os.fspath(folder)],
        ["rm", "-r", source, archive],
    ]


def put_together(spec: Spec, commit: str) -> list[str]:
    """Fills the staging folder; returns the paths of the files to copy to each host."""
    folder = staging(spec.name)
    with named_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    say(f"building the wheel of commit {commit[:12]}")
    for argv in build_commands(commit, folder):
        done = run(argv, _BUILD_SECONDS)
        if done.code:
            raise InputError(f"the wheel of commit {commit}: cannot be built ({done.complaint})")
    for name, text in files(spec, wheel()).items():
        write_atomic(folder / name, text)
    return sorted(map(os.fspath, folder.iterdir()))
