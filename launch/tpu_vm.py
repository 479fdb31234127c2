"""`python -m launch tpu_vm EXPERIMENT ...`: a run on the hosts of a TPU slice, rented for it.

The machines are a queued resource. They are asked for, given the wheel of this very commit, the
resolved experiment and the constraints; the run is started on all hosts, followed, and started
again after a preemption; and the machines are deleted at the end, whatever the end. On the hosts
jax finds the others by what the machine says of itself (`bert_jax.training.peers`).
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from bert_jax import errors
from bert_jax.errors import InputError, Unavailable
from launch import arguments, checks, console, dry_run, names, shipping
from launch import target as target_lib
from launch.gcloud import Gcloud
from launch.spec import Spec
from launch.target import Record
from launch.tpu_launched import SAVE_SECONDS, Launched, saved
from launch.tpu_slice import ACTIVE, DEAD, Lost, Slice
from launch.verdict import FAILURES, ending_word, verdict

Ending = Literal["ask", "delete", "keep"]

# Beyond the time in which the service must have found machines: to make them.
_MAKING_SECONDS = 1800.0
# Between a stop that nobody here asked for and a look whether the machines are being taken away.
_PREEMPTION_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A launch, ready to go.

    Attributes:
      spec: what.
      gcloud: where.
      create: the command that asks for the machines.
      wait_seconds: for them.
      ending: what becomes of the machines at the end.
      record: of the launch.
    """

    spec: Spec
    gcloud: Gcloud
    create: Sequence[str]
    wait_seconds: float
    ending: Ending
    record: Record


def main(argv: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> int:
    """Returns the exit code of the launch; see its --help.

    Args:
      argv: the command line, without the command's name.
      sleep: waits so many seconds.
    """
    args = _parser().parse_args(argv)
    try:
        return _launch(args, sleep)
    except (InputError, Unavailable) as error:
        console.say(str(error))
        return errors.of_error(error)[1]
    except KeyboardInterrupt:
        console.say("interrupted before anything was rented")
        return errors.INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch tpu_vm",
        description="Run an experiment on the hosts of a TPU slice that is rented for it.",
        epilog="exit code: 0 finished; 75 stopped and saved, launch again to go on; 1 the run "
        "failed, or was lost more often than --retries; 2 bad input, or no machines",
    )
    arguments.add(parser)
    parser.add_argument("--zone", required=True, help="where to rent, e.g. us-west4-a")
    parser.add_argument("--project", default="", help="whose bill it is [gcloud's own setting]")
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help="cheaper, and may be taken back")
    tier.add_argument("--reserved", action="store_true", help="out of a reservation")
    parser.add_argument(
        "--valid-until", default="24h", metavar="T", help="wait for machines so long: 90m, 2d [24h]"
    )
    parser.add_argument(
        "--runtime-version", metavar="V", help="the machines' image [by generation]"
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--delete-when-done", action="store_true", help="delete the machines without asking"
    )
    end.add_argument(
        "--keep",
        action="store_true",
        help="leave the machines, and pay for them; Ctrl-C leaves the run going, too",
    )
    return parser


def _launch(args: argparse.Namespace, sleep: Callable[[float], None]) -> int:
    force = checks.forced(args.force)
    job = _job(args)
    if args.dry_run:
        for line in dry_run.lines(job.spec, job.record.commit, job.gcloud, job.create):
            console.tell(line)
        return errors.FINISHED
    if job.ending == "ask" and not console.has_terminal():
        raise InputError(
            "no terminal to ask at whether the machines are deleted at the end: say "
            "--delete-when-done or --keep"
        )
    checks.check(job.spec, force, args.price_per_chip_hour, console.say)
    target_lib.require_no_other(job.record)
    rented = Slice(job.gcloud, job.spec.hosts, sleep, console.say)
    before = _before(job, rented)
    files = shipping.put_together(job.spec, job.record.commit, console.say)
    with _hang_up_as_interrupt():
        try:
            return Launch(job, rented, files, before, sleep).run()
        except KeyboardInterrupt:
            console.say(
                f"interrupted; {job.spec.name} may still be there and cost money: `python -m "
                f"launch stop {job.spec.workdir}` deletes it"
            )
            return errors.INTERRUPTED


