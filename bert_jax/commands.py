"""The commands: each reads its arguments, calls the library and returns an exit code."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Literal

from bert_jax.config import Experiment, Parallelism
from bert_jax.conformance import command
from bert_jax.errors import FAILED, FINISHED, STOPPED, InputError, printable
from bert_jax.training.objective import Pretraining

# Of runs that end so.
_CODES = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}


def prepare(args: argparse.Namespace) -> int:
    """Make the corpus: tokenizer, ids, splits."""
    from bert_jax.data import corpus

    experiment, workdir = _claim(args, "write")
    workdir.require_ours()
    if args.workers < 1:
        raise InputError(f"--workers {args.workers}: must be at least 1")
    manifest = corpus.prepare(
        experiment.corpus,
        experiment.model.vocab_size,
        workdir.corpus,
        _console_say(),
        args.workers,
        args.beam,
    )
    if args.verify:
        corpus.verify(workdir.corpus)
        _console_say()(f"corpus: every file of {workdir.corpus} is as it was made")
    tokens = manifest["splits"]["train"]["tokens"]
    _console_say()(f"corpus: {workdir.corpus} is ready, {tokens} tokens to train on")
    return FINISHED


def pretrain(args: argparse.Namespace) -> int:
    """Pre-train; run again to go on where it stopped."""
    from bert_jax import config
    from bert_jax.tasks.probes import Probes
    from bert_jax.training import pretraining
    from bert_jax.training.progress import LineConsole, Progress

    experiment, origin = config.load_with_origin(args.experiment, args.set)
    workdir = _workdir(args, experiment, "write")
    progress = Progress(LineConsole())
    extend = "extend" if args.extend else "keep"
    probes = Probes(experiment.run.probes) if experiment.run.probes else None
    outcome = pretraining.pretrain(experiment, workdir, extend, progress, origin, probes)
    return _CODES[outcome]


def finetune(args: argparse.Namespace) -> int:
    """Adapt the encoder of a base or a run to a task; run again to go on where it stopped."""
    from bert_jax import config
    from bert_jax.config import Finetuning
    from bert_jax.tasks import command, sweep
    from bert_jax.training.progress import LineConsole, Progress

    if args.sweep:
        of = sweep.members(args.task, args.set, args.sweep)
        return _CODES[sweep.run(of, args.base, args.workdir, Progress(LineConsole()))]
    claim, origin = config.load_with_origin(args.task, args.set, Finetuning)
    progress = Progress(LineConsole())
    outcome = command.finetune(claim, args.base, args.workdir, progress, origin)
    return _CODES[outcome]


def evaluate(args: argparse.Namespace) -> int:
    """Score a checkpoint on held-out text."""
    from bert_jax.predict import load_params
    from bert_jax.training import evaluators, step
    from bert_jax.training import mesh as mesh_lib
    from bert_jax.training.environment import keep_compiled_programs
    from bert_jax.training.pretraining import Prepared

    keep_compiled_programs()
    experiment, workdir = _claim(args)
    prepared = Prepared.open(workdir.corpus)
    parallelism = Parallelism()  # not the run's own, which is for the devices it was trained on
    mesh = mesh_lib.make_mesh(parallelism)
    params, done = load_params(experiment, workdir, prepared, mesh, args.checkpoint)
    found = evaluators.evaluate(
        prepared.held_out(experiment, mesh),
        params,
        step.make_eval_step(Pretraining(experiment.model), parallelism, mesh),
        mesh,
    )
    print(f"step {done}: {evaluators.summary(found)}")
    print(json.dumps({"step": done, **found}))
    return FINISHED


def show(args: argparse.Namespace) -> int:
    """Decode the batch of a step: text, masks, labels."""
    from rich.console import Console

    from bert_jax import show
    from bert_jax.training.pretraining import Prepared

    experiment, workdir = _claim(args)
    if args.rows < 1:
        raise InputError(f"--rows {args.rows}: must be at least 1")
    console = Console()
    prepared = Prepared.open(workdir.corpus)
    for line in show.show(experiment, prepared, args.step, args.rows):
        console.print(line, soft_wrap=not console.is_terminal)
    return FINISHED


def config(args: argparse.Namespace) -> int:
    """Print the resolved experiment as JSON."""
    from bert_jax import config

    print(config.to_json(_claim(args)[0]), end="")
    return FINISHED


def plan(args: argparse.Namespace) -> int:
    """Compile the steps for TPU pods nobody has booked: what fits, how fast, at what cost."""
    from etils import epath

    from bert_jax.plan import command, topology

    experiment, workdir = _claim(args, "write")
    price = _price(args)
    if args.workdir and args.out:
        raise InputError("--out: the plan goes into --workdir; name one of the two")
    if args.workdir:
        workdir.require_ours()
    command.plan_and_write(
        experiment,
        topology.parse_list(args.topology),
        args.mode,
        price,
        workdir.named / "plan.json" if args.workdir else epath.Path(args.out) if args.out else None,
        _console_say(),
    )
    return FINISHED


def report(args: argparse.Namespace) -> int:
    """Write one HTML page about a run, or about several compared."""
    from bert_jax.report import write

    if args.every < 1:
        raise InputError(f"--every {args.every}: must be at least 1")
    write.write(
        args.workdirs,
        args.out,
        args.every if args.follow else None,
        "events" if args.tensorboard else "page",
        _console_say(),
        _price(args),
    )
    return FINISHED


def _price(args: argparse.Namespace) -> float | None:
    """The price of a chip-hour, if one was given."""
    price = args.price_per_chip_hour
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"--price-per-chip-hour {price:g}: must be a number from 0 on")
    return price


def checkpoints(args: argparse.Namespace) -> int:
    """List a run's checkpoints: steps, sizes, held-out losses."""
    from etils import epath

    from bert_jax.training import checkpoint

    say, folder = _console_say(), epath.Path(args.workdir)
    for line in checkpoint.listing(folder):
        say(line)
    damaged = 0
    for number, why in checkpoint.verify(folder) if args.verify else ():
        say(why or f"step {number}: every array is what was saved")
        damaged += bool(why)
    return FAILED if damaged else FINISHED


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
            "--out": args.out,
            "--from": args.base,
        }
        what = "only a fine-tuned run takes this"
    for flag, value in given.items():
        if value is not None:
            raise InputError(f"{flag}: {args.workdir}: {what}; leave it out")
    return _do_task(args) if tuned else _fill_masks(args)


