"""The files that a host of a TPU slice is given: what to run, and scripts that do it.

They lie in one folder of the user's home, where the run's output and its exit code are left, too:

    install.sh    makes venv/ of the wheel, once
    start.sh      starts run.sh in a session that outlives the connection
    run.sh        the run; its output goes to run.log, its exit code to run.exit
    state.sh      says in one line how it stands
    follow.sh     shows run.log from a byte on, until the run has ended or a while has passed
    stop.sh       asks the run to save and end

Whether it runs is told by a lock that the system frees at its death: the number of a process may
belong to another after a restart of the machine. Those who look at it share it, so that none takes
another for the run.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping

from launch.spec import EXPERIMENT, Spec

CONSTRAINTS = "constraints.txt"

# Begins the line of state.sh: ssh and gcloud have words of their own.
_MARK = "bert-jax-host"
_STATE = re.compile(rf"{_MARK} (\S+) (absent|running|ended ([0-9]+)|lost)\s*$", re.MULTILINE)

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
# Says how the run stands: absent, running, ended CODE, or lost (killed with this script's like).
cd "$(dirname "$0")"
if ! [ -f run.log ]; then state=absent
elif ! flock --shared --nonblock run.lock true; then state=running
elif [ -f run.exit ]; then state="ended $(cat run.exit)"
else state=lost
fi
echo "{mark} $(hostname) $state"
"""

_FOLLOW = """\
#!/usr/bin/env bash
# follow.sh BYTE SECONDS: shows run.log from a byte on, until the run has ended or time is up.
cd "$(dirname "$0")"
timeout "$2" tail --bytes="+$1" --follow=name --pid="$(cat run.pid)" run.log
exit 0
"""

_STOP = """\
#!/usr/bin/env bash
# stop.sh SIGNAL: asks the run to end; TERM has it save before.
cd "$(dirname "$0")"
if ! flock --shared --nonblock run.lock true; then kill -s "$1" "$(cat run.pid)"; fi
"""


@dataclasses.dataclass(frozen=True)
class HostState:
    """How a run stands on one host.

    Attributes:
      running: it has not ended.
      code: its exit code; None if it runs, never started or was killed with all around it.
      absent: it was never started there.
    """

    running: bool
    code: int | None
    absent: bool = False


def files(spec: Spec, wheel: str) -> dict[str, str]:
    """Names and texts of the files, but for the wheel and the constraints.

    Args:
      spec: what is run.
      wheel: the file's name.
    """
    constraints = shlex.quote(CONSTRAINTS)
    return {
        EXPERIMENT: spec.config,
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
        "follow.sh": _FOLLOW,
        "stop.sh": _STOP,
    }


def folder(name: str) -> str:
    """Where the files of a launch lie on a host, below the user's home."""
    return f"bert-jax/{name}"


def parse_states(output: str) -> dict[str, HostState]:
    """What state.sh said on several hosts, by the hosts' names."""
    return {
        host: HostState(state == "running", int(code) if code else None, state == "absent")
        for host, state, code in _STATE.findall(output)
    }


def _exports(environment: Mapping[str, str]) -> str:
    given = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return f"export {' '.join(given)}" if given else "# no variables of its own"
