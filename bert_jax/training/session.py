"""Starting, going on with and extending a run in its workdir."""

import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import platform
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from etils import epath

import bert_jax
from bert_jax import base as base_lib
from bert_jax import hardware, resolve
from bert_jax.config import Experiment, InputError
from bert_jax.data import corpus
from bert_jax.training import evaluate, metrics, runner
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import peers as peers_lib
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.clock import Clock
from bert_jax.training.environment import environment, versions
from bert_jax.training.peers import Peers
from bert_jax.training.prepared import Prepared
from bert_jax.training.progress import Progress
from bert_jax.training.signals import Pulse, StopRequest
from bert_jax.workdir import Workdir, cache_folder, lock

# M_MMAP_MAX: no mappings of their own; M_TRIM_THRESHOLD: two GiB are kept; M_ARENA_MAX: one pool.
_MALLOPT = ((-4, 0), (-1, 2**31 - 1), (-8, 1))
# Of compiled programs kept for one environment; the ones not used for longest go first.
_COMPILED_BYTES = 2**30
# An environment whose programs nobody used for a month.
_COMPILED_SECONDS = 30 * 24 * 3600
_ENVIRONMENT = re.compile(r"[0-9a-f]{16}")


def pretrain(
    experiment: Experiment,
    workdir: Workdir,
    length: Literal["keep", "extend"],
    progress: Progress,
    origin: dict[str, Any] | None = None,
) -> runner.Outcome:
    """Runs the experiment in its workdir to its end, or until asked to stop.

    Args:
      experiment: the claim; a run that is there already must have made the same.
      workdir: where it lives.
      length: `extend` allows more steps in the last phase than the run was started with.
      progress: shows what happens.
      origin: where the experiment comes from, as resolve.load_with_origin says it; kept for the
        report.

    Raises:
      InputError: bad settings, bad text, or a workdir of another run.
    """
    with peers_lib.connected() as peers:
        if not peers.leads:
            progress = Progress.silent()
        peers.require_same(
            "settings", _facts(experiment, length), "start all of them with the same command"
        )
        pulse = Pulse(experiment.run.hang_after_seconds)
        try:
            return _pretrain(experiment, workdir, length, progress, origin, peers, pulse)
        finally:
            pulse.rest()  # whoever called this may live on


def _pretrain(
    experiment: Experiment,
    workdir: Workdir,
    length: Literal["keep", "extend"],
    progress: Progress,
    origin: dict[str, Any] | None,
    peers: Peers,
    pulse: Pulse,
) -> runner.Outcome:
    pulse.beat(times=2)
    mesh = mesh_lib.make_mesh(experiment.mesh)
    runner.require_runnable(experiment, mesh)
    _keep_freed_memory()
    _keep_compiled_programs()
    clock = Clock(hardware.peak_flops(experiment.model.compute_dtype))
    with _held(experiment, workdir, peers) as forget:
        peers.require_shared(workdir.root)
        _require_same_claim(experiment, workdir, length, progress)
        # A signal ends this at once: a corpus half made is made anew.
        pulse.rest()
        with clock.waiting("prepare"):
            peers.first("prepare", lambda: _prepare(experiment, workdir, progress, peers))
        pulse.beat(times=2)
        with StopRequest.of(peers) as stop:
            trainer = runner.Trainer(
                experiment, workdir, mesh, progress, clock, origin, peers, pulse
            )
            outcome = trainer.run(stop, forget)
    if outcome == "failed":
        progress.say(f"failed: {trainer.failed}")
        return outcome
    if outcome == "stopped":
        progress.say(f"stopped at step {trainer.done}, {trainer.kept}; run the same command again")
        return outcome
    lines = metrics.Lines(workdir.metrics).read()
    evaluations = [evaluate.summary(line) for line in lines if line["kind"] == "evaluation"]
    progress.say("; ".join([f"finished: step {trainer.done}", *evaluations[-1:]]))
    progress.say(
        f"{workdir.root} holds the finished run; to start anew choose another --workdir, to go "
        "on raise the last phase's steps with --extend"
    )
    return outcome


def _prepare(experiment: Experiment, workdir: Workdir, progress: Progress, peers: Peers) -> None:
    """Makes the corpus, or finds it, with all that processes would else make at the same time."""
    corpus.prepare(experiment.corpus, experiment.model.vocab_size, workdir.corpus, progress.say)
    if peers.count == 1:
        return
    prepared = Prepared.open(workdir.corpus)
    corpus.open_stream(workdir.corpus, "validation")
    for phase in range(len(experiment.phases)):
        prepared.train_batches(experiment, phase)


