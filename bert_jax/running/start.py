"""The state that a run starts from or rolls back to. It is the first of these that exists:

1. the newest checkpoint of the run that is not damaged (resume);
2. the checkpoint of another run that the run was forked from (see checkpoints.fork);
3. a fresh state with the weights of a base;
4. a fresh random state.

Checkpoint N is the state just before step N; steps are numbered from 0.

A step without a finite loss and gradient changes nothing (see training.step). A few such steps are
harmless. Many in a row mean that an earlier update or the hardware has broken the parameters: then
`roll_back` restores a checkpoint from before these steps, and the run skips them. (A checkpoint is
damaged if its content is not what was saved, and lost if its files are missing.)

All processes call these functions together and get the same result.
"""

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from bert_jax.checkpoints.fork import ForkPoint
from bert_jax.checkpoints.load import Checkpoints, ExchangeErrors, Restored
from bert_jax.config import MAX_SKIPPED_STEPS
from bert_jax.distributed.peers import Peers
from bert_jax.errors import InputError, Unavailable
from bert_jax.running.context import Context
from bert_jax.running.environment import describe_changes
from bert_jax.running.lines import RunLines
from bert_jax.storage import retry
from bert_jax.storage.workdir import read_json
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training.recompute_check import SilentCorruption


class RunFailure(Exception):
    """A run cannot continue; the message gives the reason."""

    def __init__(self, reason: str, remedy: str = "a lower optimizer.peak_learning_rate"):
        super().__init__(f"{reason}; start again with {remedy}")


class Divergence(Exception):
    """Many steps in a row had no finite loss or gradient."""

    def __init__(self, bad: range):
        super().__init__(f"steps {bad[0]} to {bad[-1]} have no finite loss or gradient")
        self.bad = bad


@dataclasses.dataclass
class RunState:
    """The state of a run after `done` steps; the loop changes it, and a checkpoint saves it."""

    done: int  # steps
    arrays: step.State  # on the devices; each step donates their buffers
    window: dict[str, jax.Array]  # sums of metrics since the last training line
    excluded: tuple[int, ...]  # steps that roll-backs excluded
    init_sha256: str  # hash of the base; "" without a base
    start_step: int  # step of the first state: not 0 in a fork; `begun_at` in checkpoints
    held_out: list[tuple[int, float]]  # all (step, held-out loss), if patience > 0
    # The newest line with a held-out loss since the last start or roll-back.
    evaluation: dict[str, Any] = dataclasses.field(default_factory=dict)


def begin(context: Context, lines: RunLines) -> RunState:
    """Returns the state to start from; renames damaged checkpoints, drops lines of later steps.

    Raises:
      Unavailable: the storage does not answer, or the processes see different checkpoints.
    """
    _await_same_checkpoints(context)
    context.peers.run_on_primary("rename lost", lambda: _rename_lost_checkpoint(context))
    restored = _restore_or_initialize(context, None)
    context.hooks.on_restore(restored.step, None)
    return _make_state(restored, context, lines)


def roll_back(
    state: RunState,
    error: Divergence | SilentCorruption,
    description: str,
    context: Context,
    lines: RunLines,
) -> RunState:
    """Returns the state of an earlier checkpoint, and deletes newer checkpoints.

    After a divergence, the returned state excludes the bad steps. The next checkpoint saves which
    steps are excluded. If the run is killed before then, it diverges and rolls back once more.

    First frees the arrays of `state`, since two states may not fit. `description` is the error in
    words.

    Raises:
      RunFailure: too many steps would be repeated, see `can_roll_back`; nothing was deleted.
    """
    job = context.job
    if isinstance(error, Divergence):
        excluded, at_most = exclude_steps(state.excluded, error.bad)
    else:  # no device was wrong in the previous recompute check, which was before this step
        excluded, at_most = state.excluded, state.done - job.experiment.run.replay_every
    state.arrays, state.window = {}, {}
    restored = _restore_at_or_before(at_most, state, error, context)
    event = f"{description}; rolling back to step {restored.step}"
    if isinstance(error, SilentCorruption):
        job.report(event)
        return _make_state(restored, context, lines)
    reason = "" if restored.step else ", since there is no earlier checkpoint"
    also = "" if at_most in error.bad else f" and step {at_most}"
    hint = job.inspection_hint(at_most)
    job.report(f"{event}{reason}, and skipping these steps{also} ({hint})")
    new_state = _make_state(restored, context, lines)
    new_state.arrays = with_excluded(new_state.arrays, excluded)
    new_state.excluded = excluded
    return new_state


