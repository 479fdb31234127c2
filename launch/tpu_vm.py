"""`python -m launch tpu_vm EXPERIMENT ...`: a run on the hosts of a TPU slice, rented for it.

The machines are a queued resource. They are asked for, given the wheel of this very commit, the
resolved experiment and the constraints; the run is started on all hosts, its log shown, and it is
started again after a preemption; the machines are deleted at the end, whatever the end. Every step
leaves alone what is there already, so that the same command goes on with what it finds. On the
hosts jax finds the others by what the machine says of itself (`bert_jax.training.peers`).
"""

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import signal
import time
from collections.abc import Iterator, Sequence

from bert_jax import errors
from bert_jax.errors import InputError, Unavailable

from . import checks, hosts
from .commands import PROGRAM, run, say, show, tell
from .gcloud import (
    ACTIVE,
    DELETED,
    FAILED,
    POLL,
    QUICK,
    SLOW,
    SUSPENDED,
    TRIES,
    Deleted,
    Lost,
    Slice,
    sleep,
)
from .spec import (
    Record,
    Spec,
    ending,
    find_record,
    is_final,
    script_that_writes,
    slice_names,
    staging,
    verdict,
)

# Beyond the time in which the service must have found machines: to make them.
_MAKING_SECONDS = 1800.0
# Between a stop that nobody here asked for and a look whether the machines are being taken away.
_PREEMPTION_SECONDS = 60.0
# Looks without an answer from any host, after which they count as lost.
_SILENT = 10

