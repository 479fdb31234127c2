"""`bert-jax COMMAND`: every command, its arguments above its function; thin over the library."""

import argparse
import dataclasses
import difflib
import errno
import functools
import io
import json
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

from bert_jax import __version__, config, errors, system
from bert_jax.config import Experiment, Finetuning, Kind, Parallelism, Section, explain
from bert_jax.config.code import name_file, was_used
from bert_jax.conformance import command as conformance_command
from bert_jax.errors import FAILED, FINISHED, STOPPED, InputError, printable

# Exit codes of runs, by how they ended.
_CODES = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}
# Of a search: all are computed at once, and more than a few bring nothing.
_MOST_BEAMS = 64


# --- Commands and their arguments ---

T = typing.TypeVar("T", bound=Section)
# Adds an argument to a command's parser.
_Argument = Callable[[argparse.ArgumentParser], Any]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: its function, what adds its arguments, and what else its help shows.

    Attributes:
      fields: whose settings the help lists.
      codes: exit codes that mean something of this command's own.
    """

    function: Callable[[argparse.Namespace], int]
    arguments: tuple[_Argument, ...]
    fields: type[Section] | None
    codes: Mapping[int, str]


COMMANDS: dict[str, Command] = {}


def _command(
    *arguments: _Argument,
    name: str | None = None,
    fields: type[Section] | None = None,
    codes: Mapping[int, str] = types.MappingProxyType({}),
) -> Callable[[Callable[[argparse.Namespace], int]], Callable[[argparse.Namespace], int]]:
    """Makes a function a command, which is called as the function is and takes these arguments."""

    def register(function: Callable[[argparse.Namespace], int]):
        called = name or function.__name__.strip("_").replace("_", "-")
        COMMANDS[called] = Command(function, arguments, fields, codes)
        return function

    return register


def _argument(*names: str, **options: Any) -> _Argument:
    """Declares an argument as `argparse` takes it."""
    return lambda parser: parser.add_argument(*names, **options)


def _flag(name: str, help: str, **options: Any) -> _Argument:
    """Declares a flag that is given or not."""
    return _argument(name, action="store_true", help=help, **options)


def _set(of: str = "experiment", example: str = "phases.0.steps=100") -> _Argument:
    return _argument(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help=f"change a field of the {of}, e.g. {example}; may be repeated",
    )


_EXPERIMENT = _argument(
    "experiment",
    metavar="EXPERIMENT",
    help="a .py file that defines experiment(), the name of one that is shipped (tiny, bert_base), "
    "or a resolved config as .json",
)
_SAVED_EXPERIMENT = _argument(
    "experiment",
    metavar="EXPERIMENT",
    nargs="?",
    help="as for pretrain; left out: the config saved in --workdir",
)
_WORKDIR = _argument("--workdir", metavar="W", help="where the run lives [runs/NAME]")
_CACHE = _argument(
    "--cache-dir",
    metavar="D",
    help="where this machine keeps compiled programs and its copies of corpora that lie in buckets "
    "[$BERT_JAX_CACHE_DIR, or bert_jax in the user's cache folder]",
)
_CODE = _argument(
    "--code",
    metavar="FILE",
    help="the file of a run's own objective or encoder, which runs if its hash is that of the run",
)
_CHECKPOINT = _argument(
    "--checkpoint",
    default="newest",
    metavar="STEP",
    help="of a run: newest, best (by held-out loss), or a step [newest]",
)
_TUNED_BASE = _argument(
    "--from",
    dest="base",
    metavar="BASE",
    help="of a fine-tuned run: where its base lies now [where it lay]",
)
_PRICE = _argument(
    "--price-per-chip-hour", type=float, metavar="X", help="what a chip costs, to show the cost"
)


@_command(
    _EXPERIMENT,
    _WORKDIR,
    _set(),
    _CACHE,
    _flag("--verify", "read all of a corpus, and compare it with its hashes"),
    _argument(
        "--workers",
        type=int,
        default=system.cores(),
        metavar="N",
        help="processes that do the work; the bytes are the same [all cores]",
    ),
    _argument(
        "--beam",
        metavar="'RUNNER OPTIONS'",
        help="do the work with Apache Beam, e.g. 'DataflowRunner --project=P --region=R "
        "--temp_location=gs://B/tmp' (the [beam] extra)",
    ),
)
def prepare(args: argparse.Namespace) -> int:
    """Make the corpus: tokenizer, ids, splits."""
    from bert_jax.data import corpus

    experiment, workdir = _experiment(args, "write")
    workdir.require_ours()
    if args.workers < 1:
        raise InputError(f"--workers {args.workers}: must be at least 1")
    manifest = corpus.prepare(
        experiment.corpus,
        experiment.model.vocab_size,
        workdir.corpus,
        _say,
        args.workers,
        args.beam,
    )
    if args.verify:
        corpus.verify(workdir.corpus)
        _say(f"corpus: every file of {workdir.corpus} is as it was made")
    tokens = manifest["splits"]["train"]["tokens"]
    _say(f"corpus: {workdir.corpus} is ready, {tokens} tokens to train on")
    return FINISHED


@_command(
    _CODE,
    _SAVED_EXPERIMENT,
    _WORKDIR,
    _set(),
    _CACHE,
    _flag("--extend", "do more steps in the last phase; the learning-rate schedule changes"),
    _argument(
        "--decay-from",
        metavar="RUN/checkpoints/STEP",
        help="begin with a checkpoint of a stable run (optimizer.schedule=wsd), in a --workdir of "
        "its own, and do the optimizer.decay_steps after it",
    ),
    fields=Experiment,
    codes=errors.CODES_OF_RUNS,
)
def pretrain(args: argparse.Namespace) -> int:
    """Pre-train; run again to go on where it stopped."""
    system.use_one_memory_pool()
    from bert_jax.tasks.probes import Probes
    from bert_jax.training import pretraining
    from bert_jax.training.progress import LineConsole, Progress

    experiment, origin, branch = _pretraining(args)
    workdir = _workdir(args, experiment, "write")
    progress = Progress(LineConsole())
    extend = "extend" if args.extend else "keep"
    probes = Probes(experiment.run.probes) if experiment.run.probes else None
    outcome = pretraining.pretrain(experiment, workdir, extend, progress, origin, probes, branch)
    return _CODES[outcome]


def _pretraining(args: argparse.Namespace):
    """The experiment, its origin for the record, and the checkpoint it branches off, if it does.

    The origin is None of a branch, and of a run that goes on and has its record already.
    """
    from bert_jax.training import branch

    if args.decay_from is not None:
        if args.extend or not args.workdir:
            raise InputError("--decay-from: needs a --workdir of its own, and no --extend")
        experiment, begins = branch.opened(args.decay_from, args.experiment, args.set)
        return experiment, None, begins
    if args.experiment is None:
        return _saved_experiment(args, Experiment), None, None
    return *config.load_with_origin(args.experiment, args.set), None


@_command(
    _argument("table", metavar="TABLE", help="a .py file that defines table()"),
    _argument("--workdir", metavar="W", help="where its runs and results live [runs/NAME]"),
    _CACHE,
    codes=errors.CODES_OF_RUNS,
)
def compare(args: argparse.Namespace) -> int:
    """Run what a table names at equal budgets, and compare; run again to go on where it stopped."""
    system.use_one_memory_pool()
    from bert_jax.compare.results import Results
    from bert_jax.compare.runs import Comparison
    from bert_jax.storage.workdir import lock
    from bert_jax.training.progress import LineConsole, Progress

    table = config.load_table(args.table)
    progress = Progress(LineConsole())
    results = Results.read(table, args.workdir or f"runs/{table.name}")
    comparison = Comparison(results, progress)
    with lock(results.root):
        outcome = comparison.run()
    for line in results.lines():
        progress.say(line)
    progress.say(f"compare: {results.root / 'table.html'}, table.txt and table.csv next to it")
    return _CODES[outcome]


@_command(
    _CODE,
    _argument(
        "task",
        metavar="TASKFILE",
        nargs="?",
        help="a .py file whose experiment() gives a Finetuning, or a resolved one as .json; left "
        "out: the task that --kind and what follows it describe",
    ),
    _argument("--kind", choices=typing.get_args(Kind), help="instead of a TASKFILE: what is asked"),
    _argument(
        "--train",
        metavar="FILE",
        action="append",
        help="examples to learn from: .csv, .tsv, .jsonl, .conll, SQuAD's .json, or a source as "
        "task.train has it; may be repeated",
    ),
    _argument("--validation", metavar="FILE", action="append", help="examples to score on"),
    _argument("--text", metavar="COLUMN", help="the text, or the first of two [sentence]"),
    _argument("--second", metavar="COLUMN", help="the second text of a pair or a regression"),
    _argument("--label", metavar="COLUMN", help="the answer [label]"),
    _argument(
        "--from",
        dest="base",
        metavar="BASE",
        help="a base or a run, whose encoder is adapted; left out: the one that the run began with",
    ),
    _argument(
        "--workdir",
        metavar="W",
        help="where the run lives [runs/NAME], or those of a sweep [runs/NAME-sweep]",
    ),
    _set("TASKFILE", "optimizer.peak_learning_rate=2e-5"),
    _CACHE,
    _argument(
        "--sweep",
        metavar="FIELD=V1,V2",
        action="append",
        default=[],
        help="a run for each value, e.g. seed=1,2,3, and of several fields for each choice of "
        "values, one after the other; prints the mean over seeds",
    ),
    fields=Finetuning,
    codes=errors.CODES_OF_RUNS,
)
def finetune(args: argparse.Namespace) -> int:
    """Adapt the encoder of a base or a run to a task; run again to go on where it stopped."""
    system.use_one_memory_pool()
    from bert_jax.tasks import job, sweep
    from bert_jax.training.progress import LineConsole, Progress

    progress = Progress(LineConsole())
    if args.sweep:
        if args.task is None:
            raise InputError("--sweep: needs a TASKFILE; see experiments/tasks/ for examples")
        of = sweep.members(args.task, args.set, args.sweep)
        return _CODES[sweep.run(of, args.base, args.workdir, progress)]
    experiment, origin = _finetuning(args)
    return _CODES[job.finetune(experiment, args.base, args.workdir, progress, origin)]


def _finetuning(args: argparse.Namespace) -> tuple[Finetuning, dict[str, Any] | None]:
    """The fine-tuning of a TASKFILE, of flags, or of a run that goes on, and where it comes from.

    Of a run that goes on the record of that stays, and None is returned.
    """
    names = ("kind", "train", "validation", "text", "second", "label")
    described = {f"--{name}": getattr(args, name) for name in names}
    described = {flag: value for flag, value in described.items() if value is not None}
    if args.task is not None and described:
        raise InputError(f"{next(iter(described))}: {args.task} says this; use --set instead")
    if args.task is not None:
        return config.load_with_origin(args.task, args.set, Finetuning)
    if described or not args.workdir:
        return config.finetuning_of(described, args.workdir, args.set)
    return _saved_experiment(args, Finetuning), None


@_command(
    _CODE,
    _SAVED_EXPERIMENT,
    _WORKDIR,
    _set(),
    _CACHE,
    _CHECKPOINT,
    _argument(
        "--task",
        dest="tasks",
        metavar="TASKFILE",
        action="append",
        default=[],
        help="instead ask the run or base in --workdir all of a file's minimal pairs, or what a "
        "linear layer reads off it for another task; may be repeated",
    ),
)
def evaluate(args: argparse.Namespace) -> int:
    """Score a checkpoint on held-out text, or in minimal pairs and other tasks as it is."""
    if args.tasks:
        return _evaluate_tasks(args)
    from bert_jax.predict import load_params
    from bert_jax.training import evaluators, step
    from bert_jax.training import mesh as mesh_lib
    from bert_jax.training import objective as objective_lib
    from bert_jax.training.environment import keep_compiled_programs
    from bert_jax.training.pretraining import Prepared

    keep_compiled_programs()
    experiment, workdir = _experiment(args)
    prepared = Prepared.open(workdir.corpus)
    parallelism = Parallelism()  # not the run's own, which is for the devices it was trained on
    mesh = mesh_lib.make_mesh(parallelism)
    params, done = load_params(experiment, workdir, prepared, mesh, args.checkpoint)
    objective = objective_lib.of(experiment.model_after(done), experiment.data)
    metrics = evaluators.evaluate(
        prepared.held_out(experiment, mesh),
        params,
        objective,
        step.make_eval_step(objective, parallelism, mesh),
        mesh,
    )
    print(f"step {done}: {evaluators.summary(metrics)}")
    print(json.dumps({"step": done, **metrics}))
    return FINISHED


def _evaluate_tasks(args: argparse.Namespace) -> int:
    from etils import epath

    from bert_jax.predict import Trained
    from bert_jax.tasks import minimal_pairs, probes
    from bert_jax.training.environment import keep_compiled_programs

    if args.experiment is not None or args.set or not args.workdir:
        raise InputError("--task: name the --workdir of a run or a base, no EXPERIMENT, no --set")
    keep_compiled_programs()
    asked = probes.Probes(args.tasks, pairs=None, where="--task")
    trained = Trained.of(epath.Path(args.workdir), which=args.checkpoint)
    answer = probes.of_trained(asked, trained)
    for name, score in answer["scores"].items():
        if name in answer.get("minimal_pairs", {}):
            for line in minimal_pairs.in_words(name, answer["minimal_pairs"][name]):
                print(line)
        else:
            print(f"{name}  {score:.4f}, of the commonest {answer['majority'][name]:.4f}")
    print(json.dumps({"step": trained.step, **answer}))
    return FINISHED


@_command(
    _argument("--workdir", metavar="W", required=True, help="a run or a base"),
    _CACHE,
    _CHECKPOINT,
    _argument(
        "--tasks",
        metavar="TASKFILE",
        nargs="+",
        default=[],
        help="what a linear layer is to read off each layer: tasks of one label a text, a pair or "
        "a word; and similarities, by the cosine",
    ),
    _argument("--attention", metavar="TEXT", help="draw where each head looks in this text"),
)
def layers(args: argparse.Namespace) -> int:
    """Show what each layer knows of some tasks, and where its heads look; writes W/layers.html."""
    from etils import epath

    from bert_jax.library import LoadedModel
    from bert_jax.predict import Trained
    from bert_jax.report import layers as page
    from bert_jax.storage.workdir import Workdir, read_json, sealed, write_atomic
    from bert_jax.tasks import layers as layers_lib
    from bert_jax.training.environment import keep_compiled_programs

    if not args.tasks and args.attention is None:
        raise InputError("layers: name --tasks, --attention, or both")
    keep_compiled_programs()
    trained = Trained.of(epath.Path(args.workdir), which=args.checkpoint)
    place = Workdir(args.workdir)
    record: dict[str, Any] = {}
    model = LoadedModel(trained)
    if args.tasks:
        every = range(trained.model.num_hidden_layers + 1)
        means = functools.partial(model.embed, layers=every)
        known = layers_lib.ask(args.tasks, trained, means, _say)
        for line in layers_lib.lines(known):
            print(line)
        record = layers_lib.record_of(trained, known)
    elif place.layers.exists():
        record = read_json(place.layers, layers_lib.FORMAT_VERSION)
    attention = None if args.attention is None else model.attention(args.attention)
    if args.tasks:
        write_atomic(place.layers, json.dumps(sealed(record), indent=2) + "\n")
    page.write(place.root / "layers.html", trained.name, record, attention)
    _say(f"layers: {place.root / 'layers.html'}")
    return FINISHED


@_command(
    _SAVED_EXPERIMENT,
    _WORKDIR,
    _set(),
    _CACHE,
    _argument(
        "--step", type=int, default=0, metavar="N", help="the batch that follows after N steps [0]"
    ),
    _argument("--rows", type=int, default=4, metavar="K", help="rows to show [4]"),
)
def show(args: argparse.Namespace) -> int:
    """Decode the batch of a step: text, masks, labels."""
    from rich.console import Console

    if args.rows < 1:
        raise InputError(f"--rows {args.rows}: must be at least 1")
    console = Console()
    for line in _shown(args):
        console.print(line, soft_wrap=not console.is_terminal)
    return FINISHED


def _shown(args: argparse.Namespace) -> Iterator[Any]:
    """Lines about a step of a pre-training, or of the fine-tuned run in --workdir."""
    from bert_jax import predict
    from bert_jax.storage import mirror
    from bert_jax.storage.workdir import holds_finetuning
    from bert_jax.tasks import shown
    from bert_jax.training.pretraining import Prepared

    if args.experiment is None and args.workdir and holds_finetuning(mirror.opened(args.workdir)):
        return shown.show(_saved_experiment(args, Finetuning), args.step, args.rows)
    experiment, workdir = _experiment(args)
    return predict.show(experiment, Prepared.open(workdir.corpus), args.step, args.rows)


@_command(
    _SAVED_EXPERIMENT,
    _WORKDIR,
    _set(),
    _argument(
        "--explain",
        metavar="FIELD",
        nargs="?",
        const="",
        help="instead explain a field, a section, or all of them: type, default, choices, meaning",
    ),
    name="config",
)
def config_(args: argparse.Namespace) -> int:
    """Print the resolved experiment as JSON, or explain its fields."""
    if args.explain is not None:
        # `config --explain FIELD` needs no experiment.
        print(explain.explain(args.explain))
        return FINISHED
    print(config.to_json(_experiment(args)[0]), end="")
    return FINISHED


def _plan_mode(parser: argparse.ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--search",
        dest="mode",
        action="store_const",
        const="search",
        default="plan",
        help="rank sharding, remat and accumulation on each slice, too",
    )
    mode.add_argument(
        "--scaling",
        dest="mode",
        action="store_const",
        const="scaling",
        help="instead give each chip of every slice the work it has on the first",
    )


@_command(
    _CODE,
    _SAVED_EXPERIMENT,
    _WORKDIR,
    _set(),
    _CACHE,
    _argument(
        "--topology",
        metavar="SLICES",
        required=True,
        help="TPU slices, separated by commas: v5e:8x8,v3:4x4",
    ),
    _argument(
        "--out", metavar="FILE", help="where the plan goes as JSON [W/plan.json if W is named]"
    ),
    _PRICE,
    _plan_mode,
)
def plan(args: argparse.Namespace) -> int:
    """Compile the steps for TPU pods nobody has booked: what fits, how fast, at what cost."""
    from etils import epath

    from bert_jax.plan import report, topology

    experiment, workdir = _experiment(args, "write")
    price = _price(args)
    if args.workdir and args.out:
        raise InputError("--out: the plan goes into --workdir; name one of the two")
    if args.workdir:
        workdir.require_ours()
    report.plan_and_write(
        experiment,
        topology.parse_list(args.topology),
        args.mode,
        price,
        workdir.named / "plan.json" if args.workdir else epath.Path(args.out) if args.out else None,
        _say,
    )
    return FINISHED


@_command(
    _argument("workdirs", metavar="W", nargs="+", help="a run; several are compared"),
    _CACHE,
    _argument("--out", metavar="FILE", help="the page [W/report.html; of several comparison.html]"),
    _flag("--follow", "write it again and again while a run goes on"),
    _argument(
        "--every", type=int, default=20, metavar="S", help="seconds between, with --follow [20]"
    ),
    _PRICE,
    _flag("--tensorboard", "write event files to W/tensorboard, too"),
)
def report(args: argparse.Namespace) -> int:
    """Write one HTML page about a run, or about several compared."""
    from bert_jax.report import page

    if args.every < 1:
        raise InputError(f"--every {args.every}: must be at least 1")
    page.write(
        args.workdirs,
        args.out,
        args.every if args.follow else None,
        "events" if args.tensorboard else "page",
        _say,
        _price(args),
    )
    return FINISHED


def _price(args: argparse.Namespace) -> float | None:
    """The price of a chip-hour, if one was given."""
    price = args.price_per_chip_hour
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"--price-per-chip-hour {price:g}: must be a number from 0 on")
    return price


@_command(
    _argument("workdir", metavar="W", help="a run"),
    _flag("--verify", "read them all, and compare them with their checksums"),
    codes={FAILED: "failure; with --verify, a checkpoint is damaged"},
)
def checkpoints(args: argparse.Namespace) -> int:
    """List a run's checkpoints: steps, sizes, held-out losses."""
    from etils import epath

    from bert_jax.training import checkpoint

    folder = epath.Path(args.workdir)
    for line in checkpoint.listing(folder):
        _say(line)
    damaged = 0
    for number, why in checkpoint.verify(folder) if args.verify else ():
        _say(why or f"step {number}: every array is what was saved")
        damaged += bool(why)
    return FAILED if damaged else FINISHED


