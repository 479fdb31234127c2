"""Starting, going on with and extending a run in its workdir."""

import contextlib
import json
import platform
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from bert_jax import config, hardware, process, system
from bert_jax.checkpoints.checkpoint import Checkpoints
from bert_jax.checkpoints.saves import Saves
from bert_jax.config import Run
from bert_jax.distributed import peers as peers_lib
from bert_jax.distributed.peers import Peers
from bert_jax.distributed.watchdog import StopRequest, Watchdog
from bert_jax.errors import InputError, pluralize
from bert_jax.running import trackers
from bert_jax.running.environment import code, keep_compiled_programs, versions
from bert_jax.running.job import Context, Job, Result
from bert_jax.running.lines import EVALUATIONS, skipped_steps
from bert_jax.running.progress import Clock, Progress
from bert_jax.running.runner import Trainer
from bert_jax.storage import mirror as mirror_lib
from bert_jax.storage import retry
from bert_jax.storage.mirror import Mirror
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import RUN_FILES, DiskFull, Workdir, lock
from bert_jax.training import mesh as mesh_lib

Outcome = Literal["finished", "stopped", "failed"]


def run(job: Job, progress: Progress, origin: dict[str, Any] | None = None) -> Outcome:
    """Runs an experiment in its workdir to its end, or until asked to stop.

    Args:
      job: what is to be done; a run that is there already must be of the same.
      progress: shows what happens.
      origin: where the experiment comes from, by config.load_with_origin; kept for the report.
    """
    experiment, workdir = job.experiment, job.workdir
    with contextlib.ExitStack() as stack:
        booked, wait = experiment, experiment.run.wait_for_slices_seconds
        peers = stack.enter_context(peers_lib.connected(wait, job.placed))
        if peers.membership is not None:
            taken, policy = len(peers.membership.slices), peers.membership.policy
            job.experiment = experiment = job.placed(taken, policy.booked, policy.hosts)
        if not peers.is_primary:
            progress.be_silent()
        stack.callback(setattr, retry, "say", retry.say)
        retry.say = progress.say if peers.is_primary else peers.say
        job.read()
        facts = {name: repr(value) for name, value in config.flatten(experiment)} | versions()
        facts |= {"python": platform.python_version(), "code of bert_jax": code()}
        facts |= {"length": job.length}
        peers.require_same("settings", facts, "start all of them with the same command")
        watchdog = Watchdog(
            experiment.run.hang_after_seconds, coordinates=peers.is_primary and peers.count > 1
        )
        stack.callback(watchdog.pause)  # the caller may live on
        watchdog.reset(times=2)
        mesh = mesh_lib.make_mesh(experiment.parallelism)
        job.require_runnable(mesh)
        _require_checkable(experiment.run, mesh)
        trackers.require_installed(experiment.run.trackers)
        if process.is_prepared:
            system.keep_freed_memory()
            keep_compiled_programs()
        peers.connect(mesh)
        clock = Clock()
        with _held(job, peers) as (mirror, forget):
            _require_one_place(workdir, mirror, peers)
            with Checkpoints(workdir.checkpoints).cached_lists():
                _require_going_on(job)
            # A signal ends this at once: a corpus half made is made again.
            watchdog.pause()
            with clock.waiting("prepare"):
                job.prepare(peers)
                peers.meet("prepare")
            watchdog.reset(times=2)
            with StopRequest(peers) as stop:
                job.open(mesh, peers)
                clock.peak_flops = hardware.peak_flops(job.objective.model.compute_dtype)
                saves = Saves(workdir, experiment.run, peers, progress.say)
                around = mesh, peers, saves, mirror, progress, clock, watchdog, stop, forget
                trainer = Trainer(Context(job, booked, origin, *around))
                names = experiment.run.trackers if peers.is_primary else ()
                with trackers.following(names, workdir, experiment, progress.say):
                    result = trainer.run()
            watchdog.pause()
            mirror.flush()
        _show(result, job, trainer.lines.metrics.read(), trainer.skipped)
    return result.outcome


