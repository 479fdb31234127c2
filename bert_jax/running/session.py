"""Starts, resumes or extends a run in its workdir."""

import contextlib
import functools
import json
import platform
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from bert_jax import config, hardware, process, system
from bert_jax.checkpoints.layout import CheckpointFolder
from bert_jax.checkpoints.load import Checkpoints
from bert_jax.checkpoints.save import Saver
from bert_jax.config import Run, code
from bert_jax.distributed import peers as peers_lib
from bert_jax.distributed.peers import Peers
from bert_jax.distributed.watchdog import StopRequest, Watchdog
from bert_jax.errors import InputError, pluralize
from bert_jax.model import cudnn_attention
from bert_jax.running import trackers
from bert_jax.running.context import HOOKS, Context, Result
from bert_jax.running.environment import code_hash, enable_compilation_cache, versions
from bert_jax.running.job import Job
from bert_jax.running.lines import EVALUATIONS, skipped_steps
from bert_jax.running.progress import Clock, Progress
from bert_jax.running.trainer import Trainer
from bert_jax.storage import mirror as mirror_lib
from bert_jax.storage import retry
from bert_jax.storage.locks import lock
from bert_jax.storage.mirror import Mirror
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import (
    RUN_FILES,
    DiskFull,
    Workdir,
    fork_record,
    write_atomic,
    write_json,
)
from bert_jax.training import mesh as mesh_lib

Outcome = Literal["finished", "stopped", "failed"]


def run(job: Job, progress: Progress, origin: dict[str, Any] | None = None) -> Outcome:
    """Runs an experiment in its workdir to its end, or until asked to stop.

    Args:
      job: the training; a run that is already in the workdir must belong to the same experiment.
      progress: shows lines and the progress bar.
      origin: where the experiment comes from (config.load_with_origin); saved for the command
        `bert-jax report`.
    """
    experiment, workdir = job.experiment, job.workdir
    with contextlib.ExitStack() as stack:
        # The experiment for all slices; below, `experiment` may become one for fewer.
        write_experiment = functools.partial(_write_experiment, workdir, experiment, origin)
        wait = experiment.run.wait_for_slices_seconds
        peers = stack.enter_context(peers_lib.connect_processes(wait, job.fit_to_slices))
        if peers.membership is not None:  # the experiment is for several slices
            active, policy = len(peers.membership.slices), peers.membership.policy
            job.experiment = experiment = job.fit_to_slices(
                active, policy.slice_count, policy.processes_per_slice
            )
        if not peers.is_primary:
            progress.silence()
        # Storage that does not answer is reported among the lines of the run.
        stack.callback(retry.control.reset, retry.control.report)
        retry.control.reset(report=progress.report if peers.is_primary else peers.report)
        mesh = mesh_lib.make_mesh(experiment.parallelism)
        job.check_inputs(mesh)
        _require_same_start(job, peers)
        # Process 0 runs the coordinator of JAX, without which the other processes end.
        is_coordinator = peers.is_primary and peers.count > 1
        watchdog = Watchdog(experiment.run.hang_after_seconds, is_coordinator=is_coordinator)
        stack.callback(watchdog.pause)  # the caller's process may continue after the run
        watchdog.reset(times=2)  # allows twice run.hang_after_seconds: compiling takes long
        _require_checkable(experiment.run, mesh)
        trackers.require_installed(experiment.run.trackers)
        if process.is_own_process:
            system.keep_freed_memory()
            enable_compilation_cache()
        peers.connect_devices(mesh)
        return _train_in_workdir(job, mesh, peers, progress, watchdog, write_experiment)