@_command(
    _CODE,
    _argument("--workdir", metavar="W", required=True, help="a run"),
    _CACHE,
    _argument(
        "text",
        metavar="TEXT",
        nargs="*",
        help="A; of a fine-tuned run all texts of an example, one after the other, of QUESTION "
        "CONTEXT say; left out: lines of standard input, where tabs part texts",
    ),
    _argument("--next", metavar="B", help="a second text; with one TEXT"),
    _argument("--top", type=int, metavar="K", help="how many pieces are shown for each [MASK] [5]"),
    _CHECKPOINT,
    _argument(
        "--source",
        metavar="SOURCE",
        action="append",
        default=[],
        help="of a fine-tuned run: examples as task.train has them, tsv:FILE say; may be repeated",
    ),
    _flag(
        "--score",
        "of a fine-tuned run: print scores instead of answers; of task.validation if there is no "
        "--source",
    ),
    _argument(
        "--input",
        metavar="FILE",
        help="of a fine-tuned run: .csv, .tsv or .jsonl, whose rows go to --out with columns "
        "`predicted` and `probability`",
    ),
    _argument(
        "--beam",
        type=int,
        metavar="N",
        help="of a run of task.kind=generate: so many beginnings of a text are kept while it is "
        "searched for [1]",
    ),
    _argument(
        "--out",
        metavar="FILE",
        help="of a fine-tuned run: where answers go as JSON lines [they are printed]; with "
        "--input a .csv, .tsv or .jsonl",
    ),
    _TUNED_BASE,
)
def predict(args: argparse.Namespace) -> int:
    """Do the task of a fine-tuned run; else fill [MASK], and say whether B follows A."""
    from bert_jax.storage import mirror
    from bert_jax.storage.workdir import holds_finetuning

    tuned = holds_finetuning(mirror.opened(args.workdir))
    if tuned:
        given, what = {"--next": args.next, "--top": args.top}, "a fine-tuned run takes no such"
    else:
        given = {
            "--source": args.source or None,
            "--score": args.score or None,
            "--input": args.input,
            "--out": args.out,
            "--beam": args.beam,
            "--from": args.base,
        }
        what = "only a fine-tuned run takes this"
    for flag, value in given.items():
        if value is not None:
            raise InputError(f"{flag}: {args.workdir}: {what}; leave it out")
    return _do_task(args) if tuned else _fill_masks(args)


