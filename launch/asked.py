"""`python -m launch status|logs|stop RUN`: of a run that was launched, by its workdir or name."""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence

from bert_jax import errors
from bert_jax.errors import InputError, Unavailable
from bert_jax.report import records, times
from bert_jax.storage import mirror
from launch import console, shipping, target
from launch.target import Record
from launch.tpu_launched import SAVE_SECONDS


def status(argv: Sequence[str]) -> int:
    """Says how a launched run stands."""
    args = _parser("status", "Say how a launched run stands.").parse_args(argv)
    return _answer(args.run, _tell_status)


def logs(argv: Sequence[str]) -> int:
    """Shows what a launched run says."""
    parser = _parser("logs", "Show what a launched run says.")
    parser.add_argument("--host", type=int, default=0, metavar="N", help="whose output [0]")
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended")
    args = parser.parse_args(argv)
    return _answer(args.run, lambda record: target.of(record).logs(args.host, args.follow))


def stop(argv: Sequence[str]) -> int:
    """Has a launched run save and end, and gives its machines back."""
    parser = _parser("stop", "Have a launched run save and end, and give its machines back.")
    parser.add_argument(
        "--save-within",
        type=float,
        default=SAVE_SECONDS,
        metavar="S",
        help=f"seconds it is given to save [{SAVE_SECONDS:g}]; on GKE its launch's --grace at most",
    )
    args = parser.parse_args(argv)
    return _answer(args.run, lambda record: target.of(record).stop(args.save_within))


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m launch {name}", description=description)
    parser.add_argument(
        "run", metavar="RUN", help="its workdir, or the name of a launch from this machine"
    )
    return parser


def _answer(run: str, ask: Callable[[Record], int]) -> int:
    try:
        return ask(_record(run))
    except (InputError, Unavailable) as error:
        console.say(str(error))
        return errors.of_error(error)[1]
    except KeyboardInterrupt:
        console.say("interrupted")
        return errors.INTERRUPTED


def _record(run: str) -> Record:
    """What was launched with a workdir, or under a name on this machine."""
    kept = shipping.staging(run)
    if "/" not in run and (kept / target.FILE).exists():
        record = target.read(os.fspath(kept))
        newest = target.find(record.workdir)
        return newest if newest is not None and newest.rents_the_same(record) else record
    return target.read(run)


def _tell_status(record: Record) -> int:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
    console.tell(f"{record.name}: {record.topology}, {record.hosts} hosts, launched {when}")
    place = ", ".join(f"{name} {value}" for name, value in record.place.items() if value)
    console.tell(f"  where: {record.target}, {place}")
    console.tell(f"  what: commit {record.commit[:12] or 'unknown'}, {record.workdir}")
    state = target.of(record).state()
    console.tell(f"  machines: {state.word} ({state.detail})")
    for line in progress(record):
        console.tell(f"  {line}")
    return errors.FINISHED


def progress(record: Record) -> Iterator[str]:
    """Lines on how far a run has come, by its own records.

    Raises:
      InputError: a damaged file of the run.
    """
    if not mirror.opened(record.workdir).experiment.exists():
        yield "run: has written nothing yet"
        return
    run = records.Record.read(record.workdir)
    yield f"run: {run.state}, step {run.done:,} of {run.experiment.total_steps:,}"
    yield times.goodput(run.timings).tell(record.price_per_chip_hour)
