"""The commands that look at runs."""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

from bert_jax import config
from bert_jax.cli.command import (
    COLUMNS,
    columns_of,
    command,
    experiment_of,
    is_finetuned,
    require_corpus,
    require_run,
    saved_experiment,
    say,
    trained_of,
)
from bert_jax.config import Experiment, Finetuning, Parallelism, explain
from bert_jax.errors import FAILED, FINISHED, InputError, prefix_errors
from bert_jax.storage import buckets, mirror
from bert_jax.storage.workdir import (
    Workdir,
    fork_of,
    holds_finetuning,
    load_experiment,
    read_json,
    require_plain,
    with_checksum,
    write_json,
)


@command()
def evaluate(args: argparse.Namespace) -> int:
    """Score a checkpoint on held-out text, or on minimal pairs and other tasks.

    CODE SAVED_EXPERIMENT WORKDIR SETTINGS CACHE CHECKPOINT
    --task TASKFILE...: instead score the run or base in --workdir on this task: on minimal pairs as
        it is, on similar texts by the cosine of its vectors, on others with a linear layer trained
        on them; may be repeated
    --also W (several): with --task: score these runs and bases, too
    COLUMNS TUNED_BASE
    """
    if args.task:
        return _evaluate_tasks(args)
    columns = {f"--{flag.replace('_', '-')}": getattr(args, flag) for flag in COLUMNS}
    for flag, value in {"--also": args.also, "--from": args.base, **columns}.items():
        if value:
            raise InputError(f"{flag}: goes with --task; leave it out")
    experiment, workdir = experiment_of(args)
    require_corpus(workdir)
    from bert_jax.pretraining import evaluators
    from bert_jax.pretraining.loaded import load_params
    from bert_jax.pretraining.pretraining import Prepared
    from bert_jax.running.environment import keep_compiled_programs
    from bert_jax.training import mesh as mesh_lib
    from bert_jax.training import objective as objective_lib

    keep_compiled_programs()
    prepared = Prepared.open(workdir.corpus)
    parallelism = Parallelism()  # not the run's own, which is for the devices it was trained on
    mesh = mesh_lib.make_mesh(parallelism)
    params, done = load_params(experiment, workdir, prepared, mesh, args.checkpoint)
    objective = objective_lib.of(experiment.model_scored(done), experiment.data)
    rows = prepared.held_out(experiment, mesh)
    metrics = evaluators.evaluate(rows, params, objective, parallelism, mesh)
    print(f"step {done}: {evaluators.summary(metrics)}")
    print(json.dumps({"step": done, **metrics}))
    return FINISHED


def _evaluate_tasks(args: argparse.Namespace) -> int:
    if args.experiment is not None or args.set or not args.workdir:
        raise InputError("--task: name the --workdir of a run or a base, no EXPERIMENT, no --set")
    places = [args.workdir, *(args.also or ())]
    for args.workdir in places:
        is_finetuned(args)
    from bert_jax.tasks import minimal_pairs, probes

    asked = probes.Probes(args.task, None, "--task", columns_of(args))
    for place in places:
        args.workdir = place
        trained = trained_of(args)
        answer = probes.of_trained(asked, trained)
        for name, score in answer["scores"].items():
            shown = f"{place}: {name}" if args.also else name
            if name in answer.get("minimal_pairs", {}):
                lines = minimal_pairs.in_words(shown, answer["minimal_pairs"][name])
            elif name in answer.get("similar", {}):
                scores = (f"{of} {value:.4f}" for of, value in answer["similar"][name].items())
                lines = [f"{shown}  {', '.join(scores)}"]
            else:
                guess = answer["majority"][name]
                lines = [f"{shown}  {score:.4f}, always the commonest answer {guess:.4f}"]
            for line in lines:
                print(line)
        print(json.dumps({"workdir": place, "step": trained.step, **answer}))
    return FINISHED