def _do_task(args: argparse.Namespace) -> int:
    from bert_jax.tasks import predict as predict_lib
    from bert_jax.training.environment import keep_compiled_programs

    if args.beam is not None and not 1 <= args.beam <= _MOST_BEAMS:
        raise InputError(f"--beam {args.beam}: must be from 1 to {_MOST_BEAMS}")
    if args.text and (args.source or args.score):
        raise InputError("TEXT: --source and --score read examples elsewhere; leave it out")
    if args.input is not None:
        if args.text or args.source or args.score or args.out is None:
            raise InputError("--input: needs --out, and no TEXT, --source or --score")
        keep_compiled_programs()
        written = predict_lib.predict_table(
            args.workdir, args.base, args.checkpoint, args.input, args.out, args.beam
        )
        _say(f"{printable(args.out)}: {printable(written)}")
        return FINISHED
    keep_compiled_programs()
    for line in predict_lib.predict(
        args.workdir,
        args.base,
        args.checkpoint,
        args.text or _input_lines(),
        tuple(args.source),
        "score" if args.score else "predict",
        args.out,
        args.beam,
    ):
        print(line)
    return FINISHED


def _fill_masks(args: argparse.Namespace) -> int:
    from etils import epath

    from bert_jax.predict import Trained
    from bert_jax.text.unknown import Share
    from bert_jax.training.environment import keep_compiled_programs
    from bert_jax.training.evaluators import Predictor

    top = 5 if args.top is None else args.top
    if args.next is not None and len(args.text) != 1:
        raise InputError("--next: give exactly one TEXT with it")
    if top < 1:
        raise InputError(f"--top {top}: must be at least 1")
    keep_compiled_programs()
    trained = Trained.of(epath.Path(args.workdir), which=args.checkpoint)
    if trained.experiment is not None and "masked_lm" in trained.fresh:
        raise InputError(
            f"{args.workdir}: its objective ({trained.experiment.data.code}) trained no masked_lm "
            "head; `bert-jax embed` and `finetune` take its encoder"
        )
    predictor = Predictor(trained.model, trained.tokenizer)
    share = Share(trained.tokenizer)
    asked = [("TEXT", text, args.next) for text in args.text]
    for where, a, b in asked or _asked_lines():
        try:
            answer = predictor.predict(trained.params, a, b, top)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        for text in (a,) if b is None else (a, b):
            share.add([predictor.encode(text)])
            print(printable(text))
        for number, pieces in enumerate(answer.masks, 1):
            words = "  ".join(f"{printable(piece)} {p:.3f}" for piece, p in pieces)
            print(f"  [MASK] {number}: {words}")
        if not answer.masks and answer.is_next is None:
            print("  nothing to say: write [MASK] in the text, or give a second one")
        if answer.is_next is not None:
            print(f"  B follows A: {answer.is_next:.3f}")
    if warning := share.warning("the text"):
        print(warning, file=sys.stderr)
    return FINISHED


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers as in -4,-3,-2,-1") from error


