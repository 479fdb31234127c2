"""The commands that make corpora and train runs."""

import argparse
import typing
from typing import Any, Literal

from bert_jax import config, system
from bert_jax.cli import shared
from bert_jax.cli.loading import (
    load_saved_experiment,
    open_existing_run,
    open_run,
    print_now,
    resolve_experiment,
    root_of,
)
from bert_jax.cli.parsing import Command, Parser, integer
from bert_jax.config import Experiment, Finetuning
from bert_jax.errors import FAILED, FINISHED, STOPPED, TRAINING_CODE_MEANINGS, InputError
from bert_jax.storage import mirror
from bert_jax.storage.workdir import lock

if typing.TYPE_CHECKING:
    from bert_jax.checkpoints.fork import ForkPoint
    from bert_jax.running.progress import Progress

# The exit codes of runs, by how they ended.
_CODES = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}


def make_progress() -> "Progress":
    """Returns a reporter that prints the progress of a run."""
    from bert_jax.running.progress import LineConsole, Progress

    return Progress(LineConsole())


def _add_prepare_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every file of the prepared corpus against its hash",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=integer(1),
        help="processes that do the work; any number makes the same corpus [all cores]",
    )
    parser.add_argument(
        "--beam",
        metavar="'RUNNER OPTIONS'",
        help="do the work with Apache Beam, e.g. 'DataflowRunner --project=P --region=R "
        "--temp_location=gs://B/tmp' (needs the [beam] extra)",
    )


def prepare(args: argparse.Namespace) -> int:
    """Makes a corpus."""
    experiment = resolve_experiment(args.experiment, args.set, args.workdir)
    root = root_of(experiment, args.workdir)
    workdir = mirror.open_workdir(root, experiment.run.corpus_dir, to_write=True)
    from bert_jax.data import corpus

    workdir.require_run_or_empty()
    vocab_size, workers = experiment.model.vocab_size, args.workers or system.cores()
    manifest = corpus.prepare(
        experiment.corpus, vocab_size, workdir.corpus, print_now, workers, args.beam
    )
    corpus.require_rows(workdir.corpus, experiment)
    if args.verify:
        corpus.verify(workdir.corpus)
        print_now(f"corpus: all files of {workdir.corpus} match their recorded checksums")
    tokens = manifest["splits"]["train"]["tokens"]
    print_now(f"corpus: {workdir.corpus} is ready, {tokens} tokens to train on")
    return FINISHED


def pretrain(args: argparse.Namespace) -> int:
    """Starts or resumes a pre-training run."""
    return _pretrain(args, "keep")


def extend(args: argparse.Namespace) -> int:
    """Continues a run beyond its end."""
    return _pretrain(args, "extend")


def _pretrain(args: argparse.Namespace, end: Literal["keep", "extend"]) -> int:
    system.use_one_memory_pool()
    origin, fork_point = None, None
    if (
        args.experiment is None
    ):  # resumes the run in --workdir; starts it if it is a fork without a checkpoint
        experiment, run = open_run(None, args.set, args.workdir)
        from bert_jax.checkpoints.fork import find_pending_fork

        fork_point = find_pending_fork(run)
    else:
        experiment, origin = config.load_with_origin(args.experiment, args.set)
    return _train(experiment, args.workdir, end, origin, fork_point)


def _train(
    experiment: Experiment,
    root: str | None,
    end: Literal["keep", "extend"],
    origin: dict[str, Any] | None,
    fork_point: "ForkPoint | None",
) -> int:
    """Trains a run; returns the exit code.

    Args:
      experiment: what to train.
      root: the argument of --workdir.
      end: with "keep" the number of steps must equal that of the saved run; with "extend" the
        last phase may have more.
      origin: the record of where the experiment comes from; None keeps the saved record.
      fork_point: the checkpoint of another run that this run starts from.
    """
    from bert_jax.pretraining import pretraining_job
    from bert_jax.tasks.probes import Probes

    progress, root = make_progress(), root_of(experiment, root)
    workdir = mirror.open_workdir(root, experiment.run.corpus_dir, to_write=True)
    for note in config.notes_on_settings(experiment):
        progress.report(note)
    probes = Probes(experiment.run.probes) if experiment.run.probes else None
    outcome = pretraining_job.pretrain(
        experiment, workdir, end, progress, origin, probes, fork_point
    )
    return _CODES[outcome]


def _add_auto_arguments(parser: Parser) -> None:
    parser.add_argument(
        "text", metavar="TEXT", help="a file or folder of text, or a source as in corpus.sources"
    )
    parser.add_argument(
        "--hours",
        metavar="H",
        type=float,
        required=True,
        help="time that the run may take on this machine; ignored if a run is resumed",
    )
    parser.add_argument(
        "--base", metavar="B", help="start from the weights of this base instead of random weights"
    )


