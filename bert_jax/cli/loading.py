"""Functions that open runs, load models and check arguments for several commands."""

import argparse
import os
import sys
import typing
from collections.abc import Iterator, Sequence

from bert_jax import config
from bert_jax.cli.parsing import reject_flags
from bert_jax.config import Experiment, Section
from bert_jax.errors import InputError
from bert_jax.interop import hub
from bert_jax.storage import mirror, workdir
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import Workdir

if typing.TYPE_CHECKING:
    from bert_jax.pretraining.loaded_model import LoadedModel

T = typing.TypeVar("T", bound=Section)


def open_required_workdir(path: str | None) -> Workdir:
    """Opens `path`, the argument of --workdir, for reading; raises InputError if it is missing."""
    if not path:
        raise InputError("name an EXPERIMENT, or the --workdir of a run")
    return mirror.open_workdir(path)


def load_saved_experiment(run: Workdir, settings: Sequence[str], cls: type[T]) -> T:
    """Returns the experiment of a run, with the settings applied."""
    return config.override(workdir.load_experiment(run, cls), settings)


def resolve_experiment(args: argparse.Namespace) -> Experiment:
    """Returns EXPERIMENT, else the experiment saved in --workdir, with --set applied."""
    if args.experiment is not None:
        return config.override(config.load(args.experiment), args.set)
    return load_saved_experiment(open_required_workdir(args.workdir), args.set, Experiment)


def load_experiment_and_run(args: argparse.Namespace) -> tuple[Experiment, Workdir]:
    """Returns the experiment (see `resolve_experiment`) and its workdir, opened for reading."""
    if args.experiment is None:
        run = open_required_workdir(args.workdir)
        experiment = load_saved_experiment(run, args.set, Experiment)
        return experiment, run.with_corpus(experiment.run.corpus_dir)
    experiment = resolve_experiment(args)
    path = workdir_path(experiment, args.workdir)
    return experiment, mirror.open_workdir(path, experiment.run.corpus_dir)


def workdir_path(experiment: Experiment, path: str | None) -> str:
    """Returns `path`, the argument of --workdir, or runs/NAME if it is None."""
    return path or f"runs/{experiment.name}"


def open_run_or_base(path: str) -> Workdir:
    """Opens a run, base or hub model, without importing jax; raises InputError if there is none."""
    run = mirror.open_workdir(hub.fetch_base(path))
    if not (run.root / "base.json").exists() and not workdir.holds_finetuning(run):
        workdir.load_experiment(run)  # raises unless it is a pre-training run
    return run


def require_writable_path(flag: str, path: str | None) -> None:
    """Raises InputError early if no file could be written at `path`; None and URLs pass."""
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
    """Raises InputError if a run has no prepared corpus. Does not import jax."""
    if not storage_of(run.corpus).exists(run.corpus / workdir.COMPLETE):
        raise InputError(f"{run.corpus}: no prepared corpus here; run `bert-jax prepare` first")


def reject_base_unless_finetuned(run: Workdir, args: argparse.Namespace) -> None:
    """Raises InputError if a run is not fine-tuned, and --from is given."""
    if not workdir.holds_finetuning(run):
        reject_flags(args, ("--from",), f"{run.address} is not a fine-tuned run")


def load_model(
    run: Workdir, args: argparse.Namespace, allow_finetuned: bool = True
) -> "LoadedModel":
    """Loads the model of a run or a base; with the head of a task it is a FinetunedModel.

    Raises InputError for a fine-tuned run if `allow_finetuned` is False.
    """
    reject_base_unless_finetuned(run, args)
    from bert_jax.pretraining.loaded_model import LoadedModel
    from bert_jax.running.environment import enable_compilation_cache

    enable_compilation_cache()
    if allow_finetuned and workdir.holds_task(run):
        from bert_jax.tasks.finetuned_model import FinetunedModel

        return FinetunedModel.load(run, args.base, args.checkpoint)
    return LoadedModel.of(run, checkpoint=args.checkpoint)


def read_input_lines() -> Iterator[tuple[str, str]]:
    """Yields (location, line) pairs of standard input."""
    from bert_jax.text import line_reader

    return line_reader.decode_lines(sys.stdin.buffer, "standard input")


def print_now(line: str) -> None:
    """Prints a line and flushes the output."""
    print(line, flush=True)