# Which vectors `embed` and `serve` give.
_FEATURES = (
    _argument(
        "--layers",
        metavar="N[,N...]",
        type=_layers,
        default=(-1,),
        help="0 the embeddings, 1 the first layer, -1 the last [-1]",
    ),
    _argument(
        "--combine",
        choices=("concat", "mean"),
        default="concat",
        help="what is done with vectors of several layers [concat]",
    ),
    _flag("--normalize", "vectors of length 1"),
    _argument(
        "--max-length",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a text that are read; longer texts are cut [all positions of the model]",
    ),
    _argument(
        "--batch-tokens",
        type=int,
        default=0,
        metavar="N",
        help="that a device works on at a time [512 on a CPU, 16384 elsewhere]",
    ),
    _CHECKPOINT,
)


@_command(
    _CODE,
    _argument(
        "texts",
        metavar="TEXT_FILE",
        nargs="*",
        help="a text a line, also .gz and .zst; left out: standard input. An empty line is a text",
    ),
    _argument("--workdir", metavar="W", required=True, help="a run or a base"),
    _CACHE,
    _argument(
        "--out",
        metavar="FILE",
        required=True,
        help="what is written, a row a line of text: .npz, .parquet or .jsonl",
    ),
    _argument(
        "--pooling",
        choices=("mean", "cls", "tokens"),
        default="mean",
        help="mean of a text's tokens, [CLS] and [SEP] too; the vector of [CLS]; or one of each "
        "piece, without the two [mean]",
    ),
    *_FEATURES,
)
def embed(args: argparse.Namespace) -> int:
    """Write vectors of texts: of each text, or of each of its pieces."""
    from etils import epath

    from bert_jax import embed
    from bert_jax.text import lines

    texts = lines.read(args.texts) if args.texts else _input_lines()
    _, embedder = _embedder(args)
    embed.write(embedder, (line for _, line in texts), epath.Path(args.out), _say)
    return FINISHED


