"""The commands that inspect runs, experiments and text."""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

from bert_jax import config
from bert_jax.cli import shared
from bert_jax.cli.loading import (
    load_experiment_and_run,
    load_model,
    load_saved_experiment,
    open_run_or_base,
    print_now,
    read_input_lines,
    reject_base_unless_finetuned,
    require_corpus,
    resolve_experiment,
)
from bert_jax.cli.parsing import Argument, CommandTable, integer, reject_flags
from bert_jax.config import Experiment, Finetuning, explain
from bert_jax.errors import FAILED, FINISHED, InputError, prefix_errors
from bert_jax.storage import mirror, workdir
from bert_jax.storage.storage import storage_of

COMMANDS = CommandTable()


@COMMANDS.add(
    "report",
    "write an HTML page about a run, or a comparison of several",
    Argument("run", metavar="RUN", help="the workdir of a run; several are compared", nargs="+"),
    Argument(
        "--out",
        metavar="FILE",
        help="the page to write [RUN/report.html, or comparison.html for several runs]",
    ),
    Argument("--follow", action="store_true", help="write the page again while the run trains"),
    Argument(
        "--every",
        metavar="S",
        help="with --follow: seconds between writes [20]",
        type=integer(1),
        default=20,
    ),
    shared.PRICE,
    shared.CACHE,
)
def report(args: argparse.Namespace) -> int:
    """Writes an HTML page about runs."""
    for path in args.run:
        open_run_or_base(path)  # raises if there is none, before jax is imported
    from bert_jax.tools.report import page

    every = args.every if args.follow else None
    page.write(args.run, args.out, every, print_now, args.price_per_chip_hour)
    return FINISHED


@COMMANDS.add(
    "checkpoints",
    "list a run's checkpoints: steps, sizes, held-out losses",
    Argument("run", metavar="RUN", help="the workdir of a run"),
    Argument(
        "--verify",
        action="store_true",
        help="read all checkpoints and compare them with their checksums",
    ),
    exit_codes={FAILED: "the command failed, or --verify found a damaged checkpoint"},
)
def checkpoints(args: argparse.Namespace) -> int:
    """Lists the checkpoints of a run."""
    run = open_run_or_base(args.run)
    from bert_jax.checkpoints import layout, load
    from bert_jax.training import mesh as mesh_lib

    experiment_class = Finetuning if workdir.holds_finetuning(run) else Experiment
    experiment = workdir.load_experiment(run, experiment_class)
    if not storage_of(run.checkpoints).names(run.checkpoints):
        raise InputError(f"{run.checkpoints}: no checkpoint yet")
    reader = load.Checkpoints(run.checkpoints)
    steps, damaged = reader.steps, reader.unreadable()
    metadata = {n: reader.metadata(n) for n in steps if n not in damaged}
    losses = {n: m["held_out_loss"] for n, m in metadata.items() if m["held_out_loss"] is not None}
    best = min(losses, key=lambda n: (losses[n], n), default=None)
    if not steps:
        print_now(f"{run.checkpoints}: all checkpoints were damaged")
    else:
        if fork := workdir.fork_record(run):
            print_now(f"forked from {fork['checkpoint']} (sha256 {fork['sha256'][:12]})")
        print_now(f"{'step':>10}  {'saved':<16}  {'MB':>9}  held-out loss")
    for position, number in enumerate(steps):  # the newest first
        folder = run.checkpoints / str(number)
        # The files of the checkpoint itself: folders in a bucket have no time.
        times = [path.stat().mtime for path in folder.iterdir() if path.is_file()]
        local_time = time.localtime(max(times)) if times else None
        saved_at = time.strftime("%Y-%m-%d %H:%M", local_time) if local_time else "-"
        words = [f"{losses[number]:.3f}" if number in losses else "-"]
        labels = {"newest": position == 0, "best": number == best, "damaged": number in damaged}
        words += [label for label, applies in labels.items() if applies]
        print_now(f"{number:>10}  {saved_at:<16}  {_megabytes(folder):>9.1f}  {', '.join(words)}")
    for folder in sorted(run.checkpoints.glob(f"{layout.DAMAGED_PREFIX}*")):
        print_now(f"{folder.name}: was found damaged and put aside, {_megabytes(folder):.1f} MB")
    if steps and steps[0] in metadata and _is_finished(experiment, metadata[steps[0]]):
        print_now("the run is finished")
    code = FINISHED
    for number in steps if args.verify else ():
        try:
            replicated = mesh_lib.replicated(mesh_lib.one_device())
            reader.restore(number, reader.abstract_state(number, replicated))
            print_now(f"step {number}: every array is as it was saved")
        except layout.Damaged as error:
            print_now(str(error))
            code = FAILED
    return code