def auto(args: argparse.Namespace) -> int:
    """Chooses an experiment for a text and a number of hours, and trains it.

    If --workdir has a run already, it is resumed with the experiment that was chosen for it.
    """
    system.use_one_memory_pool()
    if not 0 < args.hours < float("inf"):
        raise InputError(f"--hours {args.hours}: must be a number above 0")
    root = args.workdir or f"runs/{config.name_of(args.text) or 'text'}"
    progress = make_progress()
    existing = mirror.open_workdir(root)
    if existing.experiment.exists():
        experiment = load_saved_experiment(existing, args.set, Experiment)
        if config.source_of_text(args.text) not in experiment.corpus.sources:
            sources = " ".join(experiment.corpus.sources)
            raise InputError(
                f"TEXT {args.text}: {root} holds a run on {sources}; choose another --workdir"
            )
        progress.report(f"{root}: resumes with the experiment that was chosen for it")
        return _train(experiment, root, "keep", None, None)
    workdir = mirror.open_workdir(root, to_write=True)
    workdir.require_run_or_empty()
    from bert_jax.tools.auto import choose_experiment
    from bert_jax.tools.compare.budget import MeasurementEnded

    try:
        experiment, origin = choose_experiment(
            args.text, args.hours, args.base, args.set, workdir, progress
        )
    except MeasurementEnded as error:
        (outcome,) = error.args
        again = "; run the same command again" if outcome == "stopped" else ""
        progress.report(f"auto: {outcome} while the speed was measured{again}")
        return _CODES[outcome]
    return _train(experiment, root, "keep", origin, None)


def _add_fork_arguments(parser: Parser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint of a run, RUN/checkpoints/STEP"
    )
    parser.add_argument(
        "experiment",
        metavar="EXPERIMENT",
        nargs="?",
        help="an experiment, as `pretrain` takes it [the experiment of RUN]",
    )
    parser.add_argument("--workdir", metavar="NEW", required=True, help="workdir of the new run")


def fork(args: argparse.Namespace) -> int:
    """Trains a new run that starts from a checkpoint of another run."""
    system.use_one_memory_pool()
    from bert_jax.checkpoints.fork import plan_fork

    workdir = mirror.open_workdir(args.workdir)  # which may hold this fork already
    experiment, origin, fork_point = plan_fork(args.checkpoint, args.experiment, args.set, workdir)
    return _train(experiment, args.workdir, "keep", origin, fork_point)


def decay(args: argparse.Namespace) -> int:
    """Trains a new run that decays the learning rate from a checkpoint of another one."""
    system.use_one_memory_pool()
    from bert_jax.checkpoints.fork import plan_decay

    experiment, origin, fork_point = plan_decay(args.checkpoint, args.experiment, args.set)
    return _train(experiment, args.workdir, "keep", origin, fork_point)


def _add_compare_arguments(parser: Parser) -> None:
    parser.add_argument(
        "table", metavar="TABLE", help="a .py file whose table() lists the runs to compare"
    )
    parser.add_argument(
        "--workdir", metavar="W", help="folder of the runs and their results [runs/NAME]"
    )


def compare(args: argparse.Namespace) -> int:
    """Trains the runs of a table and compares them."""
    system.use_one_memory_pool()
    table = config.load_table(args.table)
    from bert_jax.tools.compare.results import Results
    from bert_jax.tools.compare.runs import Comparison

    progress = make_progress()
    results = Results.read(table, args.workdir or f"runs/{table.name}")
    comparison = Comparison(results, progress)
    with lock(results.root):
        outcome = comparison.run()
    for line in results.lines():
        progress.report(line)
    if (results.root / "table.html").exists():
        progress.report(f"compare: wrote {results.root / 'table.html'}, table.txt and table.csv")
    return _CODES[outcome]


def _add_finetune_arguments(parser: Parser) -> None:
    parser.add_argument(
        "taskfile",
        metavar="TASKFILE",
        nargs="?",
        help="a .py file whose experiment() returns a Finetuning, or such a config in .json "
        "; without it, --kind, --train, --validation and the flags for columns describe the task",
    )
    parser.add_argument(
        "--kind",
        choices=typing.get_args(config.Kind),
        help="kind of the task",
    )
    parser.add_argument(
        "--train",
        metavar="FILE",
        action="append",
        default=[],
        help="training examples: .csv, .tsv, .jsonl, .conll, SQuAD's .json, or a source as in "
        "task.train; may be repeated",
    )
    parser.add_argument(
        "--validation",
        metavar="FILE",
        action="append",
        default=[],
        help="examples to score on; may be repeated",
    )
    parser.add_argument(
        "--from",
        dest="base",
        metavar="BASE",
        help="the base or run whose encoder is fine-tuned [init_from of the config]",
    )
    parser.add_argument(
        "--workdir",
        metavar="W",
        help="workdir of the run [runs/NAME], or folder of the runs of a sweep [runs/NAME-sweep]",
    )
    parser.add_argument(
        "--sweep",
        metavar="FIELD=V1,V2",
        action="append",
        default=[],
        help="train a run for each value, e.g. seed=1,2,3; with several --sweep, for each "
        "combination; means over seeds are printed",
    )


