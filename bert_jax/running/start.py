"""The state that a run starts from or rolls back to. It is the first of these that exists:

1. the newest checkpoint of the run that is not damaged (resume);
2. the checkpoint of another run that the run was forked from (see checkpoints.fork);
3. a fresh state with the weights of a base;
4. a fresh random state.

Checkpoint N is the state just before step N; steps are numbered from 0.

A step without a finite loss and gradient changes nothing (see training.step). A few such steps are
harmless. Many in a row mean that an earlier update or the hardware has broken the parameters: then
`roll_back` restores a checkpoint before these steps, and the run skips them.

All processes call these functions together and get the same result.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from bert_jax.checkpoints.fork import ForkPoint
from bert_jax.checkpoints.load import Checkpoints, Restored
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
    skipped: tuple[int, ...]  # steps that roll-backs excluded
    init_sha256: str  # hash of the base; "" without a base
    start_step: int  # step of the first state: not 0 in a fork
    held_out: list[tuple[int, float]]  # all (step, held-out loss), if patience > 0
    # The newest line with a held-out loss since the last start or roll-back.
    evaluation: dict[str, Any] = dataclasses.field(default_factory=dict)


def begin(context: Context, lines: RunLines) -> RunState:
    """Returns the state to start from; renames damaged checkpoints, drops lines of later steps.

    Raises:
      Unavailable: the storage does not answer, or the processes see different checkpoints.
    """
    _await_same_steps(context)
    context.peers.run_on_primary("lost", lambda: _rename_lost_checkpoint(context))
    restored = _restore_or_initialize(context, None)
    context.hooks.on_restore(restored.step, None)
    return _resume(restored, context, lines)


def roll_back(
    state: RunState,
    error: Divergence | SilentCorruption,
    event: str,
    context: Context,
    lines: RunLines,
) -> RunState:
    """Returns the state of an earlier checkpoint, which skips bad steps; deletes newer ones.

    First frees the arrays of `state`, since two states may not fit. The decision is not stored: a
    run that restarts from a checkpoint before the bad steps meets them and rolls back again.

    `event` is the error in words.

    Raises:
      RunFailure: too many steps would be repeated, see `can_roll_back`; nothing was deleted.
    """
    job = context.job
    first, skipped = state.done - job.experiment.run.replay_every, state.skipped
    if isinstance(error, Divergence):
        skipped, first = exclude_steps(skipped, error.bad)
    state.arrays, state.window = {}, {}
    restored = _restore_before(first, state, error, context)
    if isinstance(error, SilentCorruption):
        job.report(f"{event}; rolling back to step {restored.step}")
        return _resume(restored, context, lines)
    target = "" if restored.step else " to step 0, since there is no earlier checkpoint"
    job.report(
        f"{event}; rolling back{target}, and skipping these and the one before "
        f"({job.inspection_hint(first)})"
    )
    restored.state = with_skipped(restored.state, skipped)
    return dataclasses.replace(_resume(restored, context, lines), skipped=skipped)


def _restore_before(
    first: int, state: RunState, error: Divergence | SilentCorruption, context: Context
) -> Restored:
    """Restores the newest checkpoint at or before step `first`; deletes newer ones.

    If no checkpoint is close enough (`can_roll_back`), a divergence ends the run, and silent data
    corruption falls back to the oldest checkpoint.
    """
    peers, saver = context.peers, context.saves
    try:
        saver.wait()
    except Unavailable:  # a single process does not need the checkpoint that was not saved
        if peers.count > 1:
            raise  # the other processes wait for this save inside Orbax
    _await_same_steps(context)
    every = context.job.experiment.run.checkpoint_every
    if not can_roll_back(saver.checkpoints.steps, first, every, state.start_step):
        if isinstance(error, Divergence):
            raise RunFailure(
                f"{error}, and no checkpoint from shortly before step {first + 1} is kept; "
                "no checkpoint was deleted",
                "a larger run.keep_checkpoints or a lower optimizer.peak_learning_rate",
            )
        first = saver.checkpoints.steps[-1]
    restored = _restore_or_initialize(context, first)
    context.hooks.on_restore(restored.step, state.done)
    peers.wait_at_barrier("restored")  # until here, other processes may list the checkpoints
    peers.run_on_primary("removed", lambda: saver.delete_after(first, context.mirror.flush))
    saver.refresh()
    return restored


def _resume(restored: Restored, context: Context, lines: RunLines) -> RunState:
    """Returns the state of the next step; drops lines of steps that will be repeated."""
    done, metadata, report = restored.step, restored.metadata, context.job.report
    window = step.make_empty_window(context.job.training.metric_names, context.mesh)()
    # A fork with another objective drops metric sums that no longer exist.
    sums = {k: np.array(v, np.float32) for k, v in metadata["window"].items() if k in window}
    window |= feed.put(sums, mesh_lib.replicated(context.mesh))
    # Not at step 0: a fresh state may not fit, and then JAX would wait forever for its parts.
    slots = jax.device_get(restored.state["skipped_steps"]) if done else ()
    skipped = tuple(int(slot) for slot in slots if slot >= 0)
    with context.saves.checkpoints.folder.cache_reads():
        context.saves.resume_from(done)
    for name, lost in lines.resume_from(done, metadata.get("lines", {})):
        context.hooks.on_truncate(name)
        if lost:
            report(f"{name}: is missing; continuing without its {lost} lines")
    if done:
        report(f"resume: from step {done}")
    facts = metadata["init_sha256"], metadata.get("begun_at", 0), [*metadata.get("held_out", [])]
    return RunState(done, restored.state, window, skipped, *facts)


def _restore_or_initialize(context: Context, at_most: int | None) -> Restored:
    """Returns the state by the first case of the module docstring that applies.

    `at_most` is the highest step of a checkpoint that may be used; None: any.
    """
    job = context.job
    spec = job.training.objective, job.training.optimizer, job.experiment.parallelism, context.mesh
    abstract = step.abstract_state(*spec)

    def first_error(name: str, error: str) -> str:
        # Waits long: a process repeats reads for a while before it gives up.
        return context.peers.exchange_errors(
            f"checkpoint {name}", error, patience=2 * retry.GIVE_UP
        )

    checkpoints, restored = context.saves.checkpoints, None
    with checkpoints.folder.cache_reads(), contextlib.suppress(InputError):
        restored = checkpoints.newest(abstract, at_most, first_error)
    if restored is None or restored.damaged:  # read again: a cached listing may be stale
        restored = checkpoints.newest(abstract, at_most, first_error)
    if restored is not None:  # case 1
        job.resume(restored.metadata)
    elif job.fork_point is not None:  # case 2
        restored = _load_fork_point(job.fork_point, context, abstract, first_error)
    else:  # case 3, or case 4 for a job without a base
        state, sha256 = job.initial_state(step.make_init(*spec)(job.experiment.seed))
        return Restored(0, state, {"init_sha256": sha256, "window": {}}, {})
    _rename_damaged_checkpoints(context, restored)
    if changed := describe_changes(restored.metadata["environment"]):
        job.report(f"resume: {changed}")
    return restored


def _load_fork_point(
    fork_point: ForkPoint, context: Context, abstract: Any, first_error: Callable[[str, str], str]
) -> Restored:
    """Restores the checkpoint that a run forks; a fork's own kind of optimizer starts again."""
    job = context.job
    checkpoints = Checkpoints(fork_point.workdir.checkpoints)
    old, new = checkpoints.experiment(fork_point.step).optimizer, job.training.optimizer
    objective, parallelism = job.training.objective, job.experiment.parallelism
    saved = step.abstract_state(objective, old, parallelism, context.mesh)
    restored = checkpoints.newest(saved, fork_point.step, first_error)
    command = fork_point.command
    if restored is None or restored.step != fork_point.step:
        raise InputError(f"{command} {fork_point}: damaged or removed; choose another checkpoint")
    note = "; its result differs from that of its settings from step 0" * (command == "fork")
    job.report(f"{command}: from {fork_point} on{note}")
    if old.name == new.name:  # only parts without arrays may differ, as by optimizer.layer_decay
        leaves, tree = jax.tree.leaves(restored.state["optimizer"]), abstract["optimizer"]
        restored.state["optimizer"] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    else:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract["optimizer"])
        init = jax.jit(optimizer_lib.make_optimizer(new).init, out_shardings=shardings)
        restored.state["optimizer"] = init(restored.state["params"])
        job.report(f"optimizer.name: {old.name} -> {new.name}, whose moments begin at 0")
    if command == "decay":
        job.resume(restored.metadata)
    restored.metadata["begun_at"] = fork_point.step
    return restored