def _is_finished(experiment: Experiment | Finetuning, metadata: dict[str, Any]) -> bool:
    """Returns whether a run is finished, given the metadata of its newest checkpoint."""
    from bert_jax.running.lines import should_stop_early

    if isinstance(experiment, Experiment):
        return metadata["step"] == experiment.total_steps
    is_last = metadata["step"] == metadata["notes"]["total_steps"]  # notes: saved by the job
    return is_last or should_stop_early(metadata.get("held_out", []), experiment.patience)


def _megabytes(folder: epath.Path) -> float:
    return sum(
        _megabytes(path) if path.is_dir() else path.stat().length / 1e6 for path in folder.iterdir()
    )


@COMMANDS.add(
    "evaluate",
    "score a checkpoint on held-out text, or on minimal pairs and other tasks",
    Argument(
        "--task",
        metavar="TASKFILE",
        help="score the run or base in --workdir on this task instead of held-out text; may be "
        "repeated. Similarity tasks are scored by the cosine of vectors, minimal pairs by the "
        "likelihoods of their two sentences, all other tasks by a linear probe",
        action="append",
        default=[],
    ),
    Argument(
        "--also",
        metavar="W",
        help="with --task: score these runs and bases too",
        nargs="+",
        default=[],
    ),
    shared.OPTIONAL_EXPERIMENT,
    shared.WORKDIR,
    *shared.TRAINING_ARGUMENTS,
    shared.CHECKPOINT,
    *shared.COLUMN_ARGUMENTS,
    shared.BASE_OF_FINETUNED,
)
def evaluate(args: argparse.Namespace) -> int:
    """Scores a checkpoint on held-out text, or on tasks."""
    if args.task:
        return _evaluate_tasks(args)
    reject_flags(args, ("--also", "--from", *shared.COLUMN_FLAGS), "requires --task")
    experiment, run = load_experiment_and_run(args)
    require_corpus(run)
    from bert_jax.pretraining import evaluators
    from bert_jax.running.environment import enable_compilation_cache

    enable_compilation_cache()
    step, metrics = evaluators.score_held_out(experiment, run, args.checkpoint)
    print(f"step {step}: {evaluators.describe_evaluation(metrics)}")
    print(json.dumps({"step": step, **metrics}))
    return FINISHED


def _evaluate_tasks(args: argparse.Namespace) -> int:
    if args.experiment is not None or args.set or not args.workdir:
        remedy = "give --workdir" if not args.workdir else "remove EXPERIMENT and --set"
        raise InputError(f"--task: {remedy}")
    runs = {path: open_run_or_base(path) for path in (args.workdir, *args.also)}
    for run in runs.values():
        reject_base_unless_finetuned(run, args)
    from bert_jax.tasks import probes  # score tasks of every kind

    columns = shared.column_fields(args)
    tasks = probes.Probes(args.task, max_pairs=None, where="--task", fields=columns)
    for path, run in runs.items():
        model = load_model(run, args)
        results: dict[str, Any] = probes.score_probes(tasks, model)
        if baselines := probes.retrieval_baselines(tasks, model):
            results["baselines"] = baselines
        print(*_score_lines(results, f"{path}: " if args.also else ""), sep="\n")
        print(json.dumps({"workdir": path, "step": model.step, **results}))
    return FINISHED


def _score_lines(results: dict[str, Any], prefix: str) -> Iterator[str]:
    from bert_jax.tasks import minimal_pairs

    for name, score in results["scores"].items():
        if name in results.get("minimal_pairs", {}):
            yield from minimal_pairs.score_lines(f"{prefix}{name}", results["minimal_pairs"][name])
        elif name in results.get("similar", {}):
            baselines = results.get("baselines", {}).get(name, {})
            for label, values in ({name: results["similar"][name]} | baselines).items():
                scores = (f"{metric} {value:.4f}" for metric, value in values.items())
                yield f"{prefix}{label}  {', '.join(scores)}"
        else:
            majority = results["majority"][name]
            yield f"{prefix}{name}  {score:.4f}, majority baseline {majority:.4f}"