def _embedder(args: argparse.Namespace):
    """The name of the run or base in --workdir, and what gives its vectors."""
    from etils import epath

    from bert_jax import embed
    from bert_jax.predict import Trained
    from bert_jax.training import mesh as mesh_lib
    from bert_jax.training.environment import keep_compiled_programs

    keep_compiled_programs()
    features = embed.Features(
        pooling=args.pooling,
        layers=args.layers,
        combine=args.combine,
        length="unit" if args.normalize else "as_is",
    )
    trained = Trained.of(epath.Path(args.workdir), which=args.checkpoint)
    mesh = mesh_lib.make_mesh(Parallelism())
    embedder = embed.Embedder(trained, features, mesh, args.max_length, args.batch_tokens)
    return trained.name, embedder


@_command(
    _CODE,
    _argument("--workdir", metavar="W", required=True, help="a run, a base or a fine-tuned run"),
    _CACHE,
    _argument(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="the address to listen on; 0.0.0.0 for all, without any password [127.0.0.1]",
    ),
    _argument("--port", type=int, default=8000, metavar="P", help="0: any that is free [8000]"),
    _argument("--pooling", choices=("mean", "cls"), default="mean", help="as for embed [mean]"),
    *_FEATURES,
    _TUNED_BASE,
    _argument(
        "--queue",
        type=int,
        default=256,
        metavar="N",
        help="requests under way at once; one more is answered 503 [256]",
    ),
    _argument("--max-texts", type=int, default=2048, metavar="N", help="of a request [2048]"),
    _argument("--max-bytes", type=int, default=2**21, metavar="N", help="of a request [2 MiB]"),
    _argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds for an answer [30]"
    ),
)
def serve(args: argparse.Namespace) -> int:
    """Answer over HTTP: vectors as OpenAI's clients ask for them, or a fine-tuned run's task."""
    from bert_jax.storage import mirror
    from bert_jax.storage.workdir import holds_finetuning
    from bert_jax.tasks.predict import TaskModel
    from bert_jax.training.environment import keep_compiled_programs

    try:
        from bert_jax import serve as serve_lib
    except ModuleNotFoundError as error:
        raise InputError(
            f"serve: {error.name} is not installed: pip install 'bert-jax[serve]'"
        ) from error

    limits = serve_lib.Limits(args.queue, args.max_texts, args.max_bytes, args.timeout)
    with serve_lib.listening(args.host, args.port) as bound:
        if holds_finetuning(mirror.opened(args.workdir)):
            keep_compiled_programs()
            model = TaskModel(args.workdir, args.base, args.checkpoint)
            served: Any = serve_lib.Answers(model)
        elif args.base is not None:
            raise InputError(f"--from: {args.workdir}: only a fine-tuned run takes this")
        else:
            served = serve_lib.Vectors(*_embedder(args))
        serve_lib.serve(served, bound, limits, _say)
    return FINISHED