def _facts(experiment: Experiment, length: str) -> dict[str, str]:
    """What all processes must have alike, by name."""
    code = hashlib.sha256()
    folder = pathlib.Path(bert_jax.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        code.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return {
        **{name: repr(value) for name, value in resolve.flatten(experiment)},
        **versions(),
        "python": platform.python_version(),
        "code of bert_jax": code.hexdigest()[:12],
        "length": length,
    }


@contextlib.contextmanager
def _held(experiment: Experiment, workdir: Workdir, peers: Peers) -> Iterator[Callable[[], None]]:
    """The workdir, held by process 0 for all; gives what makes it forget a run hardly begun.

    A run that is refused before its first checkpoint leaves none of the files it began.
    """
    if not peers.leads:
        yield lambda: None
        return
    workdir.require_ours()
    if not workdir.checkpoints.exists():
        base_lib.start_of(experiment)  # before a corpus is made for weights that do not fit
    with lock(workdir.root):
        files = (
            workdir.experiment,
            workdir.origin,
            workdir.metrics,
            workdir.predictions,
            workdir.timings,
        )
        begun = [path for path in files if not path.exists()]

        def forget() -> None:
            with contextlib.suppress(OSError, ValueError):  # epath's word for one not empty
                workdir.checkpoints.rmdir()
            if not workdir.checkpoints.exists():
                for path in begun:
                    path.unlink(missing_ok=True)

        try:
            yield forget
        except InputError:
            forget()
            raise


def _keep_freed_memory() -> None:
    """Tells the C library to keep what is freed instead of giving it back to the system.

    XLA on a CPU asks for every buffer of a step anew; returned pages are faulted in again at each,
    a fifth of the time of a small model's step.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option, value in _MALLOPT:
            libc.mallopt(option, value)


def _keep_compiled_programs() -> None:
    """Keeps compiled steps in the user's cache folder, so that a run goes on without compiling.

    JAX_COMPILATION_CACHE_DIR names another place (a bucket that hosts share, say); empty: none.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    # A CPU's programs use what that very CPU can do; home folders are shared between machines.
    name = hashlib.sha256(json.dumps(environment()).encode()).hexdigest()[:16]
    _forget_old_environments(cache_folder(), name)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / name))
    jax.config.update("jax_compilation_cache_max_size", _COMPILED_BYTES)


def _forget_old_environments(cache: epath.Path, ours: str) -> None:
    """Removes the programs of environments that were not used for long: of old versions, mostly."""
    with contextlib.suppress(OSError):  # another process may remove the same, or nothing is there
        for folder in cache.iterdir():
            if folder.name == ours or not _ENVIRONMENT.fullmatch(folder.name):
                continue
            # jax writes a file at each use of a program.
            used = max((path.stat().mtime for path in folder.iterdir()), default=0)
            if used < time.time() - _COMPILED_SECONDS:
                folder.rmtree()


def _require_same_claim(
    experiment: Experiment, workdir: Workdir, length: str, progress: Progress
) -> None:
    """Raises InputError if the newest checkpoint here belongs to another claim."""
    if not workdir.checkpoints.exists():
        return
    with Checkpoints(workdir.checkpoints, experiment.run, "read") as checkpoints:
        newest = checkpoints.newest_step()
        if newest is None:
            return
        saved = checkpoints.claim(newest)
        began_with = checkpoints.metadata(newest)["init_sha256"]
    changed = resolve.differences(saved, experiment, "identity")
    if length == "extend":
        last = f"phases.{len(saved.phases) - 1}.steps:"
        if experiment.total_steps < saved.total_steps:
            raise InputError(
                f"--extend: the run has {saved.total_steps} steps already, "
                f"not {experiment.total_steps}"
            )
        if any(line.startswith(last) for line in changed):
            progress.say("extend: the learning-rate schedule now ends later, and so changes")
        changed = [line for line in changed if not line.startswith(last)]
    if changed:
        raise InputError(
            f"{workdir.root}: this run was started with other settings ({'; '.join(changed)}); "
            "give it the old ones, or choose another --workdir"
        )
    if experiment.init_from and not base_lib.is_base(epath.Path(experiment.init_from)):
        progress.say(f"resume: there is no {experiment.init_from} any more to compare with")
    elif experiment.init_from:
        base_lib.require_same_weights(experiment.init_from, began_with)
    for line in resolve.differences(saved, experiment, "placement"):
        progress.say(f"resume: {line}")