def _do_task(args: argparse.Namespace) -> int:
    from bert_jax.tasks import command
    from bert_jax.training.environment import keep_compiled_programs

    if args.text and (args.source or args.score):
        raise InputError("TEXT: --source and --score read examples elsewhere; leave it out")
    keep_compiled_programs()
    for line in command.predict(
        args.workdir,
        args.base,
        args.checkpoint,
        args.text or _input_lines(),
        tuple(args.source),
        "score" if args.score else "predict",
        args.out,
    ):
        print(line)
    return FINISHED


def _fill_masks(args: argparse.Namespace) -> int:
    from etils import epath

    from bert_jax.predict import Trained
    from bert_jax.training.environment import keep_compiled_programs
    from bert_jax.training.evaluators import Predictor

    top = 5 if args.top is None else args.top
    if args.next is not None and len(args.text) != 1:
        raise InputError("--next: give exactly one TEXT with it")
    if top < 1:
        raise InputError(f"--top {top}: must be at least 1")
    keep_compiled_programs()
    trained = Trained.of(epath.Path(args.workdir), which=args.checkpoint)
    predictor = Predictor(trained.model, trained.tokenizer)
    asked = [("TEXT", text, args.next) for text in args.text]
    for where, a, b in asked or _asked_lines():
        try:
            answer = predictor.predict(trained.params, a, b, top)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        for text in (a,) if b is None else (a, b):
            print(printable(text))
        for number, pieces in enumerate(answer.masks, 1):
            words = "  ".join(f"{printable(piece)} {p:.3f}" for piece, p in pieces)
            print(f"  [MASK] {number}: {words}")
        if not answer.masks and answer.is_next is None:
            print("  nothing to say: write [MASK] in the text, or give a second one")
        if answer.is_next is not None:
            print(f"  B follows A: {answer.is_next:.3f}")
    return FINISHED


