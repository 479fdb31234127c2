"""`python -m launch local`: a run in several processes, all on this machine.

Each process has virtual CPU devices. This rehearses a run on many hosts (a TPU pod): the processes
find each other, share the batches, save and stop together. An EXPERIMENT is launched by the same
spec as on rented machines; after `--` any command may follow.
"""

import argparse
import dataclasses
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence

from etils import epath

from bert_jax import errors
from bert_jax.errors import InputError
from bert_jax.storage.workdir import translate_os_errors, write_atomic
from bert_jax.tools.verify import pod

from .spec import EXPERIMENT_FILE, Spec, heredoc, is_final, make_spec, report, staging_folder


def run(args: argparse.Namespace, command: Sequence[str] | None) -> int:
    """Runs `command`, or trains args.experiment, and restarts it if a process is lost.

    Returns:
      The exit code: 0 finished; 75 stopped on request; else that of the process that failed first,
      128 plus the signal's number if it was killed.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # not every terminal supports UTF-8
    if command is not None:
        return _run_pod(command, args).code
    spec = make_spec(
        args.experiment,
        args.set,
        workdir=args.workdir or "",
        topology=None,
        hosts=args.processes,
        extend=args.extend,
        retries=args.retries,
    )
    spec = dataclasses.replace(spec, workdir=spec.workdir or f"runs/{spec.experiment.name}")
    file = staging_folder(spec.name) / EXPERIMENT_FILE
    if args.dry_run:
        print("\n".join(_script(spec, file, args)))
        return errors.FINISHED
    with translate_os_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        for name, text in {EXPERIMENT_FILE: spec.config, **spec.code}.items():
            write_atomic(epath.Path(file.with_name(name)), text)
    retries = spec.retries
    while True:
        result = _run_pod(spec.command(os.fspath(file)), args)
        if is_final(result.code) or result.stop_requested or not retries:
            return result.code
        retries -= 1
        report(f"{spec.name}: exit code {result.code}; starting it again, {retries} retries left")


def _run_pod(command: Sequence[str], args: argparse.Namespace) -> pod.PodResult:
    """Runs a command in all processes; `bert-jax` runs in this interpreter."""
    if command[0] == "bert-jax":
        command = [sys.executable, "-m", "bert_jax.cli", *command[1:]]
    elif shutil.which(command[0]) is None:
        raise InputError(f"{command[0]}: no such command")
    return pod.run(
        command,
        processes=args.processes,
        devices=args.devices_per_process,
        arrive_within=args.arrive_within,
        hang_after=args.hang_after,
        slices=args.slices,
    )


def _script(spec: Spec, file: pathlib.Path, args: argparse.Namespace) -> Iterator[str]:
    yield "#!/usr/bin/env bash"
    yield f"# {spec.name}: {spec.hosts} processes on this machine,"
    yield f"# config sha256 {spec.sha256}."
    yield "set -eu"
    yield shlex.join(["mkdir", "-p", os.fspath(file.parent)])
    for name, text in {EXPERIMENT_FILE: spec.config, **spec.code}.items():
        yield from heredoc(file.with_name(name), text)
    names = ("processes", "devices_per_process", "slices", "arrive_within", "hang_after")
    flags = (f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names)
    package = __name__.rpartition(".")[0]
    start = [sys.executable, "-m", package, "local", *flags, f"--retries={spec.retries}"]
    words = spec.command(os.fspath(file))[2:]  # without `bert-jax pretrain` or `extend`
    yield shlex.join([*start, *words, *(["--extend"] if spec.extend else [])])