def _await_same_steps(context: Context) -> None:
    """Waits until all processes see the same checkpoints; raises Unavailable if they do not."""
    peers, saver = context.peers, context.saves

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
    """Renames damaged checkpoints newer than the restored one, and unreadable older ones."""
    checkpoints = context.saves.checkpoints

    def rename() -> None:
        with checkpoints.folder.cache_reads():
            unreadable = checkpoints.unreadable()
        unreadable = checkpoints.unreadable() if unreadable else {}
        for number, reason in (unreadable | restored.damaged).items():
            new_name = checkpoints.folder.rename_damaged(number)
            context.job.report(f"{reason}; now {new_name}, resuming from step {restored.step}")

    context.peers.run_on_primary("damaged", rename)
    context.saves.refresh()


def _rename_lost_checkpoint(context: Context) -> None:
    """Reports and renames the newest complete checkpoint if it is now incomplete or missing."""
    job, folder = context.job, context.saves.checkpoints.folder
    path, remedy = job.workdir.saved, "remove it to continue"
    step = read_json(path, 1, remedy, remedy)["step"] if path.exists() else 0
    with folder.cache_reads():
        newest = max(folder.steps, default=0)
    if step > newest:  # list again: the cached listing may be stale
        newest = max(folder.steps, default=0)
    if step <= newest:
        return
    lost = f"{folder.step_path(step)}: damaged, was complete once and is now incomplete or missing"
    if not newest:
        raise InputError(
            f"{lost}, and no other checkpoint is left to resume from; restore its files "
            "from a copy, or choose another --workdir to start again"
        )
    new_name = folder.rename_damaged(step)
    job.report(f"{lost}{f'; now {new_name}' * bool(new_name)}, resuming from step {newest}")


