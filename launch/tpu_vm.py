"""`python -m launch tpu_vm EXPERIMENT ...`: a run on the hosts of a TPU slice, rented for it.

The script is `launch/tpu_vm.sh`, after lines that say what is rented and write what hosts are
given. It builds the wheel of this very commit, asks for the machines, starts the run on all hosts,
shows the log of the first, begins again on new machines after a preemption, and deletes the
machines at the end, whatever the end. On the hosts jax finds the others by what the machine says of
itself (`bert_jax.distributed.peers`).
"""

import argparse
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator

import bert_jax
from bert_jax.errors import InputError

from . import checks
from .spec import EXPERIMENT, FINAL, Spec, script_that_writes, slice_names, staging

# What is the same in every launch: bash of this machine; and of each host, by name.
_BODY = pathlib.Path(__file__).with_suffix(".sh")
# Seconds between looks at the request and the hosts, and between tries.
POLL = 30
# Beyond the time in which the service must have found machines: to make them.
_MAKING_SECONDS = 1800

_DURATION = re.compile(r"[1-9][0-9]{0,5}[smhd]")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

# Where a machine's own Python is older than what we need, uv brings one.
_INSTALL = """\
# Makes venv/ of the wheel.
set -eu
cd "$(dirname "$0")"
[ -f venv/installed ] && exit 0
python=
for version in 3.13 3.12 3.11; do
  if "python$version" -c 'import ensurepip' 2>/dev/null; then python="python$version"; break; fi
done
if [ -z "$python" ]; then
  python3 -m pip install --quiet --user 'uv>=0.8,<1'
  python3 -m uv python install --quiet 3.12
  python="$(python3 -m uv python find --managed-python 3.12)"
fi
"$python" -m venv --clear venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \\
  --constraint constraints.txt "$(echo ./*.whl)[tpu,gcs]"
touch venv/installed
"""
_START = """\
# Starts the run, once, in a session that outlives this connection.
set -eu
cd "$(dirname "$0")"
[ -f run.pid ] && exit 0
setsid nohup bash run.sh < /dev/null > run.log 2>&1 &
for _ in $(seq 300); do [ -f run.pid ] && exit 0; sleep 0.1; done
echo "start.sh: the run did not start" >&2
exit 1
"""
# jax's coordinator listens on the address inside the network alone.
_RUN = """\
# The run: its exit code goes to run.exit.
cd "$(dirname "$0")"
{environment}
address="$(curl -sf -H 'Metadata-Flavor: Google' \\
  http://metadata.google.internal/computeMetadata/v1/instance/network-interfaces/0/ip)"
if [ -n "$address" ]; then
  export JAX_COORDINATOR_PORT=8482 JAX_COORDINATOR_BIND_ADDRESS="$address:8482"
fi
PATH="$PWD/venv/bin:$PATH"
{command} &
echo $! > run.pid
wait $!
echo $? > run.exit.new
mv run.exit.new run.exit
"""
# Marked, since ssh and gcloud print lines of their own.
_CODE = """\
# Prints the exit code of the run, "running", or 134 of one that was killed with its machine.
cd "$(dirname "$0")"
code=134
kill -0 "$(cat run.pid)" 2>/dev/null && code=running
[ -f run.exit ] && code="$(cat run.exit)"
# Asked to end, it has not been preempted: who waits for it is to rent no other machines.
[ "$code" = 75 ] && [ -f run.asked ] && code=130
echo "bert-jax-run $code"
"""
_STOP = """\
# Asks the run to save and end, and waits for it.
cd "$(dirname "$0")"
touch run.asked
[ -f run.exit ] || kill -s TERM "$(cat run.pid)" || exit 1
for _ in $(seq 900); do [ -f run.exit ] && exit 0; sleep 1; done
exit 1
"""


def host_files(spec: Spec) -> dict[str, str]:
    """Returns the names and texts of what every host is given, except the wheel."""
    given = [f"{name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items())]
    environment = f"export {' '.join(given)}" if given else "# no variables of its own"
    return {
        EXPERIMENT: spec.config,
        **spec.code,
        "install.sh": _INSTALL,
        "start.sh": _START,
        "run.sh": _RUN.format(environment=environment, command=shlex.join(spec.command())),
        "code.sh": _CODE,
        "stop.sh": _STOP,
    }


def script(args: argparse.Namespace, spec: Spec) -> Iterator[str]:
    """Yields the lines of the script that does all of a launch."""
    if not _DURATION.fullmatch(args.valid_until):
        raise InputError(
            f"--valid-until {args.valid_until}: write a whole number and one of s, m, h, d, like "
            "24h"
        )
    commit = checks.head()
    topology = spec.rented_topology
    if topology.slices > 1:
        raise InputError(f"--topology {topology.name}: rents one slice; `launch gke` takes several")
    known = slice_names(topology)
    wait = int(args.valid_until[:-1]) * _SECONDS[args.valid_until[-1]] + _MAKING_SECONDS
    request = [
        f"--node-id={spec.name}",
        f"--accelerator-type={known.accelerator_type}",
        f"--runtime-version={args.runtime_version or known.runtime_version}",
        f"--valid-until-duration={args.valid_until}",
        *(f"--{tier}" for tier in ("spot", "reserved") if getattr(args, tier)),
    ]
    where = [f"--zone={args.zone}", "--quiet"]
    where[1:1] = [f"--project={args.project}"] if args.project else []
    folder, there, texts = staging(spec.name), f"bert-jax/{spec.name}", host_files(spec)
    wheel = f"bert_jax-{bert_jax.__version__}-py3-none-any.whl"
    files = [os.fspath(folder / name) for name in sorted([*texts, wheel, "constraints.txt"])]
    values = {
        "NAME": spec.name,
        "HOSTS": str(spec.hosts),
        "RETRIES": str(spec.retries),
        "KEEP": "yes" if args.keep else "",
        "COMMIT": commit,
        "CHECKOUT": os.fspath(checks.ROOT),
        "PYTHON": sys.executable,
        "FOLDER": os.fspath(folder),
        "THERE": there,
        "POLL": str(POLL),
        "WAIT": str(wait),
    }
    lists = {"WHERE": where, "REQUEST": request, "FILES": files, "FINAL": map(str, FINAL)}
    ssh = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", spec.name, *where]
    queued = ["gcloud", "compute", "tpus", "queued-resources"]
    yield "#!/usr/bin/env bash"
    yield f"# {spec.name}: {topology.name}; chips: {topology.chips}, hosts: {spec.hosts};"
    yield f"# commit {commit}, config sha256 {spec.sha256}."
    yield "# Checked before, unless --force names it: the commit, the workdir, doctor, plan."
    yield "# From elsewhere: how hosts stand, the log of the first, saving and ending, deleting:"
    yield f"#   {shlex.join([*ssh, '--worker=all', f'--command=bash {there}/code.sh'])}"
    yield f"#   {shlex.join([*ssh, '--worker=0', f'--command=tail -F {there}/run.log'])}"
    yield f"#   {shlex.join([*ssh, '--worker=all', f'--command=bash {there}/stop.sh'])}"
    yield f"#   {shlex.join([*queued, 'delete', spec.name, '--force', *where])}"
    yield "set -euo pipefail"
    for name, value in values.items():
        yield f"{name}={shlex.quote(value)}"
    for name, words in lists.items():
        yield f"{name}=({shlex.join(words)})"
    yield ""
    yield "stage() {"
    for name in sorted(texts):
        yield from script_that_writes(folder / name, texts[name])
    yield "}"
    yield ""
    yield _BODY.read_text().removesuffix("\n")