@_command(
    _CODE,
    _argument(
        "source",
        metavar="SOURCE",
        help="a folder as save_pretrained writes it, a folder (or files' common beginning) of a "
        "TensorFlow 1 checkpoint with bert_config.json and vocab.txt, or a workdir",
    ),
    _argument("--workdir", metavar="W", required=True, help="where the base goes"),
    _argument(
        "--tokenizer",
        metavar="FILE_OR_FOLDER",
        help="another WordPiece vocabulary: pieces that both have keep their weights",
    ),
    _flag(
        "--with-optimizer",
        "take the moments of bert_adam, too, of a TensorFlow 1 checkpoint or a run: a run with "
        "init_from=B then begins with them, at step 0 of its own schedule",
    ),
)
def import_(args: argparse.Namespace) -> int:
    """Make a base, to start from, of another library's checkpoint or of a run."""
    from etils import epath

    from bert_jax.interop import importing

    source, target = epath.Path(args.source), epath.Path(args.workdir)
    what = "with_moments" if args.with_optimizer else "params"
    importing.import_weights(source, target, args.tokenizer, _say, what)
    return FINISHED


@_command(
    _CODE,
    _argument("--workdir", metavar="W", required=True, help="a run or a base"),
    _CACHE,
    _argument(
        "--as",
        dest="kind",
        choices=("pretraining", "masked_lm", "encoder", "causal_lm", "task", "adapter"),
        help="for BertForPreTraining, BertForMaskedLM, or BertModel and sentence-transformers; of "
        "model.kind=modern for ModernBertForMaskedLM or ModernBertModel; of data.objective=causal "
        "for BertLMHeadModel or ModernBertDecoderForCausalLM. Of a fine-tuned run task, for "
        "BertForSequenceClassification and the like [task], or adapter, what adapt.how=lora "
        "learned, for PEFT",
    ),
    _argument("--out", metavar="FOLDER", required=True, help="where it goes"),
    _argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights [float32, which loses nothing]",
    ),
    _CHECKPOINT,
    _TUNED_BASE,
)
def export(args: argparse.Namespace) -> int:
    """Write a run, a fine-tuned run or a base for transformers."""
    from etils import epath

    from bert_jax.interop import finetuned, huggingface
    from bert_jax.predict import Trained
    from bert_jax.storage import mirror
    from bert_jax.storage.workdir import holds_finetuning
    from bert_jax.tasks.predict import TaskModel

    of_run = ("pretraining", "masked_lm", "encoder", "causal_lm")
    tuned = holds_finetuning(mirror.opened(args.workdir))
    if tuned and args.kind not in of_run:
        model = TaskModel(args.workdir, args.base, args.checkpoint)
        form = args.kind or "task"
        architecture = finetuned.export(model, form, args.dtype, epath.Path(args.out))
        name, step = model.experiment.name, model.step
        if form == "adapter":
            architecture = f"adapter over {architecture}"
    else:
        if args.kind not in of_run:
            given = ":" if args.kind is None else f" {args.kind}: {args.workdir} is not fine-tuned;"
            raise InputError(f"--as{given} choose {', '.join(of_run[:-1])} or {of_run[-1]}")
        if args.base is not None and not tuned:
            raise InputError(f"--from: {args.workdir}: only a fine-tuned run takes this")
        trained = Trained.of(epath.Path(args.workdir), which=args.checkpoint)
        huggingface.export_weights(trained, args.kind, args.dtype, epath.Path(args.out))
        architecture = huggingface.architecture_of(trained.model, args.kind)
        name, step = trained.name, trained.step
    _say(
        f"exported {printable(name)}, step {step}: {architecture}, {args.dtype}, "
        f"in {printable(args.out)}"
    )
    return FINISHED