_DURATION = re.compile(r"[1-9][0-9]{0,5}[smhd]")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch, ready to go."""

    spec: Spec  # what
    rented: Slice  # its machines, there or not yet
    create: Sequence[str]  # the command that asks for the machines
    wait_seconds: float  # for them
    keep: bool  # whether they are left at the end, or deleted

    def run(self, files: Sequence[str]) -> int:
        """Runs the experiment to its end; the machines are gone then, unless they are to be kept.

        Args:
          files: for every host.

        Returns:
          The exit code of the run, or of what ended the launch.
        """
        try:
            code = self._attempts(files)
        except (InputError, Unavailable, KeyboardInterrupt) as error:
            say(str(error) or "interrupted")
            code = errors.of_error(error)[1]
            saved = self._give_back(save=True)
            if not self.keep:
                code = saved if isinstance(error, KeyboardInterrupt) else code
        except BaseException:
            self._give_back(save=True)
            raise
        else:
            self._give_back(save=False)
        return code

    def _give_back(self, save: bool) -> int:
        """Deletes the machines, unless they are to be kept.

        Args:
          save: whether the run may still be under way, and saves first.

        Returns:
          The exit code of a run that saved; else INTERRUPTED.
        """
        if self.keep:
            workdir = self.spec.workdir
            say(f"{self.spec.name} is kept and costs money; `{PROGRAM} stop {workdir}`")
            return errors.INTERRUPTED
        code = self.rented.save(self.spec.hosts) if save else errors.INTERRUPTED
        self.rented.delete()
        return code

    def _attempts(self, files: Sequence[str]) -> int:
        left, there = self.spec.retries, False
        while True:
            try:
                if not there:
                    self._have_machines()
                there = True
                if "running" not in self.rented.states().values():
                    self._start(files)
                code = verdict(self._watch())
                what = ending(code)
                if code == errors.STOPPED and left:
                    sleep(_PREEMPTION_SECONDS)
                    self.rented.require_active()
            except Deleted:
                say("the run was stopped: its machines were deleted from elsewhere")
                return errors.STOPPED
            except Lost as lost:
                code, what = errors.LOST, str(lost)
            if is_final(code):
                say(f"the run {what}")
                return code
            if not left:
                say(f"{what}, and no retries are left; launch again to go on")
                return code
            left -= 1
            say(f"{what}; going on from the newest checkpoint, {left} retries left")
            if code != errors.STOPPED:
                self.rented.delete()
                there = False

    def _have_machines(self) -> None:
        """Asks for machines, unless they were asked for, and waits for them.

        Raises:
          Lost: they were taken away before they were there.
          Deleted: somebody has deleted the request.
        """
        name, rented = self.spec.name, self.rented
        before = rented.state()
        if before in (FAILED, *SUSPENDED, *DELETED):
            if before:
                rented.delete()
            assert self.spec.topology is not None
            say(f"asking for {self.spec.topology.name} as {name}")
            rented.create(self.create)
        for _ in range(round(self.wait_seconds / POLL) + 1):
            now = rented.state()
            if now != before:
                say(f"{name}: {now or 'no such request'}")
                before = now
            if now == FAILED:
                raise InputError(
                    f"{name}: the request failed: no machines in time, or a problem with it, which "
                    "`gcloud compute tpus queued-resources describe` names"
                )
            if now in (ACTIVE, *SUSPENDED, *DELETED):
                return rented.require_active()
            sleep(POLL)
        raise InputError(f"{name}: no machines within {self.wait_seconds / 3600:g} hours")

    def _start(self, files: Sequence[str]) -> None:
        """Copies the files to all hosts, installs, and starts the run; each waits for all hosts."""
        rented = self.rented
        folder = hosts.folder(rented.name)
        rented.insist(rented.ssh_words(("mkdir", "-p", folder)), QUICK, "reached")
        say(f"copying {len(files)} files to {self.spec.hosts} hosts, and installing")
        rented.insist(rented.copy_words(files), SLOW, "filled")
        rented.insist(rented.script_words("install.sh"), SLOW, "filled: install.sh fails")
        rented.insist(rented.script_words("start.sh"), QUICK, "started")
        say("started on all hosts")

    def _watch(self) -> list[int | None]:
        """Shows the log of host 0 until no host runs any more.

        A host that hangs or has lost another ends by itself (`run.hang_after_seconds`, jax's
        heartbeats): none is ended from here.

        Returns:
          The exit code of each host; None for one that was lost.

        Raises:
          Lost: the machines were taken away, or no host answers.
          Deleted: somebody has deleted them.
        """
        shown = silent = missing = unread = 0
        while True:
            states = self.rented.states()
            running = "running" in states.values()
            log = run(self.rented.log_words(0, f"--lines=+{shown + 1}"), QUICK)
            unread = unread + 1 if log.code else 0
            *lines, unfinished = log.out.split("\n")
            if unfinished and not running:
                lines.append(unfinished)
            shown += len(lines)
            for line in lines:
                tell(line)
            missing = missing + 1 if len(states) < self.spec.hosts else 0
            if states and not running and not 0 < max(missing, unread) < TRIES:
                return hosts.exit_codes(states, self.spec.hosts)
            self.rented.require_active()
            silent = 0 if states else silent + 1
            if silent > _SILENT:
                raise Lost(f"{self.spec.name}: no host answers")
            sleep(POLL)


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
    known = slice_names(spec.topology)
    rented = Slice(name=spec.name, zone=args.zone, project=args.project)
    job = Launch(
        spec=spec,
        rented=rented,
        create=rented.create_words(
            known.accelerator_type,
            args.runtime_version or known.runtime_version,
            "spot" if args.spot else "reserved" if args.reserved else "",
            args.valid_until,
        ),
        wait_seconds=int(args.valid_until[:-1]) * _SECONDS[args.valid_until[-1]] + _MAKING_SECONDS,
        keep=args.keep,
    )
    commit = checks.head()
    if args.dry_run:
        print("\n".join(_script(job, commit)))
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
    if rented.state(1):
        before = find_record(spec.workdir)
        if before is None or before.config_sha256 != spec.sha256:
            raise InputError(
                f"{spec.name}: is there already in {args.zone}, and was not launched for this "
                f"experiment in {spec.workdir}; name another with --name"
            )
        say(f"{spec.name} is there already; going on with it")
    record.write()
    files = hosts.put_together(spec, commit)
    with _hang_up_as_interrupt():
        code = job.run(files)
    if not job.keep:
        record.remove()
    return code


def status(record: Record) -> int:
    """Shows the state of the request, and how the run stands on each host."""
    rented = _of(record)
    now = rented.state(1)
    print(f"queued resource: {now or 'none'}", flush=True)
    return show(rented.script_words("state.sh")) if now == ACTIVE else errors.FINISHED


def logs(record: Record, host: int, follow: bool) -> int:
    """Shows the output of a host."""
    more = ("--follow=name",) if follow else ()
    return show(_of(record).log_words(host, "--lines=+1", *more))


def stop(record: Record) -> int:
    """Stops the run once it has saved, and deletes the machines; returns the run's exit code."""
    rented = _of(record)
    now = rented.state(TRIES)
    code = rented.save(record.hosts) if now == ACTIVE else errors.FINISHED
    if now:
        rented.delete()
    record.remove()
    say(f"`bert-jax checkpoints {record.workdir}` lists what is saved")
    return errors.FINISHED if code == errors.STOPPED else code