_WORDS = Argument(
    "--words",
    metavar="N",
    help="number of words of the whole text of the corpus, separated by white space (`wc -w`)",
    type=integer(1),
    required=True,
)


@COMMANDS.add(
    "words-seen",
    "print the steps after which a run has seen 1M, 2M, ... words, as BabyLM counts them",
    _WORDS,
    shared.OPTIONAL_EXPERIMENT,
    shared.WORKDIR,
    *shared.TRAINING_ARGUMENTS,
)
def words_seen(args: argparse.Namespace) -> int:
    """Prints the steps after which a run has seen 1M, 2M, ... words."""
    experiment, run = load_experiment_and_run(args)
    require_corpus(run)
    from bert_jax.pretraining.prepared_corpus import PreparedCorpus
    from bert_jax.tools import babylm

    steps = babylm.steps_by_name(experiment, PreparedCorpus.open(run.corpus), args.words)
    if not steps:
        raise InputError(
            f"--words {args.words}: the run sees fewer than 1 million words, and BabyLM's first "
            "checkpoint is the one after these; train more steps"
        )
    for name, step in steps.items():
        print(f"{name:10}  step {step}")
    print("--set run.keep_steps=" + ",".join(str(step) for step in steps.values()))
    return FINISHED


@COMMANDS.add(
    "babylm",
    "score a run on the zero-shot tasks of BabyLM; writes predictions; run again to resume",
    _WORDS,
    Argument("--data", metavar="FOLDER", help="BabyLM's folder evaluation_data", required=True),
    Argument("--out", metavar="FOLDER", help="folder of the predictions", required=True),
    shared.RUN_OR_BASE,
    shared.CUSTOM_CODE,
    shared.CACHE,
)
def babylm(args: argparse.Namespace) -> int:
    """Scores the checkpoints of a run on the zero-shot tasks of BabyLM."""
    run = open_run_or_base(args.workdir)
    from bert_jax.checkpoints.load import Checkpoints
    from bert_jax.running.environment import enable_compilation_cache
    from bert_jax.tools.babylm import Evaluation, checkpoints_by_name
    from bert_jax.tools.report.render import PageTable

    enable_compilation_cache()
    newest = Checkpoints(run.checkpoints).find_step("newest")
    checkpoints = checkpoints_by_name(run, args.words)
    evaluation = Evaluation(run, epath.Path(args.data), epath.Path(args.out), print_now)
    for kind, steps in {"fast": checkpoints, "full": {"main": newest}}.items():
        rows = []
        for revision, step in steps.items():
            averages = evaluation.score(revision, step, kind)
            cells = {name: f"{value:.2f}" for name, value in averages.items()}
            rows.append({"checkpoint": revision, "step": str(step), **cells})
        if any(len(row) > 2 for row in rows):  # has scores
            print(*PageTable.of(rows).lines(), sep="\n")
    return FINISHED


@COMMANDS.add(
    "layers",
    "score each layer on tasks, and draw attention maps; writes W/layers.html",
    Argument(
        "--tasks",
        metavar="TASKFILE",
        help="tasks to score each layer on: labels of texts, pairs or words with a linear probe, "
        "similarities by the cosine of the layer's vectors",
        nargs="+",
        default=[],
    ),
    Argument(
        "--attention", metavar="TEXT", help="draw the attention maps of each layer for this text"
    ),
    shared.RUN_OR_BASE,
    shared.CUSTOM_CODE,
    shared.CACHE,
    shared.CHECKPOINT,
)
def layers(args: argparse.Namespace) -> int:
    """Scores each layer on tasks and draws attention; writes W/layers.html."""
    if not args.tasks and args.attention is None:
        raise InputError("layers: give --tasks, --attention, or both")
    if args.attention is not None and not args.attention.strip():
        raise InputError("--attention: a text is needed")
    workdir.require_local(args.workdir)  # the results are written there
    run = open_run_or_base(args.workdir)
    attention, record = None, dict[str, Any]()
    model = load_model(run, args, allow_finetuned=False)
    from bert_jax.tools import layer_scores
    from bert_jax.tools.report import page

    if args.attention is not None:
        with prefix_errors("--attention"):
            attention = model.attention(args.attention)
    if args.tasks:
        record = layer_scores.score_layers(args.tasks, model, print_now)
        for line in page.table_of_layers(record).lines():
            print(line)
        workdir.write_json(run.layers, record)
    elif run.layers.exists():  # the page keeps the scores of an earlier command
        record = workdir.read_json(run.layers, layer_scores.FORMAT_VERSION)
    page.write_layers(run.root / "layers.html", model.name, record, attention)
    print_now(f"layers: {run.root / 'layers.html'}")
    return FINISHED