def finetune(args: argparse.Namespace) -> int:
    """Fine-tunes a model on a task, once or for each setting of a sweep."""
    system.use_one_memory_pool()
    if args.sweep:
        if args.taskfile is None:
            raise InputError("--sweep: needs a TASKFILE; see experiments/tasks/ for examples")
        _task_fields_of_flags(args)  # raises if there are any
        from bert_jax.tools.compare import sweep

        members = sweep.members(args.taskfile, args.set, args.sweep)
        return _CODES[sweep.run(members, args.base, args.workdir, make_progress())]
    experiment, origin = _load_finetuning(args)
    from bert_jax.tasks import finetuning_job

    progress = make_progress()
    for note in config.notes_on_settings(experiment):
        progress.report(note)
    return _CODES[finetuning_job.finetune(experiment, args.base, args.workdir, progress, origin)]


def _load_finetuning(args: argparse.Namespace) -> tuple[Finetuning, dict[str, Any] | None]:
    """Loads the config of a TASKFILE, of the flags or of a saved run; returns it and its origin.

    The origin is None for a saved run, which has its record already.
    """
    task = _task_fields_of_flags(args)
    if args.taskfile is not None:
        return config.load_with_origin(args.taskfile, args.set, Finetuning)
    if task or not args.workdir:
        return config.finetuning_of(task, args.workdir, args.set)
    return load_saved_experiment(open_existing_run(args.workdir), args.set, Finetuning), None


def _task_fields_of_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a task that flags set; raises InputError if there is a TASKFILE too."""
    fields = {name: name for name in ("kind", "train", "validation")} | shared.COLUMN_FIELDS
    given = [flag for flag in fields if getattr(args, flag) not in (None, [])]
    if args.taskfile is not None and given:
        flag = given[0].replace("_", "-")
        raise InputError(f"--{flag}: {args.taskfile} sets this already; change it with --set")
    return {fields[flag]: getattr(args, flag) for flag in given}


COMMANDS = {
    "prepare": Command(
        prepare,
        "make the corpus: tokenizer, token ids, splits",
        _add_prepare_arguments,
        (shared.EXPERIMENT, shared.WORKDIR, shared.SETTINGS, shared.CACHE),
    ),
    "pretrain": Command(
        pretrain,
        "pre-train a run; the same command resumes it",
        parents=(shared.OPTIONAL_EXPERIMENT, shared.WORKDIR, *shared.TRAINING_FLAGS),
        codes=TRAINING_CODE_MEANINGS,
    ),
    "auto": Command(
        auto,
        "choose an experiment for a text, this machine and a number of hours, and pre-train it",
        _add_auto_arguments,
        (shared.WORKDIR, *shared.TRAINING_FLAGS),
        TRAINING_CODE_MEANINGS,
    ),
    "fork": Command(
        fork,
        "pre-train a new run from a checkpoint of another one, with other settings",
        _add_fork_arguments,
        shared.TRAINING_FLAGS,
        TRAINING_CODE_MEANINGS,
    ),
    "decay": Command(
        decay,
        "decay the learning rate from a checkpoint of another run, in a new run",
        _add_fork_arguments,
        shared.TRAINING_FLAGS,
        TRAINING_CODE_MEANINGS,
    ),
    "extend": Command(
        extend,
        "continue a finished run; raise the steps of its last phase with --set phases.I.steps=N",
        parents=(shared.OPTIONAL_EXPERIMENT, shared.WORKDIR, *shared.TRAINING_FLAGS),
        codes=TRAINING_CODE_MEANINGS,
    ),
    "finetune": Command(
        finetune,
        "fine-tune the encoder of a base or a run on a task; the same command resumes it",
        _add_finetune_arguments,
        (shared.COLUMNS, *shared.TRAINING_FLAGS),
        TRAINING_CODE_MEANINGS,
    ),
    "compare": Command(
        compare,
        "train the runs of a table with equal budgets and compare them; run again to resume",
        _add_compare_arguments,
        (shared.CACHE,),
        TRAINING_CODE_MEANINGS,
    ),
}
