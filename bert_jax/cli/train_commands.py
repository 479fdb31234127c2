"""The commands that make corpora and train runs."""

import argparse
import functools
import typing
from typing import Any

from bert_jax import config, system
from bert_jax.cli import shared
from bert_jax.cli.loading import (
    load_experiment_and_run,
    load_saved_experiment,
    open_required_workdir,
    print_now,
    resolve_experiment,
    workdir_path,
)
from bert_jax.cli.parsing import Argument, CommandTable, find_changed_flags, integer
from bert_jax.config import Experiment, Finetuning
from bert_jax.errors import FAILED, FINISHED, STOPPED, TRAINING_EXIT_CODES, InputError
from bert_jax.storage import mirror
from bert_jax.storage.locks import lock
from bert_jax.storage.workdir import Workdir

if typing.TYPE_CHECKING:
    from bert_jax.checkpoints.fork import ForkPoint
    from bert_jax.running.progress import Progress

COMMANDS = CommandTable()
_add_training_command = functools.partial(COMMANDS.add, exit_codes=TRAINING_EXIT_CODES)

# The exit codes of runs by their outcome.
_EXIT_CODES = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}


def make_progress() -> "Progress":
    """Returns a reporter that prints the progress of a run."""
    from bert_jax.running.progress import LineConsole, Progress

    return Progress(LineConsole())


@COMMANDS.add(
    "prepare",
    "make the corpus: tokenizer, token ids, splits",
    Argument(
        "--verify",
        action="store_true",
        help="check every file of the prepared corpus against its hash",
    ),
    Argument(
        "--workers",
        metavar="N",
        help="processes that do the work; any number makes the same corpus [all cores]",
        type=integer(1),
    ),
    Argument(
        "--beam",
        metavar="'RUNNER OPTIONS'",
        help="do the work with Apache Beam, e.g. 'DataflowRunner --project=P --region=R "
        "--temp_location=gs://B/tmp' (needs the [beam] extra)",
    ),
    shared.EXPERIMENT,
    shared.WORKDIR,
    shared.SETTINGS,
    shared.CACHE,
)
def prepare(args: argparse.Namespace) -> int:
    """Makes a corpus."""
    experiment = resolve_experiment(args)
    path = workdir_path(experiment, args.workdir)
    workdir = mirror.open_workdir(path, experiment.run.corpus_dir, to_write=True)
    from bert_jax.data import corpus
    from bert_jax.pretraining.prepared_corpus import PreparedCorpus

    workdir.require_run_or_empty()
    vocab_size, workers = experiment.model.vocab_size, args.workers or system.cores()
    manifest = corpus.prepare(
        experiment.corpus, vocab_size, workdir.corpus, print_now, workers, args.beam
    )
    corpus.require_enough_text(workdir.corpus, experiment)
    if args.verify:
        corpus.verify(workdir.corpus)
        print_now(f"corpus: all files of {workdir.corpus} match their recorded checksums")
    if experiment.corpus.is_mixed:
        for line in PreparedCorpus.open(workdir.corpus).describe_shares(experiment):
            print_now(line)
    tokens = manifest["splits"]["train"]["tokens"]
    print_now(f"corpus: {workdir.corpus} is ready, {tokens} tokens to train on")
    return FINISHED


@_add_training_command(
    "pretrain",
    "pre-train a run; the same command resumes it",
    shared.OPTIONAL_EXPERIMENT,
    shared.WORKDIR,
    *shared.TRAINING_ARGUMENTS,
)
def pretrain(args: argparse.Namespace) -> int:
    """Starts or resumes a pre-training run."""
    return _pretrain(args, may_extend=False)


@_add_training_command(
    "extend",
    "continue a finished run; raise the steps of its last phase with --set phases.I.steps=N",
    shared.OPTIONAL_EXPERIMENT,
    shared.WORKDIR,
    *shared.TRAINING_ARGUMENTS,
)
def extend(args: argparse.Namespace) -> int:
    """Continues a run beyond its end."""
    return _pretrain(args, may_extend=True)