# --- errors and excluded steps --------------------------------------------------------------------


def describe_error(error: Divergence | SilentCorruption, done: int, peers: Peers) -> str:
    """Returns the error in words, with wrong devices and their processes."""
    if isinstance(error, Divergence):
        return str(error)
    names = [f"device {device.id} of {peers.owner(device)}" for device in error.devices]
    either, link = ("", " and ") if error.is_sure else ("either ", " or ")
    return f"step {done}: {either}{link.join(names)} came to another result of the same rows"


def with_skipped(state: step.State, steps: tuple[int, ...]) -> step.State:
    """Returns the state with these steps as the ones that it skips."""
    slots = np.full(MAX_SKIPPED_STEPS, -1, np.int32)
    slots[: len(steps)] = steps
    return state | {"skipped_steps": feed.put(slots, state["skipped_steps"].sharding)}


def require_excludable(error: Divergence, skipped: Iterable[int], experiment: Any) -> None:
    """Raises RunFailure if the run may not, or cannot, skip the bad steps."""
    count, bad = len([*skipped]), error.bad
    if experiment.optimizer.after_bad_steps == "stop":
        reason = "optimizer.after_bad_steps=stop"
    elif len(exclude_steps(skipped, bad)[0]) > MAX_SKIPPED_STEPS:
        reason = f"{count} steps are skipped already"
    else:
        return
    raise RunFailure(
        f"no finite loss or gradient in the {len(bad)} steps from {bad[0]} to {bad[-1]}, and "
        f"{reason}; all checkpoints are older than these steps"
    )


def exclude_steps(skipped: Iterable[int], bad: range) -> tuple[tuple[int, ...], int]:
    """Returns the steps to exclude after the steps `bad`, and the first step to repeat.

    Excludes the last step before the bad ones as well: its update led to them, so that without it
    the run takes another path.
    """
    known = set(skipped)
    first = next((step for step in range(bad[0] - 1, -1, -1) if step not in known), bad[0])
    return tuple(sorted(known.union(bad, [first]))), first


def can_roll_back(checkpoints: Iterable[int], first: int, every: int, start_step: int = 0) -> bool:
    """Returns whether the newest state before step `first` is near enough for a roll-back.

    It is if no checkpoint is newer, since a killed run would resume from it as well, or if at most
    two intervals of `every` steps are repeated. A run that rolls back repeatedly needs ever older
    checkpoints, while only the newest are kept. Older ones may be thousands of steps away; the run
    does not decide on its own to repeat so many steps.
    """
    steps = list(checkpoints)
    if max(steps, default=0) <= first:
        return True
    older = [step for step in steps if step <= first]
    if not older and start_step:
        return False  # a fork cannot start again at step 0
    return first - max(older, default=0) < 2 * every