@command()
def layers(args: argparse.Namespace) -> int:
    """Show what each layer knows of some tasks, and where its heads look; writes W/layers.html.

    RUN_OR_BASE CACHE CHECKPOINT CODE
    --tasks TASKFILE (several): tasks to score each layer on: labels of texts, pairs or words with a
        linear layer trained on its vectors, similarities by their cosine
    --attention TEXT: draw where each head looks in this text
    """
    if not args.tasks and args.attention is None:
        raise InputError("layers: name --tasks, --attention, or both")
    if args.attention is not None and not args.attention.strip():
        raise InputError("--attention: a text is needed")
    place, record, attention = Workdir(args.workdir), dict[str, Any](), None
    trained = trained_of(args)
    from bert_jax.tasks import layers as layers_lib
    from bert_jax.tools.report import page

    if args.attention is not None:
        with prefix_errors("--attention"):
            attention = trained.attention(args.attention)
    if args.tasks:
        record = layers_lib.score_layers(args.tasks, trained, say)
        for line in page.table_of_layers(record).lines():
            print(line)
        write_json(place.layers, record)
    elif place.layers.exists():
        record = read_json(place.layers, layers_lib.FORMAT_VERSION)
    page.write_layers(place.root / "layers.html", trained.name, record, attention)
    say(f"layers: {place.root / 'layers.html'}")
    return FINISHED


@command()
def show(args: argparse.Namespace) -> int:
    """Decode the batch of a step: text, masks, labels.

    SAVED_EXPERIMENT WORKDIR SETTINGS CACHE
    --step N (int from 0 = 0): show the batch that comes after N steps
    --rows K (int from 1 = 4): rows to show
    """
    from rich.console import Console

    console = Console()
    for line in _shown(args):
        console.print(line, soft_wrap=not console.is_terminal)
    return FINISHED


def _shown(args: argparse.Namespace) -> Iterator[Any]:
    """Lines about a step of a pre-training, or of the fine-tuned run in --workdir."""
    saved = args.experiment is None and args.workdir
    if saved and holds_finetuning(mirror.open_workdir(args.workdir)):
        from bert_jax.tasks import shown

        tuned = saved_experiment(args, Finetuning)
        return itertools.chain(config.notes(tuned), shown.show(tuned, args.step, args.rows))
    experiment, workdir = experiment_of(args)
    require_corpus(workdir)
    from bert_jax import api
    from bert_jax.pretraining.pretraining import Prepared

    saved = load_experiment(workdir) if workdir.experiment.exists() else experiment
    if changed := config.differences(saved, experiment, "identity"):
        raise InputError(
            f"--workdir {workdir.named}: its run has other settings ({'; '.join(changed)}); leave "
            "out EXPERIMENT and --set, or name another --workdir, and --set run.corpus_dir=FOLDER"
        )
    begins = fork_of(workdir).get("checkpoint", "0")
    if args.step < int(begins.rpartition("/")[2]):
        raise InputError(f"--step {args.step}: of the run that began with {begins}; ask that one")
    shown = api.show(experiment, Prepared.open(workdir.corpus), args.step, args.rows)
    return itertools.chain(config.notes(experiment), shown)


@command(name="config")
def config_(args: argparse.Namespace) -> int:
    """Print the resolved experiment as JSON, or explain its fields.

    SAVED_EXPERIMENT WORKDIR SETTINGS
    --explain [FIELD]: instead explain a field, a section, or all of them: type, default, choices,
        meaning
    """
    if args.explain is not None:
        # `config --explain FIELD` needs no experiment.
        print(explain.explain(args.explain))
        return FINISHED
    print(config.to_json(experiment_of(args)[0]), end="")
    return FINISHED


@command()
def plan(args: argparse.Namespace) -> int:
    """Compile the steps for TPU pods nobody has booked: what fits, how fast, at what cost.

    CODE SAVED_EXPERIMENT WORKDIR SETTINGS CACHE
    --topology SLICES (required): TPU slices to plan for, separated by commas: v5e:8x8,4*v5e:8x8
    --out FILE: file to write the plan to, as JSON [W/plan.json if --workdir is given]
    --search: also try settings of sharding, remat and accumulation on each slice, and rank them
    PRICE
    """
    experiment, workdir = experiment_of(args, "write")
    if args.workdir and args.out:
        raise InputError("--out: the plan goes into --workdir; name one of the two")
    if args.workdir:
        workdir.require_ours()
    from bert_jax.tools.plan import topology

    slices = topology.parse_list(args.topology)
    from bert_jax.tools.plan import report

    mode, path = "search" if args.search else "plan", epath.Path(args.out) if args.out else None
    if args.workdir:
        path = workdir.named / "plan.json"
    if path is not None:
        require_plain(path)
    made = report.make_plan(experiment, slices, mode, args.price_per_chip_hour)
    for line in report.lines(made):
        say(line)
    if path is not None:
        buckets.write(path, json.dumps(with_checksum(made), indent=2) + "\n")
        say(f"plan: {path}")
    return FINISHED


