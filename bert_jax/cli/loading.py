"""What several commands load or require before they do their work."""

import argparse
import os
import sys
import typing
from collections.abc import Iterator, Sequence

from bert_jax import config
from bert_jax.cli.shared import COLUMN_FIELDS
from bert_jax.config import Experiment, Section
from bert_jax.errors import InputError
from bert_jax.storage import mirror, workdir
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import Workdir

if typing.TYPE_CHECKING:
    from bert_jax.pretraining.loaded_model import LoadedModel

T = typing.TypeVar("T", bound=Section)

# Why a flag is rejected for a pre-trained run or a base; see `reject_flags`.
ONLY_FINETUNED_REASON = "only a fine-tuned run takes this"


def open_existing_run(root: str | None) -> Workdir:
    """Opens the workdir of an existing run to read it; `root` is the argument of --workdir."""
    if not root:
        raise InputError("name an EXPERIMENT, or the --workdir of a run")
    return mirror.open_workdir(root)


def load_saved_experiment(run: Workdir, settings: Sequence[str], kind: type[T]) -> T:
    """Returns the experiment of a run, with the settings applied."""
    return config.override(workdir.load_experiment(run, kind), settings)


def resolve_experiment(path: str | None, settings: Sequence[str], root: str | None) -> Experiment:
    """Returns the experiment of a file, or of the run in `root` if there is no file.

    Args:
      path: the file, or the name of a shipped experiment.
      settings: changes, FIELD=VALUE.
      root: the argument of --workdir.
    """
    if path is None:
        return load_saved_experiment(open_existing_run(root), settings, Experiment)
    return config.override(config.load(path), settings)


def open_run(
    path: str | None, settings: Sequence[str], root: str | None
) -> tuple[Experiment, Workdir]:
    """Returns the experiment (see `resolve_experiment`) and the workdir, opened for reading."""
    if path is not None:
        experiment = resolve_experiment(path, settings, None)
        return experiment, mirror.open_workdir(root_of(experiment, root), experiment.run.corpus_dir)
    run = open_existing_run(root)
    experiment = load_saved_experiment(run, settings, Experiment)
    return experiment, run.with_corpus(experiment.run.corpus_dir)


def root_of(experiment: Experiment, root: str | None) -> str:
    """Returns the argument of --workdir if it is given, else runs/NAME."""
    return root or f"runs/{experiment.name}"


def open_run_or_base(root: str) -> Workdir:
    """Opens a run or a base; raises InputError if there is neither. Does not import jax."""
    run = mirror.open_workdir(root)
    if not (run.root / "base.json").exists() and not workdir.holds_finetuning(run):
        workdir.load_experiment(run)  # raises unless it is a pre-training run
    return run


def require_file_path(flag: str, path: str | None) -> None:
    """Raises InputError unless `path` can be a file. Commands call it before they compute."""
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
    if not storage_of(run.corpus).exists(run.corpus / workdir.COMPLETE):
        raise InputError(f"{run.corpus}: no prepared corpus here; run `bert-jax prepare` first")


def reject_flags(run: Workdir, reason: str, values: dict[str, object]) -> None:
    """Raises InputError for the first flag that was given but does not apply to a run.

    Args:
      run: the run.
      reason: why the flags do not apply.
      values: the values of the flags, by flag.
    """
    for flag, value in values.items():
        if value not in (None, False, []):
            raise InputError(f"{flag}: {run.address}: {reason}; remove {flag}")


def load_model(
    run: Workdir, base: str | None, checkpoint: str, allow_finetuned: bool = True
) -> "LoadedModel":
    """Loads the model of a run or a base. The model of a fine-tuned run is a FinetunedModel.

    Args:
      run: the workdir that `open_run_or_base` returned.
      base: the argument of --from.
      checkpoint: the argument of --checkpoint.
      allow_finetuned: whether the command takes fine-tuned runs; if not, one raises InputError.
    """
    is_tuned = allow_finetuned and workdir.holds_finetuning(run)
    if not is_tuned:
        reject_flags(run, ONLY_FINETUNED_REASON, {"--from": base})
    from bert_jax.pretraining.loaded_model import LoadedModel
    from bert_jax.running.environment import enable_compilation_cache

    enable_compilation_cache()
    if is_tuned:
        from bert_jax.tasks.finetuned_model import FinetunedModel

        return FinetunedModel.load(run, base, checkpoint)
    return LoadedModel.of(run, checkpoint=checkpoint)


def read_lines() -> Iterator[tuple[str, str]]:
    """Yields (location, line) pairs of standard input."""
    from bert_jax.text import line_reader

    return line_reader.decode_lines(sys.stdin.buffer, "standard input")


def print_now(line: str) -> None:
    """Prints a line and flushes the output."""
    print(line, flush=True)


def get_column_fields(args: argparse.Namespace) -> dict[str, str]:
    """Returns the fields of a task that the flags of `shared.COLUMNS` set."""
    given = {field: getattr(args, flag) for flag, field in COLUMN_FIELDS.items()}
    return {field: value for field, value in given.items() if value is not None}
