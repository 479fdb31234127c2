"""The commands that make corpora and runs."""

import argparse
import typing
from typing import Any

from bert_jax import config, errors, system
from bert_jax.cli.command import (
    CODES,
    COLUMNS,
    command,
    experiment_of,
    saved_experiment,
    say,
    workdir_of,
)
from bert_jax.config import Experiment, Finetuning
from bert_jax.errors import FINISHED, InputError
from bert_jax.storage import mirror
from bert_jax.storage.workdir import lock

if typing.TYPE_CHECKING:
    from bert_jax.running.progress import Progress


@command()
def prepare(args: argparse.Namespace) -> int:
    """Make the corpus: tokenizer, ids, splits.

    EXPERIMENT WORKDIR SETTINGS CACHE
    --verify: check every file of the prepared corpus against its hash
    --workers N (int from 1): processes that do the work; any number makes the same corpus [all
        cores]
    --beam 'RUNNER OPTIONS': do the work with Apache Beam, e.g. 'DataflowRunner --project=P
        --region=R --temp_location=gs://B/tmp' (the [beam] extra)
    """
    experiment, workdir = experiment_of(args, "write")
    from bert_jax.data import corpus

    workdir.require_ours()
    size, workers = experiment.model.vocab_size, args.workers or system.cores()
    manifest = corpus.prepare(experiment.corpus, size, workdir.corpus, say, workers, args.beam)
    corpus.require_rows(workdir.corpus, experiment)
    if args.verify:
        corpus.verify(workdir.corpus)
        say(f"corpus: every file of {workdir.corpus} is as it was made")
    tokens = manifest["splits"]["train"]["tokens"]
    say(f"corpus: {workdir.corpus} is ready, {tokens} tokens to train on")
    return FINISHED


@command(fields=Experiment, codes=errors.TRAINING_CODES)
def pretrain(args: argparse.Namespace) -> int:
    """Pre-train; run again to go on where it stopped.

    CODE SAVED_EXPERIMENT WORKDIR SETTINGS CACHE
    --extend: go on beyond the end, with more phases.N.steps in the last phase; the learning-rate
        schedule changes
    --decay-from RUN/checkpoints/STEP: begin with this checkpoint of another run
        (optimizer.schedule=wsd), in a new --workdir, and do the optimizer.decay_steps after it
    --fork RUN/checkpoints/STEP: begin with this checkpoint of another run, in a new --workdir, with
        any settings but the model's and the vocabulary's
    --text PATH: in place of an EXPERIMENT, file or folder of text, or a source as corpus.sources
        has it; encoder, vocabulary, batch and steps are chosen for it, this machine and --hours
    --hours H (float): of --text, how long the run may take on this machine, from now on
    --base B: of --text, go on with the encoder of this base instead of a fresh one
    """
    system.use_one_memory_pool()
    experiment, origin, branch = _pretraining(args)
    from bert_jax.pretraining import pretraining
    from bert_jax.running.progress import LineConsole, Progress
    from bert_jax.tasks.probes import Probes

    progress = Progress(LineConsole())
    if experiment is None:
        from bert_jax.tools.compare.budget import Stopped

        try:
            experiment, origin = _dialled(args, progress)
        except Stopped as stopped:
            again = "; run the same command again" if stopped.args[0] == "stopped" else ""
            progress.say(f"{stopped.args[0]} while steps were timed{again}")
            return CODES[stopped.args[0]]
    workdir = workdir_of(args, experiment, "write")
    for note in config.notes(experiment):
        progress.say(note)
    extend = "extend" if args.extend else "keep"
    probes = Probes(experiment.run.probes) if experiment.run.probes else None
    outcome = pretraining.pretrain(experiment, workdir, extend, progress, origin, probes, branch)
    return CODES[outcome]


def _dialled(args: argparse.Namespace, progress: "Progress"):
    """The experiment for --text and --hours, and its origin.

    Of a run that is there it is the saved one, and nothing is measured.
    """
    args.workdir = args.workdir or f"runs/{config.name_of(args.text) or 'text'}"
    if mirror.open_workdir(args.workdir).experiment.exists():
        experiment = saved_experiment(args, Experiment)
        if config.source_of_text(args.text) not in experiment.corpus.sources:
            read = " ".join(experiment.corpus.sources)
            raise InputError(f"--text {args.text}: the run in {args.workdir} reads {read}")
        progress.say(f"{args.workdir}: goes on as it was chosen")
        return experiment, None
    workdir = mirror.open_workdir(args.workdir, access="write")
    workdir.require_ours()
    from bert_jax.tools import auto

    return auto.choose_experiment(args.text, args.hours, args.base, args.set, workdir, progress)