def embed(args: argparse.Namespace) -> int:
    """Write vectors of texts: of each text, or of each of its pieces."""
    from etils import epath

    from bert_jax import embed
    from bert_jax.predict import Trained
    from bert_jax.text import lines
    from bert_jax.training import mesh as mesh_lib
    from bert_jax.training.environment import keep_compiled_programs

    keep_compiled_programs()
    features = embed.Features(
        pooling=args.pooling,
        layers=args.layers,
        combine=args.combine,
        length="unit" if args.normalize else "as_is",
    )
    found = lines.read(args.texts) if args.texts else _input_lines()
    trained = Trained.of(epath.Path(args.workdir), which=args.checkpoint)
    embedder = embed.Embedder(
        trained, features, mesh_lib.make_mesh(Parallelism()), args.max_length, args.batch_tokens
    )
    embed.write(embedder, (line for _, line in found), epath.Path(args.out), _console_say())
    return FINISHED


def import_(args: argparse.Namespace) -> int:
    """Make a base of others' checkpoint, or of a run."""
    from etils import epath

    from bert_jax.interop import importing

    source, target = epath.Path(args.source), epath.Path(args.workdir)
    what = "with_moments" if args.with_optimizer else "params"
    importing.import_weights(source, target, args.tokenizer, _console_say(), what)
    return FINISHED


def export(args: argparse.Namespace) -> int:
    """Write a run or a base for transformers or google-research/bert."""
    from etils import epath

    from bert_jax.interop import exporting, tf1
    from bert_jax.predict import Trained

    if args.kind == "tf1" and args.dtype != "float32":
        raise InputError(f"--dtype {args.dtype}: google-research/bert reads float32; leave it out")
    if args.kind != "tf1" and args.with_optimizer:
        raise InputError("--with-optimizer: only --as tf1 has a place for it")
    what = "with_moments" if args.with_optimizer else "params"
    trained = Trained.of(epath.Path(args.workdir), what, args.checkpoint)
    target = epath.Path(args.out)
    if args.kind == "tf1":
        tf1.write(trained, target)
        form = tf1.DESCRIPTION
    else:
        exporting.export_weights(trained, args.kind, args.dtype, target)
        form = exporting.ARCHITECTURES[args.kind]
    _console_say()(
        f"exported {printable(trained.name)}, step {trained.step}: {form}, {args.dtype}, in "
        f"{printable(args.out)}"
    )
    return FINISHED


def doctor(args: argparse.Namespace) -> int:
    """Look for what is wrong with text, a prepared corpus or a run."""
    from bert_jax import doctor

    problems = doctor.tell(doctor.examine(args.path, args.set))
    return FAILED if problems else FINISHED


def conformance(args: argparse.Namespace) -> int:
    """Check the reference's rules; name an EXPERIMENT's own."""
    named = args.experiment or args.workdir or args.set
    return FINISHED if command.print_rules(_claim(args)[0] if named else None) else FAILED


def verify_resume(args: argparse.Namespace) -> int:
    """Kill the run at random moments and prove that it goes on as if nothing had happened."""
    from etils import epath

    from bert_jax import config
    from bert_jax.verify import command

    experiment = config.override(config.load(args.experiment), args.set)
    root = epath.Path(args.workdir or f"runs/{experiment.name}-verify")
    differences = command.verify(experiment, root, args.rounds, args.seed, _console_say())
    return FAILED if differences else FINISHED


def tokenize(args: argparse.Namespace) -> int:
    """Lines of text from standard input to lines of ids."""
    from bert_jax.text import tokenizer

    tok = tokenizer.load(args.tokenizer, "cased" if args.cased else "uncased")
    for _, line in _input_lines():
        print(" ".join(map(str, tok.encode(line))))
    return FINISHED


# --- what commands share ------------------------------------------------------------------------


def _claim(args: argparse.Namespace, access: Literal["read", "write"] = "read"):
    """The experiment that the arguments name, and its workdir; see mirror.opened."""
    from bert_jax import config
    from bert_jax.storage import mirror
    from bert_jax.storage.workdir import load_experiment

    if args.experiment is not None:
        experiment: Experiment = config.load(args.experiment)
    elif args.workdir:
        experiment = load_experiment(mirror.opened(args.workdir))
    else:
        raise InputError("name an EXPERIMENT, or the --workdir of a run")
    experiment = config.override(experiment, args.set)
    return experiment, _workdir(args, experiment, access)


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


def _console_say() -> Callable[[str], None]:
    return lambda line: print(line, flush=True)