def _pretrain(args: argparse.Namespace, may_extend: bool) -> int:
    system.use_one_memory_pool()  # of malloc, before threads start
    origin, fork_point = None, None
    if args.experiment is None:
        # Resumes the run in --workdir, or starts a fork that has no checkpoint yet.
        experiment, run = load_experiment_and_run(args)
        from bert_jax.checkpoints.fork import find_pending_fork

        fork_point = find_pending_fork(run)
    else:
        experiment, origin = config.load_with_origin(args.experiment, args.set)
    return _train(experiment, args.workdir, origin, fork_point, may_extend)


def _train(
    experiment: Experiment,
    path: str | None,
    origin: dict[str, Any] | None = None,
    fork_point: "ForkPoint | None" = None,
    may_extend: bool = False,
) -> int:
    """Trains an experiment; returns the exit code.

    Args:
      path: the argument of --workdir.
      origin: the record of where the experiment comes from; None keeps the saved record.
      fork_point: the checkpoint of another run that this run starts from.
      may_extend: whether the last phase may have more steps than in the saved run.
    """
    from bert_jax.pretraining.pretraining_job import PretrainingJob
    from bert_jax.running import session
    from bert_jax.tasks.probes import Probes

    progress, path = make_progress(), workdir_path(experiment, path)
    workdir = mirror.open_workdir(path, experiment.run.corpus_dir, to_write=True)
    for note in config.notes_on_settings(experiment):
        progress.report(note)
    probes = Probes(experiment.run.probes) if experiment.run.probes else None
    job = PretrainingJob(experiment, workdir, progress.report, may_extend, probes, fork_point)
    return _EXIT_CODES[session.run(job, progress, origin)]


@_add_training_command(
    "auto",
    "choose an experiment for a text, this machine and a number of hours, and pre-train it",
    Argument(
        "text", metavar="TEXT", help="a file or folder of text, or KIND:PATH as in corpus.sources"
    ),
    Argument(
        "--hours",
        metavar="H",
        help="time that the run may take on this machine; ignored if a run is resumed",
        type=float,
        required=True,
    ),
    Argument(
        "--language",
        metavar="CODE",
        help="language of the text, as in corpus.language: decides how sentences are split and "
        "whether text is lower-cased [assumed from its script; en for Latin letters]",
    ),
    Argument(
        "--base",
        metavar="B",
        help="start from the weights of this base, or model of the hub (OWNER/NAME), instead of "
        "random weights",
    ),
    shared.WORKDIR,
    *shared.TRAINING_ARGUMENTS,
)
def train_auto(args: argparse.Namespace) -> int:
    """Chooses an experiment for a text and a number of hours, and trains it.

    If --workdir has a run already, it is resumed with the experiment that was chosen for it.
    """
    system.use_one_memory_pool()
    if not 0 < args.hours < float("inf"):
        raise InputError(f"--hours {args.hours}: must be a number above 0")
    settings = [*args.set, *([f"corpus.language={args.language}"] if args.language else [])]
    path = args.workdir or f"runs/{config.name_of(args.text) or 'text'}"
    progress = make_progress()
    saved_run = mirror.open_workdir(path)
    if saved_run.experiment.exists():
        experiment = load_saved_experiment(saved_run, settings, Experiment)
        sources = experiment.corpus.sources
        paths = (source.partition(":")[2] for source in sources)
        if not {args.text, args.text.rstrip("/")} & {*sources, *paths}:
            problem = f"{path} holds a run on {' '.join(sources)}"
            raise InputError(f"TEXT {args.text}: {problem}; choose another --workdir")
        progress.report(f"{path}: resumes with the experiment that was chosen for it")
        return _train(experiment, path)
    workdir = mirror.open_workdir(path, to_write=True)
    workdir.require_run_or_empty()
    from bert_jax.tools import auto
    from bert_jax.tools.compare.budget import MeasurementInterrupted

    request = auto.Request(args.text, args.hours, args.base, settings)
    try:
        choice = auto.choose_experiment(request, workdir, progress)
    except MeasurementInterrupted as error:
        (outcome,) = error.args
        hint = "; run the same command again" if outcome == "stopped" else ""
        progress.report(f"auto: {outcome} while the speed was measured{hint}")
        return _EXIT_CODES[outcome]
    for reason in choice.reasons:
        progress.report(reason)
    origin = config.origin_of("the command line", settings, choice.experiment)
    return _train(choice.experiment, path, origin)