@COMMANDS.add(
    "show",
    "decode the batch of a step: text, masks, labels",
    Argument(
        "--step",
        metavar="N",
        help="show the batch that comes after N steps [0]",
        type=integer(0),
        default=0,
    ),
    Argument("--rows", metavar="K", help="number of rows to show [4]", type=integer(1), default=4),
    shared.OPTIONAL_EXPERIMENT,
    shared.WORKDIR,
    shared.SETTINGS,
    shared.CACHE,
)
def show(args: argparse.Namespace) -> int:
    """Decodes the batch of a step."""
    from rich.console import Console

    console = Console()
    for line in _batch_lines(args):
        console.print(line, soft_wrap=not console.is_terminal)
    return FINISHED


def _batch_lines(args: argparse.Namespace) -> Iterator[Any]:
    """Returns lines about a batch of a pre-training run, or of the fine-tuned run in --workdir."""
    saved_run = mirror.open_workdir(args.workdir) if args.workdir and not args.experiment else None
    if saved_run is not None and workdir.holds_finetuning(saved_run):
        from bert_jax.tasks import batch_text

        finetuning = load_saved_experiment(saved_run, args.set, Finetuning)
        lines = batch_text.show(finetuning, args.step, args.rows)
        return itertools.chain(config.notes_on_settings(finetuning), lines)
    experiment, run = load_experiment_and_run(args)
    require_corpus(run)
    from bert_jax.pretraining import row_text
    from bert_jax.pretraining.prepared_corpus import PreparedCorpus

    saved_experiment = workdir.load_experiment(run) if run.experiment.exists() else experiment
    if changed := config.differences(saved_experiment, experiment, "identity"):  # fixed in a run
        raise InputError(
            f"--workdir {run.address}: the run was started with other settings "
            f"({'; '.join(changed)}); to show the run, remove EXPERIMENT and --set; to show your "
            "settings, name a new --workdir and a prepared corpus: --set run.corpus_dir=FOLDER"
        )
    checkpoint = workdir.fork_record(run).get("checkpoint", "0")  # of a fork: RUN/checkpoints/STEP
    if args.step < int(checkpoint.rpartition("/")[2]):
        raise InputError(
            f"--step {args.step}: this run was forked from {checkpoint}; for earlier steps name "
            "the --workdir of the run that it was forked from"
        )
    lines = row_text.show(experiment, PreparedCorpus.open(run.corpus), args.step, args.rows)
    return itertools.chain(config.notes_on_settings(experiment), lines)


@COMMANDS.add(
    "config",
    "print the resolved experiment as JSON, or explain its fields",
    Argument(
        "--explain",
        metavar="FIELD",
        help="instead explain a field, a section, or all fields: type, default, choices, meaning",
        nargs="?",
        const="",
    ),
    shared.OPTIONAL_EXPERIMENT,
    shared.EXPERIMENT_WORKDIR,
    shared.SETTINGS,
)
def print_config(args: argparse.Namespace) -> int:
    """Prints an experiment as JSON, or explains fields."""
    if args.explain is not None:
        # `config --explain FIELD` needs no experiment.
        print(explain.explain(args.explain))
        return FINISHED
    experiment = resolve_experiment(args)
    print(config.to_json(experiment), end="")
    return FINISHED


@COMMANDS.add(
    "tokenize",
    "convert lines of text from standard input to lines of token ids",
    Argument(
        "--tokenizer",
        metavar="FILE_OR_FOLDER",
        help="vocab.txt, a .model file, or a folder",
        required=True,
    ),
    Argument("--cased", action="store_true", help="if --tokenizer is a file: do not lower-case"),
)
def tokenize(args: argparse.Namespace) -> int:
    """Prints the token ids of the lines of standard input."""
    from bert_jax.text import tokenizer

    tok = tokenizer.load(args.tokenizer, "cased" if args.cased else "uncased")
    for where, line in read_input_lines():
        with prefix_errors(where):
            ids = tok.encode(line)
        print(" ".join(map(str, ids)))
    return FINISHED