def _restore_at_or_before(
    at_most: int, state: RunState, error: Divergence | SilentCorruption, context: Context
) -> Restored:
    """Restores the newest checkpoint at or before step `at_most`, and deletes newer checkpoints.

    If no checkpoint is close enough (`can_roll_back`), a divergence ends the run, and silent data
    corruption falls back to the oldest checkpoint.
    """
    peers, saver = context.peers, context.saver
    try:
        saver.wait()
    except Unavailable:
        # The newest checkpoint was not saved. A single process can restore an older one.
        if peers.count > 1:
            raise  # the other processes wait for this save inside Orbax
    _await_same_checkpoints(context)
    every = context.job.experiment.run.checkpoint_every
    if not can_roll_back(saver.checkpoints.steps, at_most, every, state.start_step):
        if isinstance(error, Divergence):
            raise RunFailure(
                f"{error}, and no checkpoint from shortly before these steps is kept; "
                "no checkpoint was deleted",
                "a larger run.keep_checkpoints or a lower optimizer.peak_learning_rate",
            )
        # The most likely one to be from before the error; a fresh start would lose more.
        at_most = min(saver.checkpoints.steps)
    restored = _restore_or_initialize(context, at_most)
    context.hooks.on_restore(restored.step, state.done)
    peers.wait_at_barrier("restore")  # until here, other processes may list the checkpoints
    # `flush` is called before the deletion: a bucket must not name a deleted checkpoint as newest.
    peers.run_on_primary("delete newer", lambda: saver.delete_after(at_most, context.mirror.flush))
    saver.refresh()
    return restored


def _make_state(restored: Restored, context: Context, lines: RunLines) -> RunState:
    """Returns the state after a start or a roll-back; drops lines of steps to be repeated."""
    done, metadata, report = restored.step, restored.metadata, context.job.report
    window = step.make_empty_window(context.job.training.metric_names, context.mesh)()
    # A fork with another objective drops metric sums that no longer exist.
    sums = {k: np.array(v, np.float32) for k, v in metadata["window"].items() if k in window}
    window |= feed.put(sums, mesh_lib.replicated(context.mesh))
    # Not read at step 0, where no step is excluded: if a fresh state does not fit into the devices'
    # memory, `device_get` would wait forever.
    entries = jax.device_get(restored.state["skipped_steps"]) if done else ()  # -1: unused
    excluded = tuple(int(entry) for entry in entries if entry >= 0)
    with context.saver.checkpoints.folder.cache_reads():
        context.saver.resume_from(done)
    for name, lost_lines in lines.resume_from(done, metadata.get("lines", {})):
        context.hooks.on_open_file(name)
        if lost_lines:
            report(f"{name}: is missing; continuing without its {lost_lines} lines")
    if done:
        report(f"resume: from step {done}")
    return RunState(
        done=done,
        arrays=restored.state,
        window=window,
        excluded=excluded,
        init_sha256=metadata["init_sha256"],
        start_step=metadata.get("begun_at", 0),
        held_out=[*metadata.get("held_out", [])],
    )