def _show(result: Result, job: Job, lines: list[dict[str, Any]], excluded: tuple[int, ...]) -> None:
    """Prints how a run ended and how to resume it.

    `lines` are those of metrics.jsonl, `excluded` the steps that roll-backs excluded.
    """
    if result.outcome == "failed":
        job.say(f"failed: {result.why}")
    elif result.outcome == "stopped":
        where = result.why or ("saved" if result.done else "nothing to save")
        job.say(f"stopped at step {result.done}, {where}; run the same command again")
    else:
        describe = {e.name: e.describe for e in job.evaluators}
        last = [line for line in lines if line["kind"] in EVALUATIONS][-1:]
        words = [describe[line["kind"]](line) for line in last]
        if lines and [line["step"] for line in last] != [result.done]:
            words = [f"step {line['step']}: {word}" for line, word in zip(last, words, strict=True)]
            words.append(f"the newest checkpoint (step {result.done}) was not evaluated")
        count, which = skipped_steps(lines, excluded)
        words += [f"{pluralize(count, 'step')} skipped ({which})"] if count else []
        job.say("; ".join([f"finished: step {result.done}", *words]))
        place = job.workdir.named
        job.say(f"{place} holds the finished run; to start again {job.how_to_go_on}")


def _require_checkable(run: Run, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError if devices are to check themselves, or each other, that cannot."""
    platform = mesh.devices.flat[0].platform
    if run.check_every and platform != "tpu":
        raise InputError(
            f"run.check_every={run.check_every}: only TPUs can check themselves, not a {platform}; "
            "set run.check_every=0"
        )
    if run.replay_every and mesh_lib.batch_shards(mesh) < 2:
        raise InputError(
            f"run.replay_every={run.replay_every}: takes two devices; set run.replay_every=0"
        )


@contextlib.contextmanager
def _held(job: Job, peers: Peers) -> Iterator[tuple[Mirror, Callable[[], None]]]:
    """Holds the workdir by process 0 for all; gives what makes it forget a run hardly begun.

    A run that is refused before its first checkpoint leaves none of the files it began.
    """
    workdir = job.workdir
    mirror = Mirror(workdir, peers.number)
    if not peers.is_primary:
        with mirror:
            yield mirror, lambda: None
        return
    workdir.require_ours()
    storage = storage_of(workdir.checkpoints)
    if not storage.names(workdir.checkpoints):
        job.require_start()  # before a corpus is made for weights that do not fit
    with lock(workdir.root, workdir.named) as me:
        workdir.remove_unfinished()
        mirror.acquire(me)
        begun = [name for name in RUN_FILES if not (workdir.root / name).exists()]

        def forget() -> None:
            if workdir.remote is None:
                with contextlib.suppress(OSError, ValueError):  # epath's word for one not empty
                    workdir.checkpoints.rmdir()
            if not storage.names(workdir.checkpoints):
                for name in begun:
                    (workdir.root / name).unlink(missing_ok=True)
                mirror.discard(begun)

        try:
            with mirror:
                yield mirror, forget
        except (InputError, DiskFull):
            forget()
            raise


def _require_one_place(workdir: Workdir, mirror: Mirror, peers: Peers) -> None:
    """Raises InputError on all processes if one does not see who holds the workdir: process 0."""
    if peers.count == 1:
        return

    def look() -> str:
        if not peers.is_primary:  # which knows: another start may have come since
            holder = mirror_lib.read_holder(workdir)
            mirror.token = "" if holder is None else holder.token
        return mirror.token

    peers.meet("lock")
    mend = f"name a --workdir that all of them share, not {workdir.named}, and start them once"
    peers.await_same("holder of the workdir", look, mend, InputError)


def _require_going_on(job: Job) -> None:
    """Raises InputError if the newest checkpoint here belongs to another experiment."""
    workdir, experiment = job.workdir, job.experiment
    checkpoints = Checkpoints(workdir.checkpoints)
    if not checkpoints.steps:
        return
    newest = checkpoints.named("newest")
    metadata = checkpoints.metadata(newest)
    where = f"{workdir.checkpoints / str(newest)}"
    saved = config.from_json(json.dumps(metadata["experiment"]), where, type(experiment))
    if changed := job.differences(saved, metadata):
        phases, hint = getattr(saved, "phases", ()), ""
        is_last = len(changed) == 1 and changed[0].startswith(f"phases.{len(phases) - 1}.steps:")
        if is_last and experiment.total_steps > saved.total_steps:
            hint = "; to train more steps in the last phase, run `bert-jax extend`"
        raise InputError(
            f"{workdir.named}: this run was started with other settings ({'; '.join(changed)}); "
            f"give it the old ones, or choose another --workdir{hint}"
        )
    for line in config.differences(saved, experiment, "placement"):
        job.say(f"resume: {line}")