def _job(args: argparse.Namespace) -> Job:
    spec = arguments.specified(args)
    assert spec.topology is not None
    known = names.names(spec.topology)
    gcloud = Gcloud(name=spec.name, zone=args.zone, project=args.project)
    record = Record(
        target="tpu_vm",
        name=spec.name,
        place={"zone": args.zone, "project": args.project},
        workdir=spec.workdir,
        topology=spec.topology.name,
        hosts=spec.hosts,
        config_sha256=spec.sha256,
        commit=checks.head(),
        time=time.time(),
        price_per_chip_hour=args.price_per_chip_hour,
    )
    return Job(
        spec=spec,
        gcloud=gcloud,
        create=gcloud.create(
            known.accelerator_type,
            args.runtime_version or known.runtime_version,
            "spot" if args.spot else "reserved" if args.reserved else "",
            args.valid_until,
        ),
        wait_seconds=arguments.seconds("--valid-until", args.valid_until) + _MAKING_SECONDS,
        ending="delete" if args.delete_when_done else "keep" if args.keep else "ask",
        record=record,
    )


def _before(job: Job, rented: Slice) -> Record | None:
    """The launch that this one goes on with; None if nothing of this name is there.

    Raises:
      InputError: something is, and was not launched for this run.
    """
    if rented.state() == "":
        return None
    before = target_lib.find(job.spec.workdir)
    mine = job.record
    if (
        before is None
        or not before.rents_the_same(mine)
        or before.config_sha256 != mine.config_sha256
    ):
        raise InputError(
            f"{mine.name}: is there already in {mine.place['zone']}, and was not launched for "
            f"{mine.workdir}; name another with --name"
        )
    console.say(f"{mine.name} is there already; going on with it")
    return before


def target(record: Record, sleep: Callable[[float], None] = time.sleep) -> Launched:
    """What was launched here, to be asked; see `launch.target`."""
    return Launched(record, sleep)