def _restore_or_initialize(context: Context, at_most: int | None) -> Restored:
    """Returns the state by the first case of the module docstring that applies.

    `at_most` is the highest step of a checkpoint that may be used; None: any.
    """
    job = context.job
    spec = job.training.objective, job.training.optimizer, job.experiment.parallelism, context.mesh
    abstract = step.abstract_state(*spec)

    def exchange_errors(name: str, error: str) -> str:
        """Waits for all processes; returns the first error of any of them, "" for none."""
        # Waits long: a process repeats reads for a while before it gives up.
        return context.peers.exchange_errors(
            f"checkpoint {name}", error, extra_seconds=2 * retry.GIVE_UP
        )

    checkpoints, restored = context.saver.checkpoints, None
    # A cached listing may be stale: if it leads to no checkpoint, to an error or to a damaged
    # checkpoint, all is read again without the cache.
    with checkpoints.folder.cache_reads(), contextlib.suppress(InputError):
        restored = checkpoints.restore_newest(abstract, at_most, exchange_errors)
    if restored is None or restored.damaged:
        restored = checkpoints.restore_newest(abstract, at_most, exchange_errors)
    if restored is not None:  # case 1
        job.accept_checkpoint(restored.metadata)
    elif job.fork_point is not None:  # case 2
        restored = _load_fork_point(job.fork_point, context, abstract, exchange_errors)
    else:  # case 3, or case 4 for a job without a base
        state, sha256 = job.initial_state(step.make_init(*spec)(job.experiment.seed))
        metadata = {"init_sha256": sha256, "window": {}}
        return Restored(step=0, state=state, metadata=metadata, damaged={})
    _rename_damaged_checkpoints(context, restored)
    if changed := describe_changes(restored.metadata["environment"]):
        job.report(f"resume: {changed}")
    return restored


def _load_fork_point(
    fork_point: ForkPoint, context: Context, abstract: Any, exchange_errors: ExchangeErrors
) -> Restored:
    """Restores the checkpoint that a run forks; `abstract` is the abstract state of the fork.

    If the fork has another kind of optimizer, initializes the optimizer's state.
    """
    job = context.job
    checkpoints = Checkpoints(fork_point.workdir.checkpoints)
    old, new = checkpoints.experiment(fork_point.step).optimizer, job.training.optimizer
    objective, parallelism = job.training.objective, job.experiment.parallelism
    abstract_saved = step.abstract_state(objective, old, parallelism, context.mesh)
    restored = checkpoints.restore_newest(abstract_saved, fork_point.step, exchange_errors)
    command = fork_point.command
    if restored is None or restored.step != fork_point.step:
        raise InputError(f"{command} {fork_point}: damaged or removed; choose another checkpoint")
    note = ""
    if command == "fork":
        note = "; its result will differ from a run with these settings from step 0"
    job.report(f"{command}: from {fork_point} on{note}")
    if old.name == new.name:  # the trees may differ in empty nodes, as by optimizer.layer_decay
        leaves, tree = jax.tree.leaves(restored.state["optimizer"]), abstract["optimizer"]
        restored.state["optimizer"] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    else:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract["optimizer"])
        init = jax.jit(optimizer_lib.make_optimizer(new).init, out_shardings=shardings)
        restored.state["optimizer"] = init(restored.state["params"])
        job.report(f"optimizer.name: {old.name} -> {new.name}, whose moments begin at 0")
    if command == "decay":  # it has the corpus of its parent, while a fork may have another
        job.accept_checkpoint(restored.metadata)
    restored.metadata["begun_at"] = fork_point.step
    return restored


def _await_same_checkpoints(context: Context) -> None:
    """Waits until all processes see the same checkpoints; raises Unavailable if they do not."""
    peers, saver = context.peers, context.saver

    def list_steps() -> str:
        with saver.checkpoints.folder.cache_reads():
            saver.refresh()
            return ", ".join(map(str, saver.checkpoints.steps))

    # Until all are here, process 0 may still be saving a checkpoint.
    peers.wait_at_barrier("last save", is_timed=True)
    peers.await_same(
        "checkpoints", list_steps, "run again once all see the same files", Unavailable
    )


def _rename_damaged_checkpoints(context: Context, restored: Restored) -> None:
    """Renames newer checkpoints that were found damaged, and all whose metadata are unreadable."""
    checkpoints = context.saver.checkpoints

    def rename() -> None:
        with checkpoints.folder.cache_reads():
            unreadable = checkpoints.unreadable()
        if unreadable:  # read again without the cache, which may be stale
            unreadable = checkpoints.unreadable()
        for number, reason in (unreadable | restored.damaged).items():
            new_name = checkpoints.folder.rename_damaged(number)
            context.job.report(f"{reason}; now {new_name}, resuming from step {restored.step}")

    context.peers.run_on_primary("rename damaged", rename)
    context.saver.refresh()