_FORK_ARGUMENTS = (
    Argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint of a run, RUN/checkpoints/STEP"
    ),
    Argument(
        "experiment",
        metavar="EXPERIMENT",
        help="an experiment, as `pretrain` takes it [the experiment of RUN]",
        nargs="?",
    ),
    Argument("--workdir", metavar="NEW", help="workdir of the new run", required=True),
    *shared.TRAINING_ARGUMENTS,
)


@_add_training_command(
    "fork",
    "pre-train a new run from a checkpoint of another one, with other settings",
    *_FORK_ARGUMENTS,
)
def fork(args: argparse.Namespace) -> int:
    """Trains a new run that starts from a checkpoint of another run."""
    system.use_one_memory_pool()
    from bert_jax.checkpoints.fork import plan_fork

    workdir = mirror.open_workdir(args.workdir)  # may hold this fork already
    experiment, origin, fork_point = plan_fork(args.checkpoint, args.experiment, args.set, workdir)
    return _train(experiment, args.workdir, origin, fork_point)


@_add_training_command(
    "decay",
    "decay the learning rate from a checkpoint of another run, in a new run",
    *_FORK_ARGUMENTS,
)
def decay(args: argparse.Namespace) -> int:
    """Trains a new run that decays the learning rate from a checkpoint of another one."""
    system.use_one_memory_pool()
    from bert_jax.checkpoints.fork import plan_decay  # plans the same if the decay has begun

    experiment, origin, fork_point = plan_decay(args.checkpoint, args.experiment, args.set)
    return _train(experiment, args.workdir, origin, fork_point)