@_command(
    _argument(
        "path",
        metavar="PATH",
        help="a run's workdir, a corpus folder, a file or folder of .txt or .jsonl, or an "
        "EXPERIMENT, whose sources are looked at",
    ),
    _set("EXPERIMENT", "corpus.sources=text:my_folder"),
    _CACHE,
    codes={FAILED: "a problem was found, or failure"},
)
def doctor(args: argparse.Namespace) -> int:
    """Look for what is wrong with text, a prepared corpus or a run."""
    from bert_jax import doctor

    problems = doctor.print_findings(doctor.examine(args.path, args.set))
    return FAILED if problems else FINISHED


@_command(
    _EXPERIMENT,
    _argument(
        "--workdir",
        metavar="W",
        help="where its runs live; made again if it is there [runs/NAME-verify]",
    ),
    _set(),
    _CACHE,
    _argument("--rounds", type=int, default=20, metavar="N", help="kills [20]"),
    _argument(
        "--seed", type=int, default=0, metavar="S", help="draws the steps at which they come [0]"
    ),
    codes={FAILED: "a run that was killed differs from one that was not, or failure"},
)
def verify_resume(args: argparse.Namespace) -> int:
    """Kill the run at random moments and prove that it goes on as if nothing had happened."""
    from etils import epath

    from bert_jax.verify import command

    experiment = config.override(config.load(args.experiment), args.set)
    root = epath.Path(args.workdir or f"runs/{experiment.name}-verify")
    differences = command.verify(experiment, root, args.rounds, args.seed, _say)
    return FAILED if differences else FINISHED


@_command(
    _SAVED_EXPERIMENT,
    _WORKDIR,
    _set(),
    codes={FAILED: "a rule of the reference is broken, or failure"},
)
def conformance(args: argparse.Namespace) -> int:
    """Check the reference's rules; name an EXPERIMENT's own."""
    named = args.experiment or args.workdir or args.set
    experiment = _experiment(args)[0] if named else None
    return FINISHED if conformance_command.print_rules(experiment) else FAILED


_command(conformance_command.add_instance_arguments, name="conformance instances")(
    conformance_command.write_instances
)


@_command(
    _argument(
        "--tokenizer", metavar="FILE_OR_FOLDER", required=True, help="vocab.txt, .model or folder"
    ),
    _flag("--cased", "for a file: do not lower-case"),
)
def tokenize(args: argparse.Namespace) -> int:
    """Lines of text from standard input to lines of ids."""
    from bert_jax.text import tokenizer

    tok = tokenizer.load(args.tokenizer, "cased" if args.cased else "uncased")
    for _, line in _input_lines():
        print(" ".join(map(str, tok.encode(line))))
    return FINISHED


@_command(_argument("words", metavar="NAME ...", nargs="*", help="see bert-jax launch --help"))
def launch(args: argparse.Namespace) -> int:
    """Start a run in several processes, here or on rented machines."""
    from bert_jax.launch.__main__ import main as launch_main

    return launch_main(args.words)