def _rename_lost_checkpoint(context: Context) -> None:
    """Reports and renames the newest complete checkpoint if it is now incomplete or missing."""
    job, folder = context.job, context.saver.checkpoints.folder
    path, remedy = job.workdir.saved, "remove it to continue"
    step = 0
    if path.exists():  # the record of the newest checkpoint that was complete
        record = read_json(path, format_version=1, version_remedy=remedy, damage_remedy=remedy)
        step = record["step"]
    with folder.cache_reads():
        newest = max(folder.steps, default=0)
    if step > newest:  # list again without the cache, which may be stale
        newest = max(folder.steps, default=0)
    if step <= newest:
        return
    lost = f"{folder.step_path(step)}: damaged, was complete once and is now incomplete or missing"
    if not newest:
        raise InputError(
            f"{lost}, and no other checkpoint is left to resume from; restore its files "
            "from a copy, or choose another --workdir to start again"
        )
    new_name = folder.rename_damaged(step)  # "" if its whole folder is missing
    renamed = f"; now {new_name}" if new_name else ""
    job.report(f"{lost}{renamed}, resuming from step {newest}")


# --- errors and excluded steps --------------------------------------------------------------------


def describe_error(error: Divergence | SilentCorruption, done: int, peers: Peers) -> str:
    """Returns the error in words, with the faulty devices and their processes."""
    if isinstance(error, Divergence):
        return str(error)
    names = [f"device {device.id} of {peers.owner(device)}" for device in error.devices]
    subject = " and ".join(names) if error.is_sure else f"either {' or '.join(names)}"
    return f"step {done}: {subject} came to another result of the same rows"


def with_excluded(state: step.State, steps: tuple[int, ...]) -> step.State:
    """Returns the state that excludes these steps, and no others."""
    entries = np.full(MAX_SKIPPED_STEPS, -1, np.int32)  # -1: unused
    entries[: len(steps)] = steps
    return state | {"skipped_steps": feed.put(entries, state["skipped_steps"].sharding)}


def require_excludable(error: Divergence, excluded: Iterable[int], experiment: Any) -> None:
    """Raises RunFailure if the run may not, or cannot, exclude the bad steps as well."""
    count, bad = len([*excluded]), error.bad
    if experiment.optimizer.after_bad_steps == "stop":
        reason = "optimizer.after_bad_steps=stop"
    elif len(exclude_steps(excluded, bad)[0]) > MAX_SKIPPED_STEPS:
        reason = f"{count} steps are skipped already"
    else:
        return
    raise RunFailure(
        f"no finite loss or gradient in the {len(bad)} steps from {bad[0]} to {bad[-1]}, and "
        f"{reason}; all checkpoints are older than these steps"
    )


def exclude_steps(excluded: Iterable[int], bad: range) -> tuple[tuple[int, ...], int]:
    """Returns the steps to exclude because of the steps `bad`, and the first newly excluded step.

    The run must restore a checkpoint at or before the latter. Excludes the last trained step before
    the bad ones as well: its update led to them, so without it the run takes another path.
    """
    known = set(excluded)
    first = next((step for step in range(bad[0] - 1, -1, -1) if step not in known), bad[0])
    return tuple(sorted(known.union(bad, [first]))), first


def can_roll_back(saved: Iterable[int], at_most: int, every: int, start_step: int = 0) -> bool:
    """Returns whether a run may roll back to its newest state at or before step `at_most`.

    `saved` are the steps of its checkpoints; without one, the state is that of step 0. The run may
    roll back if no checkpoint is newer than `at_most`, since it would resume from the same state
    after a kill. Else it must repeat fewer than two intervals of `every` steps. A run that rolls
    back repeatedly needs ever older checkpoints, while only the newest are kept. Older ones may be
    thousands of steps away; the run does not decide on its own to repeat so many steps.
    """
    steps = list(saved)
    if max(steps, default=0) <= at_most:
        return True
    older = [step for step in steps if step <= at_most]
    if not older and start_step:
        return False  # a fork cannot start again at step 0
    return at_most - max(older, default=0) < 2 * every