def _pretraining(args: argparse.Namespace):
    """The experiment, its origin for the record, and the checkpoint it branches off, if it does.

    The origin is None of a run that goes on and has its record already; all are None where
    `_dialled` is to choose.
    """
    if (args.text, args.hours, args.base) != (None, None, None):
        if args.text is None or args.hours is None or not 0 < args.hours < float("inf"):
            raise InputError("--text, --hours: go together, finite hours above 0; --base is theirs")
        if args.experiment or args.decay_from or args.fork or args.extend:
            raise InputError("--text: chooses the experiment; leave out EXPERIMENT and other flags")
        return None, None, None
    others = [place for place in (args.decay_from, args.fork) if place is not None]
    if others and (args.extend or not args.workdir or len(others) > 1):
        raise InputError("--decay-from, --fork: need a --workdir, no --extend, and not each other")
    if args.experiment is not None and not others:
        return *config.load_with_origin(args.experiment, args.set), None
    experiment = None if others else saved_experiment(args, Experiment)
    from bert_jax.checkpoints import fork

    if args.decay_from is not None:
        return fork.decayed(args.decay_from, args.experiment, args.set)
    if args.fork is not None:
        return fork.forked(args.fork, args.experiment, args.set, mirror.open_workdir(args.workdir))
    return experiment, None, fork.begun(mirror.open_workdir(args.workdir))


@command(codes=errors.TRAINING_CODES)
def compare(args: argparse.Namespace) -> int:
    """Run what a table names at equal budgets, and compare; run again to go on where it stopped.

    TABLE: a .py file that defines table()
    --workdir W: where its runs and results live [runs/NAME]
    CACHE
    """
    system.use_one_memory_pool()
    table = config.load_table(args.table)
    from bert_jax.running.progress import LineConsole, Progress
    from bert_jax.tools.compare.results import Results
    from bert_jax.tools.compare.runs import Comparison

    progress = Progress(LineConsole())
    results = Results.read(table, args.workdir or f"runs/{table.name}")
    comparison = Comparison(results, progress)
    with lock(results.root):
        outcome = comparison.run()
    for line in results.lines():
        progress.say(line)
    if (results.root / "table.html").exists():
        progress.say(f"compare: {results.root / 'table.html'}, table.txt and table.csv next to it")
    return CODES[outcome]


@command(fields=Finetuning, codes=errors.TRAINING_CODES)
def finetune(args: argparse.Namespace) -> int:
    """Adapt the encoder of a base or a run to a task; run again to go on where it stopped.

    CODE
    [TASKFILE]: a .py file whose experiment() gives a Finetuning, or a resolved config as .json;
        left out: the task that --kind, --train and the flags after them describe
    --kind (Kind): instead of a TASKFILE: kind of task
    --train FILE...: examples to learn from: .csv, .tsv, .jsonl, .conll, SQuAD's .json, or a source
        as task.train has it; may be repeated
    --validation FILE...: examples to score on
    COLUMNS
    --from BASE: the base or run whose encoder is adapted; left out: the config's init_from
    --workdir W: where the run lives [runs/NAME], or those of a sweep [runs/NAME-sweep]
    --sweep FIELD=V1,V2...: do a run for each value, e.g. seed=1,2,3, one after the other; repeated,
        for each combination of values; prints means over seeds
    --set FIELD=VALUE...: change a field of the TASKFILE, e.g. optimizer.peak_learning_rate=2e-5;
        may be repeated
    CACHE
    """
    system.use_one_memory_pool()
    if args.sweep and args.taskfile is None:
        raise InputError("--sweep: needs a TASKFILE; see experiments/tasks/ for examples")
    experiment, origin = _finetuning(args)
    from bert_jax.running.progress import LineConsole, Progress
    from bert_jax.tasks import job
    from bert_jax.tools.compare import sweep

    progress = Progress(LineConsole())
    if experiment is None:
        of = sweep.members(args.taskfile, args.set, args.sweep)
        return CODES[sweep.run(of, args.base, args.workdir, progress)]
    for note in config.notes(experiment):
        progress.say(note)
    return CODES[job.finetune(experiment, args.base, args.workdir, progress, origin)]


def _finetuning(args: argparse.Namespace) -> tuple[Finetuning | None, dict[str, Any] | None]:
    """The fine-tuning of a TASKFILE, of flags, or of a run that goes on, and where it comes from.

    Of a run that goes on the record of that stays, and None is returned. Both are None of a sweep.
    """
    fields = {name: name for name in ("kind", "train", "validation")} | COLUMNS
    given = [flag for flag in fields if getattr(args, flag) not in (None, [])]
    if args.taskfile is not None and given:
        flag = given[0].replace("_", "-")
        raise InputError(f"--{flag}: {args.taskfile} sets this already; change it with --set")
    if args.sweep:
        return None, None
    if args.taskfile is not None:
        return config.load_with_origin(args.taskfile, args.set, Finetuning)
    if given or not args.workdir:
        task = {fields[flag]: getattr(args, flag) for flag in given}
        return config.finetuning_of(task, args.workdir, args.set)
    return saved_experiment(args, Finetuning), None
