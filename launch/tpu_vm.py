"""`python -m launch tpu_vm EXPERIMENT ...`: a run on the hosts of a TPU slice, rented for it.

The script consists of lines that set what to rent and write the files for hosts, followed by
`launch/tpu_vm.sh`. It builds a wheel of the current commit, requests the machines, starts the run
on all hosts, shows the log of the first host, restarts on new machines after a preemption, and
deletes the machines at the end, unless --keep is given. On each host, JAX finds the other hosts by
the machine's metadata (`bert_jax.distributed.peers`).
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
from .spec import EXPERIMENT_FILE, FINAL, Spec, heredoc, slice_names, staging_folder

# The part of the script that is the same in every launch; the scripts of hosts follow below.
_BODY = pathlib.Path(__file__).with_suffix(".sh")
# Seconds between two checks of the request and the hosts, and between two attempts.
POLL_SECONDS = 30
# Seconds to create the machines, after the service has found them.
_CREATION_SECONDS = 1800

_DURATION = re.compile(r"[1-9][0-9]{0,5}[smhd]")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

# If a machine's own Python is too old, uv installs a newer one.
_INSTALL = """\
# Creates venv/ with the wheel.
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
# Starts the run, once, in a session that continues after this connection ends.
set -eu
cd "$(dirname "$0")"
[ -f run.pid ] && exit 0
setsid nohup bash run.sh < /dev/null > run.log 2>&1 &
for _ in $(seq 300); do [ -f run.pid ] && exit 0; sleep 0.1; done
echo "start.sh: the run did not start" >&2
exit 1
"""
# JAX's coordinator listens only on the address inside the network.
_RUN = """\
# Runs the command, and writes its exit code to run.exit when it ends.
cd "$(dirname "$0")"
{environment}
address="$(curl -sf -H 'Metadata-Flavor: Google' \\
  http://metadata.google.internal/computeMetadata/v1/instance/network-interfaces/0/ip)"
if [ -n "$address" ]; then
  export JAX_COORDINATOR_PORT=8482 JAX_COORDINATOR_BIND_ADDRESS="$address:8482"
fi
PATH="$PWD/venv/bin:$PATH"
{command} &
echo $! > command.pid
echo $$ > run.pid
wait $!
echo $? > run.exit.new
mv run.exit.new run.exit
"""
# The output has a prefix, since ssh and gcloud print lines of their own.
_PRINT_EXIT_CODE = """\
# Prints the exit code of the run, "running", or 134 if it was killed with its machine.
cd "$(dirname "$0")"
code=134
kill -0 "$(cat run.pid)" 2>/dev/null && code=running
[ -f run.exit ] && code="$(cat run.exit)"
# After a request to stop, 75 is not a preemption, so no new machines may be rented.
[ "$code" = 75 ] && [ -f run.asked ] && code=130
echo "bert-jax-run $code"
"""
_STOP = """\
# Asks the run to save and stop, and waits until it ends.
cd "$(dirname "$0")"
touch run.asked
[ -f run.exit ] || kill -s TERM "$(cat command.pid)" || exit 1
for _ in $(seq 900); do [ -f run.exit ] && exit 0; sleep 1; done
exit 1
"""


def host_files(spec: Spec) -> dict[str, str]:
    """Returns {name: text} of the files that every host is given, except the wheel."""
    values = [f"{name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items())]
    environment = f"export {' '.join(values)}" if values else "# no variables"
    return {
        EXPERIMENT_FILE: spec.config,
        **spec.code,
        "install.sh": _INSTALL,
        "start.sh": _START,
        "run.sh": _RUN.format(environment=environment, command=shlex.join(spec.command())),
        "code.sh": _PRINT_EXIT_CODE,
        "stop.sh": _STOP,
    }


def script(args: argparse.Namespace, spec: Spec) -> Iterator[str]:
    """Yields the lines of the script that does the launch."""
    if not _DURATION.fullmatch(args.valid_until):
        raise InputError(
            f"--valid-until {args.valid_until}: write a whole number and one of s, m, h, d, like "
            "24h"
        )
    commit = checks.head_commit()
    topology = spec.rented_topology
    if topology.slices > 1:
        raise InputError(f"--topology {topology.name}: tpu_vm rents one slice; use `launch gke`")
    names = slice_names(topology)
    if not names.runtime_version:
        raise InputError(
            f"--topology {topology.name}: the TPU VM API does not offer this generation; use "
            "`launch gke`, or rent machines of Compute Engine yourself"
        )
    wait = int(args.valid_until[:-1]) * _SECONDS[args.valid_until[-1]] + _CREATION_SECONDS
    request = [
        f"--node-id={spec.name}",
        f"--accelerator-type={names.accelerator_type}",
        f"--runtime-version={args.runtime_version or names.runtime_version}",
        f"--valid-until-duration={args.valid_until}",
        *(f"--{tier}" for tier in ("spot", "reserved") if getattr(args, tier)),
    ]
    project = [f"--project={args.project}"] if args.project else []
    location = [f"--zone={args.zone}", *project, "--quiet"]
    folder, remote, texts = staging_folder(spec.name), f"bert-jax/{spec.name}", host_files(spec)
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
        "REMOTE": remote,
        "POLL": str(POLL_SECONDS),
        "WAIT": str(wait),
    }
    lists = {"LOCATION": location, "REQUEST": request, "FILES": files, "FINAL": map(str, FINAL)}
    ssh = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", spec.name, *location]
    queued = ["gcloud", "compute", "tpus", "queued-resources"]
    yield "#!/usr/bin/env bash"
    yield f"# {spec.name}: {topology.name}; chips: {topology.chips}, hosts: {spec.hosts};"
    yield f"# commit {commit}, config sha256 {spec.sha256}."
    yield "# Checked before, unless --force names it: the commit, the workdir, doctor, plan."
    yield "# From another terminal: show the state of hosts, follow the log, save and stop, delete:"
    yield f"#   {shlex.join([*ssh, '--worker=all', f'--command=bash {remote}/code.sh'])}"
    yield f"#   {shlex.join([*ssh, '--worker=0', f'--command=tail -F {remote}/run.log'])}"
    yield f"#   {shlex.join([*ssh, '--worker=all', f'--command=bash {remote}/stop.sh'])}"
    yield f"#   {shlex.join([*queued, 'delete', spec.name, '--force', *location])}"
    yield "set -euo pipefail"
    for name, value in values.items():
        yield f"{name}={shlex.quote(value)}"
    for name, items in lists.items():
        yield f"{name}=({shlex.join(items)})"
    yield ""
    yield "stage() {"
    for name in sorted(texts):
        yield from heredoc(folder / name, texts[name])
    yield "}"
    yield ""
    yield _BODY.read_text().removesuffix("\n")
