"""`python -m launch tpu_vm EXPERIMENT ...`: a run on the hosts of a TPU slice, rented for it.

All is one script of bash, which `--dry-run` prints and a launch runs: `launch/tpu_vm.sh`, after
lines that say what is rented and write what hosts are given. It builds the wheel of this very
commit, asks for the machines, starts the run on all hosts, shows the log of the first, begins again
on new machines after a preemption, and deletes the machines at the end, whatever the end. On the
hosts jax finds the others by what the machine says of itself (`bert_jax.training.peers`).
"""

import argparse
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

import bert_jax
from bert_jax import errors
from bert_jax.errors import InputError
from bert_jax.storage.workdir import named_errors, write_atomic

from . import checks
from .commands import run, say, show
from .spec import EXPERIMENT, FINAL, Record, Spec, script_that_writes, slice_names, staging

# What is the same in every launch: bash of this machine; and of each host, by name.
_BODY = pathlib.Path(__file__).with_suffix(".sh")
_SCRIPT = "launch.sh"
# Seconds between looks at the request and the hosts, and between tries.
POLL = 30
# Beyond the time in which the service must have found machines: to make them.
_MAKING_SECONDS = 1800
_QUICK, _DELETE = 300.0, 3600.0

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
echo "bert-jax-run $code"
"""
_STOP = """\
# Asks the run to save and end, and waits for it.
cd "$(dirname "$0")"
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


def _folder(name: str) -> str:
    """Returns where the files of a launch lie on a host, below the user's home."""
    return f"bert-jax/{name}"


def script(args: argparse.Namespace, spec: Spec, commit: str) -> Iterator[str]:
    """Yields the lines of the script that does all of a launch.

    Args:
      args: flags of `launch tpu_vm`.
      spec: what is launched.
      commit: whose wheel is shipped, in hexadecimal.
    """
    assert spec.topology is not None
    known = slice_names(spec.topology)
    wait = int(args.valid_until[:-1]) * _SECONDS[args.valid_until[-1]] + _MAKING_SECONDS
    request = [
        f"--node-id={spec.name}",
        f"--accelerator-type={known.accelerator_type}",
        f"--runtime-version={args.runtime_version or known.runtime_version}",
        f"--valid-until-duration={args.valid_until}",
        *(f"--{tier}" for tier in ("spot", "reserved") if getattr(args, tier)),
    ]
    folder, texts = staging(spec.name), host_files(spec)
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
        "THERE": _folder(spec.name),
        "POLL": str(POLL),
        "WAIT": str(wait),
    }
    lists = {
        "WHERE": _where({"zone": args.zone, "project": args.project}),
        "REQUEST": request,
        "FILES": files,
        "FINAL": map(str, FINAL),
    }
    yield "#!/usr/bin/env bash"
    yield f"# {spec.name}: {spec.topology.name}; chips: {spec.topology.chips}, hosts: {spec.hosts};"
    yield f"# commit {commit}, config sha256 {spec.sha256}."
    yield "# Checked before, unless --force names it: the commit, the workdir, doctor, plan."
    yield "set -euo pipefail"
    for name, value in values.items():
        yield f"{name}={shlex.quote(value)}"
    for name, words in lists.items():
        yield f"{name}=({shlex.join(words)})"
    yield ""
    yield 'mkdir -p "$FOLDER"'
    for name in sorted(texts):
        yield from script_that_writes(folder / name, texts[name])
    yield ""
    yield _BODY.read_text().removesuffix("\n")


def launch(args: argparse.Namespace, spec: Spec) -> int:
    """Runs an experiment on rented machines, to its end.

    Args:
      args: flags of `launch tpu_vm`.
      spec: what is launched.

    Returns:
      The exit code of the run, or of what ended the launch.
    """
    assert spec.topology is not None
    if not _DURATION.fullmatch(args.valid_until):
        raise InputError(
            f"--valid-until {args.valid_until}: write a whole number and one of s, m, h, d, like "
            "24h"
        )
    lines = "\n".join(script(args, spec, checks.head()))
    if args.dry_run:
        print(lines)
        return errors.FINISHED
    checks.check(spec, checks.forced(args.force), args.price_per_chip_hour)
    record = Record(
        launcher="tpu_vm",
        place={"zone": args.zone, "project": args.project},
        name=spec.name,
        workdir=spec.workdir,
        topology=spec.topology.name,
        hosts=spec.hosts,
        config_sha256=spec.sha256,
        time=time.time(),
        price_per_chip_hour=args.price_per_chip_hour,
    )
    if shutil.which("gcloud") is None:
        run(["gcloud", "version"], _QUICK)  # says how to get it
    record.write()
    folder = staging(spec.name)
    with named_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_atomic(folder / _SCRIPT, lines + "\n")
    code = _bash(folder / _SCRIPT)
    if _is_gone(record):
        record.remove()
    return code


def _bash(path: pathlib.Path) -> int:
    """Runs the script; what should end us goes to it, which saves and deletes first."""
    process = subprocess.Popen(["bash", os.fspath(path)], stdin=subprocess.DEVNULL)
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.getsignal(number)
        if before[number] != signal.SIG_IGN:  # nohup hides one
            signal.signal(number, lambda number, _: process.send_signal(number))
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- What is asked about a launch ----------------------------------------------------------------


def status(record: Record) -> int:
    """Shows the state of the request, and how the run stands on each host."""
    shown = show(_queued(record, "describe", "--format=value(state.state)"))
    return shown or show(_ssh(record, "all", f"bash {_folder(record.name)}/code.sh"))


def logs(record: Record, host: int, follow: bool) -> int:
    """Shows the output of a host."""
    more = "--follow=name " if follow else ""
    path = f"{_folder(record.name)}/run.log"
    return show(_ssh(record, str(host), f"tail {more}--lines=+1 {path}"))


def stop(record: Record) -> int:
    """Stops the run once it has saved, and deletes the machines."""
    say(f"asking {record.name} to save and stop")
    show(_ssh(record, "all", f"bash {_folder(record.name)}/stop.sh"))
    delete = _queued(record, "delete", "--force")
    done = run(delete, _DELETE)
    if not _is_gone(record):
        raise InputError(
            f"{record.name}: may still be there and cost money ({done.complaint}); delete it with: "
            f"{shlex.join(delete)}"
        )
    record.remove()
    say(f"{record.name} is deleted; `bert-jax checkpoints {record.workdir}` lists what is saved")
    return errors.FINISHED


def _is_gone(record: Record) -> bool:
    """Returns whether the service says that there is no such request: no answer is none."""
    done = run(_queued(record, "describe", "--format=value(state.state)"), _QUICK)
    return done.code != 0 and "NOT_FOUND" in done.err


def _queued(record: Record, verb: str, *flags: str) -> list[str]:
    words = ["gcloud", "compute", "tpus", "queued-resources", verb, record.name]
    return [*words, *flags, *_where(record.place)]


def _ssh(record: Record, worker: str, command: str) -> list[str]:
    words = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", record.name, f"--worker={worker}"]
    return [*words, f"--command={command}", *_where(record.place)]


def _where(place: Mapping[str, str]) -> list[str]:
    project = [f"--project={place['project']}"] if place["project"] else []
    return [f"--zone={place['zone']}", *project, "--quiet"]
