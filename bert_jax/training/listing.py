"""Which checkpoints a run has, and whether they are what was saved."""

import contextlib
import time
from collections.abc import Iterator

from etils import epath

from bert_jax.config import Experiment, Finetuning
from bert_jax.errors import InputError
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir, holds_finetuning, load_experiment, named_errors
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.checkpoint import ASIDE, Checkpoints, Damaged


def listing(folder: epath.Path) -> Iterator[str]:
    """A table of a run's checkpoints, the newest first, and those that were put aside.

    Raises:
      InputError: no run here, or it cannot be read.
    """
    claim, workdir, saved = _open(folder)
    with saved:
        rows = [(number, *_told(saved, number)) for number in saved.steps]
    known = [(loss, number) for number, loss, _ in rows if loss is not None]
    best = min(known)[1] if known else None
    if not rows:
        yield f"{workdir.checkpoints}: no checkpoint yet"
    else:
        yield f"{'step':>10}  {'saved':<16}  {'MB':>9}  held-out loss"
    for row, (number, loss, damage) in enumerate(rows):
        place = workdir.checkpoints / str(number)
        saved_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(place.stat().mtime))
        words = ["-" if loss is None else f"{loss:.3f}"]
        words += ["newest"] * (row == 0) + ["best"] * (number == best) + [damage] * bool(damage)
        yield f"{number:>10}  {saved_at}  {_bytes(place) / 1e6:>9.1f}  {', '.join(words)}"
    for place in sorted(workdir.checkpoints.glob(f"{ASIDE}*")):
        yield f"{place.name}: was found damaged and put aside, {_bytes(place) / 1e6:.1f} MB"
    if rows and _is_finished(claim, saved, rows[0][0]):
        yield "the run is finished"


def verify(folder: epath.Path) -> Iterator[tuple[int, str]]:
    """Reads all checkpoints of a run, whole, on one device: (step, what is wrong or "").

    Raises:
      InputError: no run here, or it cannot be read.
    """
    _, _, saved = _open(folder)
    place = mesh_lib.replicated(mesh_lib.one_device())
    with saved:
        for number in saved.steps:
            try:
                saved.restore(number, saved.abstract_state(number, place))
            except Damaged as error:
                yield number, str(error)
            else:
                yield number, ""


def _open(folder: epath.Path) -> tuple[Experiment | Finetuning, Workdir, Checkpoints]:
    workdir = mirror.opened(folder)
    tuned = holds_finetuning(workdir)
    claim = load_experiment(workdir, Finetuning if tuned else Experiment)
    if not mirror.names(workdir.checkpoints):
        raise InputError(f"{workdir.checkpoints}: no checkpoint yet")
    return claim, workdir, Checkpoints(workdir.checkpoints, claim.run, "read")


def _is_finished(claim: Experiment | Finetuning, saved: Checkpoints, newest: int) -> bool:
    if isinstance(claim, Experiment):
        return newest == claim.total_steps
    with contextlib.suppress(Damaged):
        return newest == saved.metadata(newest)["notes"]["total_steps"]
    return False


def _told(saved: Checkpoints, number: int) -> tuple[float | None, str]:
    try:
        return saved.metadata(number)["held_out_loss"], ""
    except Damaged:
        return None, "damaged"


def _bytes(place: epath.Path) -> int:
    with named_errors(place):
        return sum(
            _bytes(path) if path.is_dir() else path.stat().length for path in place.iterdir()
        )
