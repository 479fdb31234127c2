"""The commands that look at runs, experiments and text."""

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
    ONLY_FINETUNED_REASON,
    get_column_fields,
    load_model,
    load_saved_experiment,
    open_run,
    open_run_or_base,
    print_now,
    read_lines,
    reject_flags,
    require_corpus,
    resolve_experiment,
)
from bert_jax.cli.parsing import Command, Parser, integer
from bert_jax.config import Experiment, Finetuning, explain
from bert_jax.errors import FAILED, FINISHED, InputError, prefix_errors
from bert_jax.storage import mirror, workdir
from bert_jax.storage.storage import storage_of


def _add_evaluate_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--task",
        metavar="TASKFILE",
        action="append",
        default=[],
        help="score the run or base in --workdir on this task instead of held-out text; may be "
        "repeated. Similarity tasks are scored by the cosine of vectors, minimal pairs by the "
        "likelihoods of their two sentences, all other tasks by a linear probe",
    )
    parser.add_argument(
        "--also",
        metavar="W",
        nargs="+",
        default=[],
        help="with --task: score these runs and bases too",
    )


def evaluate(args: argparse.Namespace) -> int:
    """Scores a checkpoint on held-out text, or on tasks."""
    if args.task:
        return _evaluate_tasks(args)
    columns = {f"--{flag.replace('_', '-')}": getattr(args, flag) for flag in shared.COLUMN_FIELDS}
    for flag, value in {"--also": args.also, "--from": args.base, **columns}.items():
        if value:
            raise InputError(f"{flag}: requires --task; add --task or remove {flag}")
    experiment, run = open_run(args.experiment, args.set, args.workdir)
    require_corpus(run)
    from bert_jax.pretraining import evaluators
    from bert_jax.pretraining.loaded_model import score_held_out
    from bert_jax.running.environment import enable_compilation_cache

    enable_compilation_cache()
    step, metrics = score_held_out(experiment, run, args.checkpoint)
    print(f"step {step}: {evaluators.summary(metrics)}")
    print(json.dumps({"step": step, **metrics}))
    return FINISHED


def _evaluate_tasks(args: argparse.Namespace) -> int:
    if args.experiment is not None or args.set or not args.workdir:
        missing = "give --workdir" if not args.workdir else "remove EXPERIMENT and --set"
        raise InputError(f"--task: {missing}")
    runs = {root: open_run_or_base(root) for root in (args.workdir, *args.also)}
    for run in runs.values():
        if not workdir.holds_finetuning(run):
            reject_flags(run, ONLY_FINETUNED_REASON, {"--from": args.base})
    from bert_jax.tasks import probes

    tasks = probes.Probes(args.task, pairs=None, where="--task", fields=get_column_fields(args))
    for root, run in runs.items():
        model = load_model(run, args.base, args.checkpoint)
        results = probes.score_probes(tasks, model)
        for line in _score_lines(results, f"{root}: " if args.also else ""):
            print(line)
        print(json.dumps({"workdir": root, "step": model.step, **results}))
    return FINISHED