@command()
def report(args: argparse.Namespace) -> int:
    """Write one HTML page about a run, or about several compared.

    RUN...: the workdir of a run; several are compared
    CACHE
    --out FILE: the page to write [W/report.html; of several runs comparison.html]
    --follow: write the page again and again while a run goes on
    --every S (int from 1 = 20): with --follow: seconds between writes
    PRICE
    """
    for run in args.run:
        require_run(run)
    from bert_jax.tools.report import page

    every = args.every if args.follow else None
    page.write(args.run, args.out, every, say, args.price_per_chip_hour)
    return FINISHED


@command(codes={FAILED: "failure; with --verify, a checkpoint is damaged"})
def checkpoints(args: argparse.Namespace) -> int:
    """List a run's checkpoints: steps, sizes, held-out losses.

    RUN: the workdir of a run
    --verify: read them all, and compare them with their checksums
    """
    require_run(args.run)
    from bert_jax.checkpoints import checkpoint
    from bert_jax.training import mesh as mesh_lib

    workdir = mirror.open_workdir(epath.Path(args.run))
    kind = Finetuning if holds_finetuning(workdir) else Experiment
    experiment = load_experiment(workdir, kind)
    if not buckets.names(workdir.checkpoints):
        raise InputError(f"{workdir.checkpoints}: no checkpoint yet")
    saved = checkpoint.Checkpoints(workdir.checkpoints)
    steps, damaged = saved.steps, saved.unreadable()
    metadata = {n: saved.metadata(n) for n in steps if n not in damaged}
    losses = {n: m["held_out_loss"] for n, m in metadata.items() if m["held_out_loss"] is not None}
    best = min(losses, key=lambda n: (losses[n], n), default=None)
    if not steps:
        say(f"{workdir.checkpoints}: no checkpoint yet")
    else:
        if fork := fork_of(workdir):
            say(f"forked from {fork['checkpoint']} (sha256 {fork['sha256'][:12]})")
        say(f"{'step':>10}  {'saved':<16}  {'MB':>9}  held-out loss")
    for row, number in enumerate(steps):
        place = workdir.checkpoints / str(number)
        saved_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(place.stat().mtime))
        words = [f"{losses[number]:.3f}" if number in losses else "-"]
        words += ["newest"] * (row == 0) + ["best"] * (number == best)
        words += ["damaged"] * (number in damaged)
        say(f"{number:>10}  {saved_at}  {_megabytes(place):>9.1f}  {', '.join(words)}")
    for place in sorted(workdir.checkpoints.glob(f"{checkpoint.ASIDE}*")):
        say(f"{place.name}: was found damaged and put aside, {_megabytes(place):.1f} MB")
    if steps and steps[0] in metadata and _is_finished(experiment, metadata[steps[0]]):
        say("the run is finished")
    code = FINISHED
    for number in steps if args.verify else ():
        try:
            whole = mesh_lib.replicated(mesh_lib.one_device())
            saved.restore(number, saved.abstract_state(number, whole))
            say(f"step {number}: every array is what was saved")
        except checkpoint.Damaged as error:
            say(str(error))
            code = FAILED
    return code


def _is_finished(experiment: Experiment | Finetuning, newest: dict[str, Any]) -> bool:
    """Tells from the metadata of its newest checkpoint whether a run has done all it was to do."""
    from bert_jax.running.lines import should_stop_early

    if isinstance(experiment, Experiment):
        return newest["step"] == experiment.total_steps
    whole = newest["step"] == newest["notes"]["total_steps"]
    return whole or should_stop_early(newest.get("held_out", []), experiment.patience)


def _megabytes(place: Any) -> float:
    return sum(
        _megabytes(path) if path.is_dir() else path.stat().length / 1e6 for path in place.iterdir()
    )