def _of(record: Record) -> Slice:
    return Slice(name=record.name, **record.place)


@contextlib.contextmanager
def _hang_up_as_interrupt() -> Iterator[None]:
    """Answers SIGTERM and the end of the terminal as Ctrl-C, unless nohup hides them; once."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}

    def interrupt(number: int, frame: object) -> None:
        for each in numbers:  # a closing terminal sends both
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _script(job: Launch, commit: str) -> Iterator[str]:
    """Yields a script that does the same where there is no trouble; remarks tell the rest."""
    spec, rented = job.spec, job.rented
    assert spec.topology is not None
    folder = staging(spec.name)
    texts = hosts.files(spec, hosts.wheel())
    yield "#!/usr/bin/env bash"
    yield f"# {spec.name}: {spec.topology.name}; chips: {spec.topology.chips}, hosts: {spec.hosts};"
    yield f"# commit {commit}, config sha256 {spec.sha256}."
    yield "# Checked before, unless --force names it: the commit, the workdir, doctor, plan."
    yield "set -eu"
    yield ""
    yield "# What every host is given."
    for argv in (["mkdir", "-p", os.fspath(folder)], *hosts.build_commands(commit, folder)):
        yield shlex.join(argv)
    for name in sorted(texts):
        yield from script_that_writes(folder / name, texts[name])
    yield ""
    yield "# The machines, unless they are there. They are deleted if they do not come in time."
    yield shlex.join(job.create)
    yield f'until [ "$({shlex.join(rented.state_words())})" = {ACTIVE} ]; do sleep 30; done'
    yield ""
    yield "# Five times, while a host does not answer yet."
    yield shlex.join(rented.ssh_words(("mkdir", "-p", hosts.folder(rented.name))))
    names = sorted([*texts, hosts.wheel(), hosts.CONSTRAINTS])
    yield shlex.join(rented.copy_words([os.fspath(folder / name) for name in names]))
    yield shlex.join(rented.script_words("install.sh"))
    yield shlex.join(rented.script_words("start.sh"))
    yield ""
    yield "# Every half minute, until no host runs any more: how the run stands on each, the log of"
    yield "# host 0 from the line that was shown last, and whether the machines are still there."
    yield shlex.join(rented.script_words("state.sh"))
    yield shlex.join(rented.log_words(0, "--lines=+1"))
    yield shlex.join(rented.state_words())
    yield ""
    yield f"# Preempted, or a host lost: deleted and asked for again, {spec.retries} times at most."
    yield "# Stopped with exit code 75: started again on the same machines, counted alike."
    yield "# Ctrl-C: the run is asked to save, and waited for, before the machines are deleted:"
    yield f"#   {shlex.join(rented.script_words('stop.sh'))}"
    yield ""
    yield "# At the end, whatever the end; with --keep, not."
    yield shlex.join(rented.delete_words())