def _score_lines(results: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yields a line for the score of each task."""
    from bert_jax.tasks import minimal_pairs

    for name, score in results["scores"].items():
        if name in results.get("minimal_pairs", {}):
            yield from minimal_pairs.score_lines(f"{prefix}{name}", results["minimal_pairs"][name])
        elif name in results.get("similar", {}):
            scores = (f"{metric} {value:.4f}" for metric, value in results["similar"][name].items())
            yield f"{prefix}{name}  {', '.join(scores)}"
        else:
            majority = results["majority"][name]
            yield f"{prefix}{name}  {score:.4f}, majority baseline {majority:.4f}"


def _add_layers_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--tasks",
        metavar="TASKFILE",
        nargs="+",
        default=[],
        help="tasks to score each layer on: labels of texts, pairs or words with a linear probe, "
        "similarities by the cosine of the layer's vectors",
    )
    parser.add_argument(
        "--attention", metavar="TEXT", help="draw the attention maps of each layer for this text"
    )


def layers(args: argparse.Namespace) -> int:
    """Scores each layer on tasks and draws attention; writes W/layers.html."""
    if not args.tasks and args.attention is None:
        raise InputError("layers: name --tasks, --attention, or both")
    if args.attention is not None and not args.attention.strip():
        raise InputError("--attention: a text is needed")
    workdir.require_local(args.workdir)  # the results are written there
    run = open_run_or_base(args.workdir)
    attention, record = None, dict[str, Any]()
    model = load_model(run, None, args.checkpoint, allow_finetuned=False)
    from bert_jax.tasks import layer_scores as layers_lib
    from bert_jax.tools.report import page

    if args.attention is not None:
        with prefix_errors("--attention"):
            attention = model.attention(args.attention)
    if args.tasks:
        record = layers_lib.score_layers(args.tasks, model, print_now)
        for line in page.table_of_layers(record).lines():
            print(line)
        workdir.write_json(run.layers, record)
    elif run.layers.exists():  # the page keeps the scores of an earlier command
        record = workdir.read_json(run.layers, layers_lib.FORMAT_VERSION)
    page.write_layers(run.root / "layers.html", model.name, record, attention)
    print_now(f"layers: {run.root / 'layers.html'}")
    return FINISHED


def _add_show_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--step",
        metavar="N",
        type=integer(0),
        default=0,
        help="show the batch that comes after N steps [0]",
    )
    parser.add_argument(
        "--rows", metavar="K", type=integer(1), default=4, help="number of rows to show [4]"
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
    experiment, run = open_run(args.experiment, args.set, args.workdir)
    require_corpus(run)
    from bert_jax.pretraining import row_text
    from bert_jax.pretraining.pretraining_job import OpenCorpus

    saved_experiment = workdir.load_experiment(run) if run.experiment.exists() else experiment
    if changed := config.differences(saved_experiment, experiment, "identity"):
        raise InputError(
            f"--workdir {run.address}: the run was started with other settings "
            f"({'; '.join(changed)}); to show the run, remove EXPERIMENT and --set; to show your "
            "settings, name a new --workdir and a prepared corpus: --set run.corpus_dir=FOLDER"
        )
    checkpoint = workdir.fork_record(run).get("checkpoint", "0")
    if args.step < int(checkpoint.rpartition("/")[2]):
        raise InputError(
            f"--step {args.step}: this run was forked from {checkpoint}; for earlier steps name "
            "the --workdir of the run that it was forked from"
        )
    lines = row_text.show(experiment, OpenCorpus.open(run.corpus), args.step, args.rows)
    return itertools.chain(config.notes_on_settings(experiment), lines)


def _add_config_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--explain",
        metavar="FIELD",
        nargs="?",
        const="",
        help="instead explain a field, a section, or all fields: type, default, choices, meaning",
    )


def print_config(args: argparse.Namespace) -> int:
    """Prints an experiment as JSON, or explains fields."""
    if args.explain is not None:
        # `config --explain FIELD` needs no experiment.
        print(explain.explain(args.explain))
        return FINISHED
    experiment = resolve_experiment(args.experiment, args.set, args.workdir)
    print(config.to_json(experiment), end="")
    return FINISHED


def _add_report_arguments(parser: Parser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="+", help="the workdir of a run; several are compared"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the page to write [RUN/report.html, or comparison.html for several runs]",
    )
    parser.add_argument(
        "--follow", action="store_true", help="write the page again while the run trains"
    )
    parser.add_argument(
        "--every",
        metavar="S",
        type=integer(1),
        default=20,
        help="with --follow: seconds between writes [20]",
    )


def report(args: argparse.Namespace) -> int:
    """Writes an HTML page about runs."""
    for root in args.run:
        open_run_or_base(root)  # raises if there is none, before jax is imported
    from bert_jax.tools.report import page

    every = args.every if args.follow else None
    page.write(args.run, args.out, every, print_now, args.price_per_chip_hour)
    return FINISHED


def _add_checkpoints_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="the workdir of a run")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read all checkpoints and compare them with their checksums",
    )


def checkpoints(args: argparse.Namespace) -> int:
    """Lists the checkpoints of a run."""
    run = open_run_or_base(args.run)
    from bert_jax.checkpoints import layout, load
    from bert_jax.training import mesh as mesh_lib

    kind = Finetuning if workdir.holds_finetuning(run) else Experiment
    experiment = workdir.load_experiment(run, kind)
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
    for row, number in enumerate(steps):  # the newest first
        folder = run.checkpoints / str(number)
        saved_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().mtime))
        words = [f"{losses[number]:.3f}" if number in losses else "-"]
        labels = {"newest": row == 0, "best": number == best, "damaged": number in damaged}
        words += [label for label, applies in labels.items() if applies]
        print_now(f"{number:>10}  {saved_at}  {_megabytes(folder):>9.1f}  {', '.join(words)}")
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
    is_last = metadata["step"] == metadata["notes"]["total_steps"]
    return is_last or should_stop_early(metadata.get("held_out", []), experiment.patience)


def _megabytes(folder: epath.Path) -> float:
    return sum(
        _megabytes(path) if path.is_dir() else path.stat().length / 1e6 for path in folder.iterdir()
    )


def _add_tokenize_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--tokenizer",
        metavar="FILE_OR_FOLDER",
        required=True,
        help="vocab.txt, a .model file, or a folder",
    )
    parser.add_argument(
        "--cased", action="store_true", help="if --tokenizer is a file: do not lower-case"
    )


def tokenize(args: argparse.Namespace) -> int:
    """Prints the token ids of the lines of standard input."""
    from bert_jax.text import tokenizer

    tok = tokenizer.load(args.tokenizer, "cased" if args.cased else "uncased")
    for where, line in read_lines():
        with prefix_errors(where):
            ids = tok.encode(line)
        print(" ".join(map(str, ids)))
    return FINISHED


COMMANDS = {
    "report": Command(
        report,
        "write an HTML page about a run, or a comparison of several",
        _add_report_arguments,
        (shared.PRICE, shared.CACHE),
    ),
    "checkpoints": Command(
        checkpoints,
        "list a run's checkpoints: steps, sizes, held-out losses",
        _add_checkpoints_arguments,
        codes={FAILED: "the command failed, or --verify found a damaged checkpoint"},
    ),
    "evaluate": Command(
        evaluate,
        "score a checkpoint on held-out text, or on minimal pairs and other tasks",
        _add_evaluate_arguments,
        (
            shared.OPTIONAL_EXPERIMENT,
            shared.WORKDIR,
            *shared.TRAINING_FLAGS,
            shared.CHECKPOINT,
            shared.COLUMNS,
            shared.BASE_OF_FINETUNED,
        ),
    ),
    "layers": Command(
        layers,
        "score each layer on tasks, and draw attention maps; writes W/layers.html",
        _add_layers_arguments,
        (shared.RUN_OR_BASE, shared.CUSTOM_CODE, shared.CACHE, shared.CHECKPOINT),
    ),
    "show": Command(
        show,
        "decode the batch of a step: text, masks, labels",
        _add_show_arguments,
        (shared.OPTIONAL_EXPERIMENT, shared.WORKDIR, shared.SETTINGS, shared.CACHE),
    ),
    "config": Command(
        print_config,
        "print the resolved experiment as JSON, or explain its fields",
        _add_config_arguments,
        (shared.OPTIONAL_EXPERIMENT, shared.WORKDIR, shared.SETTINGS),
    ),
    "tokenize": Command(
        tokenize,
        "convert lines of text from standard input to lines of token ids",
        _add_tokenize_arguments,
    ),
}
