"""What several commands load or require before they do their work."""

import argparse
import os
import sys
import typing
from collections.abc import Iterator, Sequence

from etils import epath

from bert_jax import config
from bert_jax.cli.shared import COLUMN_FIELDS
from bert_jax.config import Experiment, Section
from bert_jax.errors import InputError
from bert_jax.storage import buckets, mirror, workdir
from bert_jax.storage.workdir import Workdir

if typing.TYPE_CHECKING:
    from bert_jax.pretraining.loaded import Loaded

T = typing.TypeVar("T", bound=Section)

# Why a flag is rejected for a pre-trained run or a base; see `reject_flags`.
ONLY_FINETUNED = "only a fine-tuned run takes this"


def load_experiment(path: str | None, settings: Sequence[str], root: str | None) -> Experiment:
    """Returns the experiment of a file, or of the run in `root` if there is no file.

    Args:
      path: the file, or the name of a shipped experiment.
      settings: changes, FIELD=VALUE.
      root: the argument of --workdir.
    """
    if path is None:
        return load_saved(root, settings, Experiment)
    return config.override(config.load(path), settings)


def load_saved(root: str | None, settings: Sequence[str], kind: type[T]) -> T:
    """Returns the experiment of the run in `root`, with the settings applied."""
    if not root:
        raise InputError("name an EXPERIMENT, or the --workdir of a run")
    return config.override(workdir.load_experiment(mirror.open_workdir(root), kind), settings)


def open_workdir(
    root: str | None, experiment: Experiment, access: typing.Literal["read", "write"] = "read"
) -> Workdir:
    """Opens the workdir of --workdir, or else the experiment's own, runs/NAME."""
    place = root or f"runs/{experiment.name}"
    return mirror.open_workdir(place, experiment.run.corpus_dir, access)


def require_run(root: str) -> None:
    """Raises InputError if a folder holds no run and no base, before jax is imported."""
    if "://" not in root:  # a bucket is asked once, later
        run = mirror.open_workdir(root)
        if not (run.root / "base.json").exists() and not workdir.holds_finetuning(run):
            workdir.load_experiment(run)


def require_writable(flag: str, path: str | None) -> None:
    """Raises InputError unless a file can be written at `path`, before there is work to lose."""
    if path is None or "://" in path:
        return
    if os.path.isdir(path):
        raise InputError(f"{flag} {path}: is a folder; name a file")
    folder = os.path.dirname(path) or "."
    while not os.path.exists(folder):
        folder = os.path.dirname(folder) or "."
    if not os.path.isdir(folder):
        raise InputError(f"{flag} {path}: {folder} is a file where a folder is needed")


def require_corpus(run: Workdir) -> None:
    """Raises InputError if a run has no prepared corpus, before jax is imported."""
    if not buckets.exists(run.corpus / workdir.COMPLETE):
        raise InputError(f"{run.corpus}: no prepared corpus here; run `bert-jax prepare` first")


def is_finetuned(root: str) -> bool:
    """Returns whether `root` holds a fine-tuned run; raises InputError if it holds no model."""
    require_run(root)
    return workdir.holds_finetuning(mirror.open_workdir(root))


def reject_flags(root: str, reason: str, values: dict[str, object]) -> None:
    """Raises InputError for the first flag that was given but does not apply to a run.

    Args:
      root: the workdir of the run.
      reason: why the flags do not apply.
      values: the values of the flags, by flag.
    """
    for flag, value in values.items():
        if value not in (None, False, []):
            raise InputError(f"{flag}: {root}: {reason}; remove {flag}")


def load_model(
    root: str, base: str | None, checkpoint: str, allow_finetuned: bool = True
) -> "Loaded":
    """Loads the model of a run or base; of a fine-tuned run, its encoder.

    Args:
      root: the workdir.
      base: the argument of --from.
      checkpoint: the argument of --checkpoint.
      allow_finetuned: whether the command takes fine-tuned runs.
    """
    is_tuned = allow_finetuned and is_finetuned(root)
    if not is_tuned:
        reject_flags(root, ONLY_FINETUNED, {"--from": base})
        require_run(root)
    from bert_jax.pretraining.loaded import Loaded
    from bert_jax.running.environment import keep_compiled_programs

    keep_compiled_programs()
    if is_tuned:
        from bert_jax.tasks.predict import TaskModel

        return TaskModel(root, base, checkpoint).encoder()
    return Loaded.of(epath.Path(root), which=checkpoint)


def read_lines() -> Iterator[tuple[str, str]]:
    """Yields (where, line) of standard input."""
    from bert_jax.text import lines

    return lines.decoded(sys.stdin.buffer, "standard input")


def print_now(line: str) -> None:
    """Prints a line and flushes the output."""
    print(line, flush=True)


def get_column_fields(args: argparse.Namespace) -> dict[str, str]:
    """Returns the fields of a task that the flags of `shared.COLUMNS` set."""
    given = {field: getattr(args, flag) for flag, field in COLUMN_FIELDS.items()}
    return {field: value for field, value in given.items() if value is not None}