class Launch:
    """One launch, from the request for machines to their end.

    Args:
      job: what is launched.
      rented: its machines, there or not yet.
      files: for every host.
      before: the launch that this one goes on with; None: there is none.
      sleep: waits so many seconds.
    """

    def __init__(
        self,
        job: Job,
        rented: Slice,
        files: Sequence[str],
        before: Record | None,
        sleep: Callable[[float], None],
    ):
        self._job, self._rented, self._files, self._sleep = job, rented, files, sleep
        # Of the code on the hosts, until they are given ours.
        self._commit = job.record.commit if before is None else before.commit
        self._show = console.shower()
        self._left = job.spec.retries

    def run(self) -> int:
        """Returns the exit code; the machines are gone then, unless they are to be kept."""
        try:
            self._write_record()
            code = self._attempts()
        except KeyboardInterrupt:
            return self._interrupted()
        except (InputError, Unavailable) as error:
            console.say(str(error))
            self._give_back(may_run=True)
            return errors.of_error(error)[1]
        except BaseException:
            self._give_back(may_run=True)
            raise
        self._give_back()
        return code

    def _write_record(self) -> None:
        record = dataclasses.replace(self._job.record, commit=self._commit)
        record.write()
        record.write(os.fspath(shipping.staging(record.name)))

    def _attempts(self) -> int:
        while True:
            try:
                before = self._have_machines()
                if self._asked_to_stop():  # while they were asked for, or found running
                    self._saved()
                    return self._stopped()
                if not (before and self._rented.running()):
                    self._fill()
                    self._rented.start()
                    console.say("started on all hosts")
                codes = self._rented.watch(self._show)
                code = verdict(codes)
                what = ending_word(code, codes)
            except Lost as lost:
                code, what = errors.LOST, str(lost)
            if code == errors.FINISHED or code in FAILURES:
                console.say(f"the run {what}")
                return code
            if self._asked_to_stop():
                return self._stopped()
            if not self._left:
                console.say(f"{what}, and no retries are left; launch again to go on")
                return errors.FAILED
            self._left -= 1
            console.say(f"{what}; going on from the newest checkpoint, {self._left} retries left")
            self._clear(code)

    def _fill(self) -> None:
        if self._commit != self._job.record.commit:
            self._commit = self._job.record.commit
            self._write_record()
        self._rented.prepare(self._files)

    def _stopped(self) -> int:
        """Deletes the machines, also those that came after `launch stop` had looked for them."""
        console.say("the run was stopped by `launch stop`")
        self._rented.delete()
        return errors.STOPPED

    def _asked_to_stop(self) -> bool:
        try:
            record = target_lib.find(self._job.spec.workdir)
        except (InputError, Unavailable):  # a bucket that does not answer now ends no run
            return False
        return record is not None and record.stopped

    def _have_machines(self) -> bool:
        """Waits for machines; whether they were asked for before."""
        state = self._rented.state()
        if state in DEAD:
            self._rented.delete()
            state = ""
        if state == "":
            if self._asked_to_stop():
                raise Lost("somebody has deleted the machines")
            console.say(f"asking for {self._job.spec.topology.name} as {self._job.spec.name}")
            self._rented.create(self._job.create)
        self._rented.wait(self._job.wait_seconds)
        return state != ""

    def _clear(self, code: int) -> None:
        """Deletes the machines, unless a run that has saved can go on where it was."""
        if code == errors.STOPPED:
            self._sleep(_PREEMPTION_SECONDS)
            if self._rented.state() == ACTIVE:
                return
        self._rented.delete()

    def _interrupted(self) -> int:
        _ignore_hanging_up()
        name = self._job.spec.name
        if self._job.ending == "keep" or not self._may_delete(f"stop the run and delete {name}?"):
            console.say(f"{name} goes on; see `python -m launch status {self._job.spec.workdir}`")
            return errors.INTERRUPTED
        code = self._saved()
        self._rented.delete()
        return errors.STOPPED if code == errors.STOPPED else errors.INTERRUPTED

    def _saved(self) -> int:
        """Has the run save and end, if it runs; its exit code, or INTERRUPTED."""
        try:
            if self._rented.state() != ACTIVE or not self._rented.running():
                return errors.INTERRUPTED
        except (KeyboardInterrupt, InputError) as error:
            console.say(f"not waiting for the run to save ({error or 'interrupted'})")
            return errors.INTERRUPTED
        return saved(self._rented, SAVE_SECONDS)

    def _give_back(self, may_run: bool = False) -> None:
        name = self._job.spec.name
        try:
            if self._rented.gone():
                return
            if self._job.ending == "keep" or not self._may_delete(f"delete {name}?"):
                console.say(f"{name} is kept and costs money; `python -m launch stop` deletes it")
                return
        except (KeyboardInterrupt, InputError):  # whatever was asked: what is kept is named
            if self._job.ending == "keep":
                raise
        if may_run:
            self._saved()
        self._rented.delete()

    def _may_delete(self, question: str) -> bool:
        return self._job.ending == "delete" or console.agreed(question)


@contextlib.contextmanager
def _hang_up_as_interrupt() -> Iterator[None]:
    """SIGTERM and the end of the terminal are answered as Ctrl-C is, unless nohup hides them."""

    def interrupt(number: int, frame: object) -> None:
        _ignore_hanging_up()
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_hanging_up() -> None:
    """From now on, only Ctrl-C cuts short what is waited for: a closing terminal sends both."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