def _train_in_workdir(
    job: Job,
    mesh: jax.sharding.Mesh,
    peers: Peers,
    progress: Progress,
    watchdog: Watchdog,
    write_experiment: Callable[[Saver], None],
) -> Outcome:
    """Locks the workdir, prepares the data, trains, and reports how the run ended."""
    experiment, workdir, clock = job.experiment, job.workdir, Clock()
    with _lock_workdir(job, peers) as (mirror, clean_up):
        _require_shared(workdir, mirror, peers)
        with CheckpointFolder(workdir.checkpoints).cache_reads():
            _require_resumable(job)
        # Without a time limit, since a large corpus takes hours. A signal still ends the process at
        # once, which is harmless: the next start makes an unfinished corpus again.
        watchdog.pause()
        with clock.waiting("prepare"):
            job.prepare(peers)
            peers.wait_at_barrier("prepare")
        watchdog.reset(times=2)
        with StopRequest(peers) as stop:
            job.open(mesh, peers)
            _report_attention(job, mesh)
            clock.peak_flops = hardware.peak_flops(job.training.objective.model.compute_dtype)
            saver = Saver(workdir, experiment.run, peers, progress.report)
            write = functools.partial(write_experiment, saver) if peers.is_primary else lambda: None
            context = Context(
                job=job,
                write_experiment=write,
                mesh=mesh,
                peers=peers,
                saver=saver,
                mirror=mirror,
                progress=progress,
                clock=clock,
                watchdog=watchdog,
                stop=stop,
                clean_up=clean_up,
                hooks=HOOKS.get(),
            )
            trainer = Trainer(context)
            names = experiment.run.trackers if peers.is_primary else ()
            with trackers.run_trackers(names, workdir, experiment, progress.report):
                result = trainer.run()
        watchdog.pause()
        mirror.flush()
    _show(result, job, trainer.log.lines.metrics.read(), trainer.state.excluded)
    return result.outcome


def _require_same_start(job: Job, peers: Peers) -> None:
    """Raises InputError on all processes if settings, versions or code differ between them."""
    facts = {name: repr(value) for name, value in config.flatten(job.experiment)} | versions()
    facts |= {"python": platform.python_version(), "code of bert_jax": code_hash()}
    facts |= {"may extend": str(job.may_extend)}
    peers.require_same("settings", facts, "start all of them with the same command")


def _write_experiment(
    workdir: Workdir, experiment: Any, origin: dict[str, Any] | None, saver: Saver
) -> None:
    """Writes the experiment, its custom code and its origin to the workdir.

    `experiment` is the one for all slices, even if the run now trains on fewer.
    """
    write_atomic(workdir.experiment, config.to_json(experiment))
    for name, source in code.code_copy(experiment).items():
        write_atomic(workdir.root / name, source)
    if origin is not None:
        if (fork := fork_record(workdir)) and saver.checkpoints.steps:
            # A fork that resumes keeps the record of its parent.
            origin = {"fork": fork} | origin
        write_json(workdir.origin, origin)


def _show(result: Result, job: Job, lines: list[dict[str, Any]], excluded: tuple[int, ...]) -> None:
    """Reports how a run ended and how to resume it.

    `lines` are those of metrics.jsonl, `excluded` the steps that roll-backs excluded.
    """
    if result.outcome == "failed":
        job.report(f"failed: {result.reason}")
    elif result.outcome == "stopped":
        state = result.reason or ("saved" if result.steps_done > 0 else "nothing to save")
        job.report(f"stopped at step {result.steps_done}, {state}; run the same command again")
    else:
        parts = [f"finished: step {result.steps_done}"]
        describe = {evaluator.name: evaluator.describe for evaluator in job.training.evaluators}
        last = next((line for line in reversed(lines) if line["kind"] in EVALUATIONS), None)
        is_evaluated = last is not None and last["step"] == result.steps_done
        if last is not None:
            step = "" if is_evaluated else f"step {last['step']}: "
            parts.append(step + describe[last["kind"]](last))
        if lines and not is_evaluated:
            parts.append(f"the newest checkpoint (step {result.steps_done}) was not evaluated")
        count, steps = skipped_steps(lines, excluded)
        if count:
            parts.append(f"{pluralize(count, 'step')} skipped ({steps})")
        job.report("; ".join(parts))
        path = job.workdir.address
        job.report(f"{path} holds the finished run; to start again {job.finished_hint}")


def _report_attention(job: Job, mesh: jax.sharding.Mesh) -> None:
    """On GPUs, reports whether cuDNN computes attention in training steps, or why it does not."""
    device, parallelism = mesh.devices.flat[0], job.experiment.parallelism
    if device.platform == "gpu":
        model = job.training.objective.model
        reason = cudnn_attention.training_refusal(model, device, parallelism)
        job.report(f"attention: by XLA ({reason})" if reason else "attention: by cuDNN")