# --- What commands share ---


def _experiment(args: argparse.Namespace, access: Literal["read", "write"] = "read"):
    """The experiment that the arguments name, and its workdir; see mirror.opened."""
    if args.experiment is None:
        experiment = _saved_experiment(args, Experiment)
    else:
        experiment = config.override(config.load(args.experiment), args.set)
    return experiment, _workdir(args, experiment, access)


def _saved_experiment(args: argparse.Namespace, kind: type[T]) -> T:
    """The experiment that the run in --workdir was started with, and what --set says."""
    from bert_jax.storage import mirror
    from bert_jax.storage.workdir import load_experiment

    if not args.workdir:
        raise InputError("name an EXPERIMENT, or the --workdir of a run")
    return config.override(load_experiment(mirror.opened(args.workdir), kind), args.set)


def _workdir(args: argparse.Namespace, experiment: Experiment, access: Literal["read", "write"]):
    from bert_jax.storage import mirror

    root = args.workdir or f"runs/{experiment.name}"
    return mirror.opened(root, experiment.run.corpus_dir, access)


def _input_lines() -> Iterator[tuple[str, str]]:
    """(where, line) of standard input."""
    from bert_jax.text import lines

    return lines.decoded(sys.stdin.buffer, "standard input")


def _asked_lines() -> Iterator[tuple[str, str, str | None]]:
    """(where, A, B) of the lines of standard input that hold something."""
    for where, line in _input_lines():
        a, tab, b = line.partition("\t")
        if line.strip():
            yield where, a, b if tab else None


def _say(line: str) -> None:
    print(line, flush=True)


# --- From words to a command ---


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, and whose help ends with the fields of `--set`."""

    fields: type[Section] | None = None

    def error(self, message: str) -> NoReturn:
        """Leaves with exit code 2."""
        self.exit(errors.BAD_INPUT, f"bert-jax: {printable(message)}; see {self.prog} --help\n")

    def format_help(self) -> str:
        """Returns the help; the fields are read from their source only where it is asked for."""
        text = super().format_help()
        return text if self.fields is None else f"{text}\n{explain.fields(self.fields)}\n"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each sets `command`, its function, and `usage_error`."""
    whole = _Parser(
        prog="bert-jax",
        description="Plain text in, a pre-trained BERT out.",
        epilog=errors.exit_codes(errors.CODES_OF_RUNS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--debug", action="store_true", help="show the tracebacks of errors")
    whole.add_argument("--version", action="version", version=f"bert-jax {__version__}")
    subparsers = whole.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        what = (command.function.__doc__ or "").split("\n")[0]
        sub = subparsers.add_parser(
            name,
            help=what[0].lower() + what[1:].removesuffix("."),
            description=what,
            epilog=errors.exit_codes(command.codes),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.fields = command.fields
        sub.set_defaults(command=command.function, usage_error=sub.error)
        sub.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,  # else it would take back one given before the command
            help="show the tracebacks of errors",
        )
        for add in command.arguments:
            add(sub)
    return whole


def _words(argv: Sequence[str]) -> list[str]:
    """Returns the words as `argparse` needs them; a mistyped command is answered here.

    `conformance instances` becomes one word, and so does `--layers -4,-3`, whose value looks like a
    flag.
    """
    words: list[str] = []
    for word in argv:
        words[-1:] = [f"--layers={word}"] if words[-1:] == ["--layers"] else [*words[-1:], word]
    first = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    if words[first : first + 2] == ["conformance", "instances"]:
        words[first : first + 2] = ["conformance instances"]
    for word in words[first : first + 1]:
        if word not in COMMANDS:
            near = difflib.get_close_matches(word, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
            raise InputError(f"{word}: no such command; {hint}")
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a usage error leaves by SystemExit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal speaks UTF-8
    debug = False
    try:
        words = _words(sys.argv[1:] if argv is None else argv)
        if words[:1] == ["launch"]:  # which has a parser of its own
            return launch(argparse.Namespace(words=words[1:]))
        args, unknown = parser().parse_known_args(words)
        if unknown:
            args.usage_error(f"unrecognized arguments: {' '.join(unknown)}")
        debug = args.debug
        if getattr(args, "cache_dir", None):
            # For this process and those it starts: where things lie here is no part of a config.
            os.environ["BERT_JAX_CACHE_DIR"] = os.path.abspath(args.cache_dir)
        if getattr(args, "code", None):
            name_file(args.code)
        code = args.command(args)
        if getattr(args, "code", None) and code == FINISHED and not was_used(args.code):
            print(
                f"--code {printable(args.code)}: nothing asked for it; leave it out",
                file=sys.stderr,
            )
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if debug and isinstance(error, Exception):
            raise
        return _report(error)


def _report(error: BaseException) -> int:
    """Prints in one line what is at fault; returns the exit code."""
    if isinstance(error, OSError):
        kind: type[Exception] = InputError
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = errors.DiskFull
            if error.filename is None:  # all other files are named where they are written
                error.filename = "standard output"
                _drop_output()
        if error.filename is not None:
            error = kind(f"{error.filename}: {error.strerror}")
    line, code = errors.of_error(error)
    print(line, file=sys.stderr)
    return code


def _drop_output() -> None:
    """Sends output nowhere: nobody takes it, and the interpreter must not write to it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