@_add_training_command(
    "compare",
    "train the runs of a table with equal budgets and compare them; run again to resume",
    Argument("table", metavar="TABLE", help="a .py file whose table() lists the runs to compare"),
    Argument("--workdir", metavar="W", help="folder of the runs and their results [runs/NAME]"),
    shared.CACHE,
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
    return _EXIT_CODES[outcome]


@_add_training_command(
    "benchmark",
    "fine-tune a base on the tasks of a suite and tabulate the scores; run again to resume",
    Argument(
        "suite",
        metavar="SUITE",
        help="a .py file whose suite() lists tasks, or a shipped one: glue, squad or paper",
    ),
    Argument("--from", metavar="B", help="base, run or hub model", dest="base", required=True),
    Argument(
        "--data", metavar="FOLDER", help="folder of the unpacked files of the tasks", required=True
    ),
    Argument("--out", metavar="W", help="folder of the runs and the table [runs/SUITE]"),
    Argument(
        "--rules",
        help="paper: settings chosen on the validation examples; one: the settings of the suite; "
        "intermediate: as paper, and some tasks start from the model of another task [paper]",
        choices=typing.get_args(config.Rules),
        default="paper",
    ),
    Argument(
        "--seeds",
        metavar="N",
        help="runs of each task with the chosen settings [as in the suite]",
        type=integer(1),
    ),
    Argument(
        "--side-by-side",
        metavar="N",
        help="runs to train at once, if the memory holds them, each on a part of the accelerators "
        "of this machine, or of its cores [1]",
        type=integer(1),
        default=1,
    ),
    *shared.TRAINING_ARGUMENTS,
)
def benchmark(args: argparse.Namespace) -> int:
    """Fine-tunes a base on the tasks of a suite, and tabulates the scores."""
    system.use_one_memory_pool()
    suite = config.load_suite(args.suite)
    from bert_jax.tools.benchmark import suite_files, suite_table
    from bert_jax.tools.benchmark.device_workers import DeviceWorkers
    from bert_jax.tools.benchmark.suite_runs import Benchmark

    progress = make_progress()
    tasks = suite_files.load_tasks(suite, args.data, args.set)
    folder = Workdir(args.out or f"runs/{suite.name}").root
    count, devices = args.side_by_side, system.accelerator_count()
    if devices % count:
        raise InputError(f"--side-by-side {count}: must divide the {devices} devices here")
    workers = DeviceWorkers(count, folder / "processes") if count > 1 else None
    suite_runs = Benchmark(suite, tasks, folder, args.rules, args.seeds, progress, workers)
    with lock(folder, setting="--out"):
        outcome = suite_runs.run(args.base, lambda: suite_table.write(suite_runs))
        suite_table.write(suite_runs)
    for line in suite_table.lines(suite_runs):
        progress.report(line)
    progress.report(f"benchmark: wrote {folder / 'table.html'}, table.txt and table.csv")
    return _EXIT_CODES[outcome]


@_add_training_command(
    "finetune",
    "fine-tune the encoder of a base or a run on a task; the same command resumes it",
    Argument(
        "taskfile",
        metavar="TASKFILE",
        help="a .py file whose experiment() returns a Finetuning, or its config in .json; "
        "without it, --kind, --train, --validation and the flags for columns describe the task",
        nargs="?",
    ),
    Argument("--kind", help="kind of the task", choices=typing.get_args(config.Kind)),
    Argument(
        "--train",
        metavar="FILE",
        help="training examples: .csv, .tsv, .jsonl, .conll, SQuAD's .json, or a source as in "
        "task.train; may be repeated",
        action="append",
        default=[],
    ),
    Argument(
        "--validation",
        metavar="FILE",
        help="examples to score on; may be repeated",
        action="append",
        default=[],
    ),
    Argument(
        "--from",
        metavar="BASE",
        help="the base, run or model of the hub (OWNER/NAME) whose encoder is fine-tuned "
        "[init_from of the config]",
        dest="base",
    ),
    Argument(
        "--workdir",
        metavar="W",
        help="workdir of the run [runs/NAME], or folder of the runs of a sweep [runs/NAME-sweep]",
    ),
    Argument(
        "--sweep",
        metavar="FIELD=V1,V2",
        help="train a run for each value, e.g. seed=1,2,3; with several --sweep, for each "
        "combination; means over seeds are printed",
        action="append",
        default=[],
    ),
    *shared.COLUMN_ARGUMENTS,
    *shared.TRAINING_ARGUMENTS,
)
def finetune(args: argparse.Namespace) -> int:
    """Fine-tunes a model on a task, once or for each setting of a sweep."""
    system.use_one_memory_pool()
    if args.sweep:
        if args.taskfile is None:
            raise InputError("--sweep: needs a TASKFILE; see experiments/tasks/ for examples")
        _task_fields_of_flags(args)  # raises InputError if one of its flags is set
        from bert_jax.tools.compare import sweep

        members = sweep.members(args.taskfile, args.set, args.sweep)
        return _EXIT_CODES[sweep.run(members, args.base, args.workdir, make_progress())]
    experiment, origin = _load_finetuning(args)
    from bert_jax.tasks import finetuning_job

    progress = make_progress()
    for note in config.notes_on_settings(experiment):
        progress.report(note)
    outcome = finetuning_job.finetune(experiment, args.base, args.workdir, progress, origin)
    return _EXIT_CODES[outcome]


def _load_finetuning(args: argparse.Namespace) -> tuple[Finetuning, dict[str, Any] | None]:
    """Loads the config of a TASKFILE, of the flags or of a saved run; returns it and its origin.

    The origin is None for a saved run, whose workdir has a record of it.
    """
    task = _task_fields_of_flags(args)
    if args.taskfile is not None:
        return config.load_with_origin(args.taskfile, args.set, Finetuning)
    if task or not args.workdir:
        return config.finetuning_of(task, args.workdir, args.set)
    return load_saved_experiment(open_required_workdir(args.workdir), args.set, Finetuning), None


def _task_fields_of_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a task that flags set; raises InputError if there is a TASKFILE too."""
    given = find_changed_flags(args, ("--kind", "--train", "--validation", *shared.COLUMN_FLAGS))
    if given and args.taskfile is not None:
        flag = next(iter(given)).names[0]
        raise InputError(f"{flag}: {args.taskfile} sets this already; change it with --set")
    return {argument.dest: value for argument, value in given.items()}