def _require_checkable(run: Run, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError if these devices cannot run the checks that the experiment asks for."""
    platform = mesh.devices.flat[0].platform
    if run.check_every and platform != "tpu":
        raise InputError(
            f"run.check_every={run.check_every}: only TPUs can check themselves, not a {platform}; "
            "set run.check_every=0"
        )
    if run.replay_every and mesh_lib.batch_shards(mesh) < 2:
        raise InputError(
            f"run.replay_every={run.replay_every}: needs two devices; set run.replay_every=0"
        )


@contextlib.contextmanager
def _lock_workdir(job: Job, peers: Peers) -> Iterator[tuple[Mirror, Callable[[], None]]]:
    """Locks the workdir on process 0; yields the mirror, and a function that cleans up.

    For a run in a bucket, this process also becomes the run's owner. `clean_up`, the function that
    is yielded, deletes the new files of a run that is refused before its first checkpoint.
    """
    workdir = job.workdir
    mirror = Mirror(workdir, peers.number)
    if not peers.is_primary:
        with mirror:
            yield mirror, lambda: None
        return
    workdir.require_run_or_empty()
    storage = storage_of(workdir.checkpoints)
    if not storage.names(workdir.checkpoints):
        job.require_initial_weights()  # before `prepare` makes a corpus in vain
    with lock(workdir.root, workdir.address) as holder:
        workdir.remove_unfinished()
        mirror.acquire(holder)
        new_files = [name for name in RUN_FILES if not (workdir.root / name).exists()]

        def clean_up() -> None:
            if workdir.remote is None:
                with contextlib.suppress(OSError, ValueError):  # epath: ValueError if not empty
                    workdir.checkpoints.rmdir()
            if not storage.names(workdir.checkpoints):
                for name in new_files:
                    (workdir.root / name).unlink(missing_ok=True)
                mirror.discard(new_files)

        try:
            with mirror:
                yield mirror, clean_up
        except (InputError, DiskFull):
            clean_up()
            raise


def _require_shared(workdir: Workdir, mirror: Mirror, peers: Peers) -> None:
    """Raises InputError on all processes if a process does not see the lock of process 0."""
    if peers.count == 1:
        return

    def update_token() -> str:
        # Process 0 knows its own token; its file may already have that of a later start. The
        # mirrors of the other processes upload with the same token.
        if not peers.is_primary:
            holder = mirror_lib.read_holder(workdir)
            mirror.token = "" if holder is None else holder.token
        return mirror.token

    peers.wait_at_barrier("lock")
    remedy = (
        f"choose a --workdir that all share, not {workdir.address}, and start the run only once"
    )
    peers.await_same("holder of the workdir", update_token, remedy, InputError)


def _require_resumable(job: Job) -> None:
    """Raises InputError if the newest checkpoint belongs to another experiment."""
    workdir, experiment = job.workdir, job.experiment
    checkpoints = Checkpoints(workdir.checkpoints)
    if not checkpoints.steps:
        return
    newest = checkpoints.find_step("newest")
    metadata = checkpoints.metadata(newest)
    path = f"{workdir.checkpoints / str(newest)}"
    saved = config.from_json(json.dumps(metadata["experiment"]), path, type(experiment))
    if changed := job.differences(saved, metadata):
        phases, hint = getattr(saved, "phases", ()), ""
        is_last = len(changed) == 1 and changed[0].startswith(f"phases.{len(phases) - 1}.steps:")
        if is_last and experiment.total_steps > saved.total_steps:
            hint = "; to train more steps in the last phase, run `bert-jax extend`"
        raise InputError(
            f"{workdir.address}: this run was started with other settings ({'; '.join(changed)}); "
            f"use the old settings, or choose another --workdir{hint}"
        )
    # Placement fields may change when a run resumes (see docs/glossary.md).
    for difference in config.differences(saved, experiment, role="placement"):
        job.report(f"resume: {difference}")
