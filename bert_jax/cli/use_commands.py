"""The command `predict`."""

import argparse
import sys
from collections.abc import Iterator

from bert_jax.cli import shared
from bert_jax.cli.loading import (
    load_model,
    open_run_or_base,
    print_now,
    read_input_lines,
    reject_base_unless_finetuned,
    require_writable_path,
)
from bert_jax.cli.parsing import (
    Argument,
    CommandTable,
    find_changed_flags,
    integer,
    reject_flags,
)
from bert_jax.errors import FINISHED, InputError, prefix_errors, printable
from bert_jax.storage.workdir import Workdir, holds_task

COMMANDS = CommandTable()


@COMMANDS.add(
    "predict",
    "fill [MASK], judge whether a sentence follows, or predict with a fine-tuned run",
    Argument(
        "texts",
        metavar="TEXTS",
        help="texts with [MASK]; for a fine-tuned run, the texts to predict for [standard "
        "input: an example per line, its texts separated by tabs]",
        nargs="*",
    ),
    Argument("--workdir", metavar="W", help="a run, a base or a fine-tuned run", required=True),
    Argument("--next", metavar="B", help="second text: print the probability that it follows"),
    Argument(
        "--top",
        metavar="K",
        help="candidates to print for each [MASK]; 5 by default",
        type=integer(1),
    ),
    Argument(
        "--source",
        metavar="SOURCE",
        help="fine-tuned run: examples to predict for, written as in task.train, e.g. tsv:FILE; "
        "may be repeated",
        action="append",
        default=[],
    ),
    Argument(
        "--score",
        action="store_true",
        help="fine-tuned run: print the metrics on --source [task.validation], not predictions",
    ),
    Argument(
        "--input",
        metavar="FILE",
        help="fine-tuned run: a .csv, .tsv or .jsonl to predict for; --out becomes a copy with a "
        "column `predicted`, and `probability` if the predictions are labels",
    ),
    Argument(
        "--beam",
        metavar="N",
        help="task.kind=generate: width of the beam search; 1: greedy decoding [1]",
        type=integer(1, 64),
    ),
    Argument(
        "--out",
        metavar="FILE",
        help="fine-tuned run: file to write predictions to, as JSON lines [standard output]; with "
        "--input a .csv, .tsv or .jsonl",
    ),
    *shared.COLUMN_ARGUMENTS,
    *shared.MODEL_ARGUMENTS,
)
def predict(args: argparse.Namespace) -> int:
    """Predicts with a fine-tuned run, or fills [MASK]."""
    require_writable_path("--out", args.out)
    run = open_run_or_base(args.workdir)
    if holds_task(run):
        reject_flags(args, ("--next", "--top"), f"{run.address} answers a task")
        reject_base_unless_finetuned(run, args)
        return _predict_finetuned(run, args)
    flags = ("--from", "--source", "--score", "--input", "--out", "--beam", *shared.COLUMN_FLAGS)
    remedy = "fine-tune it, or import a model that has one"
    reject_flags(args, flags, f"{run.address} has no head of a task; {remedy}")
    return _fill_masks(run, args)


def _predict_finetuned(run: Workdir, args: argparse.Namespace) -> int:
    from bert_jax.running.environment import enable_compilation_cache
    from bert_jax.tasks import predict as predict_lib
    from bert_jax.tasks.finetuned_model import TaskModel  # encoder and task head

    if args.texts and (args.source or args.score):
        raise InputError("TEXTS: cannot be combined with --source or --score; remove TEXTS")
    if args.input is not None and (args.texts or args.source or args.score or args.out is None):
        raise InputError("--input: needs --out, and no TEXTS, --source or --score")
    if not (args.source or args.score or args.input):
        for argument in find_changed_flags(args, shared.COLUMN_FLAGS):
            raise InputError(
                f"{argument.names[0]}: describes a file; name one with --source or --input"
            )
    enable_compilation_cache()
    columns = shared.column_fields(args)
    model = TaskModel(run, args.base, args.checkpoint, args.beam, columns)
    if args.input is not None:
        summary = predict_lib.predict_table(model, args.input, args.out)
        print_now(f"{printable(args.out)}: {printable(summary)}")
        return FINISHED
    # The texts of one or more examples, or (location, line) pairs of standard input.
    texts = args.texts or read_input_lines()
    mode = "score" if args.score else "predict"
    for line in predict_lib.predict(model, texts, tuple(args.source), mode, args.out):
        print(line)
    return FINISHED


def _fill_masks(run: Workdir, args: argparse.Namespace) -> int:
    if args.next is not None and len(args.texts) != 1:
        raise InputError("--next: give exactly one text with it")
    model = load_model(run, args)
    from bert_jax.pretraining.loaded_model import Predictor
    from bert_jax.text.tokenizer import UnknownShare

    encode = Predictor(model.model, model.tokenizer).encode
    unknown_share = UnknownShare(model.tokenizer)
    inputs = [("TEXTS", text, args.next) for text in args.texts]
    for where, a, b in inputs or _read_pairs():
        with prefix_errors(where):
            answer = model.fill(a, b, args.top or 5)
        for text in (a,) if b is None else (a, b):
            unknown_share.add([encode(text)])
            print(printable(text))
        for position, tokens in enumerate(answer.masks, 1):
            words = "  ".join(f"{printable(token)} {p:.3f}" for token, p in tokens)
            print(f"  [MASK] {position}: {words}")
        if not answer.masks and answer.is_next is None:
            print("  nothing to predict: write [MASK] in the text, or give a second text")
        if answer.is_next is not None:  # a probability
            print(f"  B follows A: {answer.is_next:.3f}")
    if warning := unknown_share.warning("the text"):
        print(warning, file=sys.stderr)
    return FINISHED


def _read_pairs() -> Iterator[tuple[str, str, str | None]]:
    """Yields (where, A, B) of the lines of standard input that are not empty."""
    for where, line in read_input_lines():
        a, tab, b = line.partition("\t")
        if line.strip():
            yield where, a, b if tab else None
