"""The commands that use trained models."""

import argparse
import sys
import typing
from collections.abc import Iterator

from etils import epath

from bert_jax.cli import shared
from bert_jax.cli.loading import (
    ONLY_FINETUNED_REASON,
    get_column_fields,
    load_model,
    open_run_or_base,
    print_now,
    read_lines,
    reject_flags,
    require_file_path,
)
from bert_jax.cli.parsing import Command, Parser, integer, number
from bert_jax.config import Parallelism
from bert_jax.errors import FINISHED, InputError, prefix_errors, printable
from bert_jax.storage.workdir import Workdir, holds_finetuning

if typing.TYPE_CHECKING:
    from bert_jax.embeddings.embed import Embedder
    from bert_jax.pretraining.loaded_model import LoadedModel

_PREVIEW_CHARACTERS = 200  # maximum number that `search` prints of a text


def _add_predict_arguments(parser: Parser) -> None:
    parser.add_argument(
        "texts",
        metavar="TEXTS",
        nargs="*",
        help="texts with [MASK]; of a fine-tuned run, texts of examples [lines of standard "
        "input, tabs between texts]",
    )
    parser.add_argument(
        "--workdir", metavar="W", required=True, help="a run, a base or a fine-tuned run"
    )
    parser.add_argument(
        "--next", metavar="B", help="second text: print the probability that it follows"
    )
    parser.add_argument(
        "--top", metavar="K", type=integer(1), help="tokens to print for each [MASK] [5]"
    )
    parser.add_argument(
        "--source",
        metavar="SOURCE",
        action="append",
        default=[],
        help="fine-tuned run: predict for the examples of a file, written as in task.train, e.g. "
        "tsv:FILE; may be repeated",
    )
    parser.add_argument(
        "--score",
        action="store_true",
        help="fine-tuned run: print scores instead of predictions, by default on task.validation",
    )
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="fine-tuned run: a .csv, .tsv or .jsonl to predict for; its lines go to --out with a "
        "column `predicted`, and `probability` if the predictions are labels",
    )
    parser.add_argument(
        "--beam",
        metavar="N",
        type=integer(1, 64),
        help="task.kind=generate: width of the beam search; 1: greedy decoding [1]",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="fine-tuned run: file to write predictions to, as JSON lines [standard output]; with "
        "--input a .csv, .tsv or .jsonl",
    )


def predict(args: argparse.Namespace) -> int:
    """Predicts with a fine-tuned run, or fills [MASK]."""
    require_file_path("--out", args.out)
    run = open_run_or_base(args.workdir)
    if holds_finetuning(run):
        flags = {"--next": args.next, "--top": args.top}
        reject_flags(run, "no fine-tuned run takes this", flags)
        return _predict_finetuned(run, args)
    names = ("source", "score", "input", "out", "beam", *shared.COLUMN_FIELDS)
    flags = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    reject_flags(run, ONLY_FINETUNED_REASON, {**flags, "--from": args.base})
    return _fill_masks(run, args)


def _predict_finetuned(run: Workdir, args: argparse.Namespace) -> int:
    from bert_jax.running.environment import enable_compilation_cache
    from bert_jax.tasks import predict as predict_lib

    if args.texts and (args.source or args.score):
        raise InputError("TEXTS: cannot be combined with --source or --score; remove TEXTS")
    if args.input is not None and (args.texts or args.source or args.score or args.out is None):
        raise InputError("--input: needs --out, and no TEXTS, --source or --score")
    columns = get_column_fields(args)
    if columns and not (args.source or args.score or args.input):
        flag = next(flag for flag, field in shared.COLUMN_FIELDS.items() if field in columns)
        flag = flag.replace("_", "-")
        raise InputError(f"--{flag}: describes a file; name one with --source or --input")
    enable_compilation_cache()
    model = predict_lib.TaskModel(run, args.base, args.checkpoint, args.beam, columns)
    if args.input is not None:
        summary = predict_lib.predict_table(model, args.input, args.out)
        print_now(f"{printable(args.out)}: {printable(summary)}")
        return FINISHED
    # All texts of the command line, or a (location, line) pair for each example.
    texts = args.texts or read_lines()
    mode = "score" if args.score else "predict"
    for line in predict_lib.predict(model, texts, tuple(args.source), mode, args.out):
        print(line)
    return FINISHED


def _fill_masks(run: Workdir, args: argparse.Namespace) -> int:
    if args.next is not None and len(args.texts) != 1:
        raise InputError("--next: give exactly one text with it")
    model = load_model(run, args.base, args.checkpoint)
    from bert_jax.pretraining.evaluators import Predictor
    from bert_jax.text.tokenizer import UnknownShare
    from bert_jax.text.vocabulary import MASK

    predictor = Predictor(model.model, model.tokenizer)  # tokenizes, to count unknown tokens
    unknown = UnknownShare(model.tokenizer)
    inputs = [("TEXTS", text, args.next) for text in args.texts]
    for where, a, b in inputs or _read_pairs():
        with prefix_errors(where):
            if model.head is not None and MASK not in f"{a} {b}":
                kinds = model.head.kinds
                raise InputError(
                    f"{args.workdir}: predict cannot use the imported task head of this base; "
                    "write [MASK] in the text, or fine-tune the head with `bert-jax finetune "
                    f"--kind {kinds[0]} --from {args.workdir} ...` and name that run"
                )
            answer = model.fill(a, b, args.top or 5)
        for text in (a,) if b is None else (a, b):
            unknown.add([predictor.encode(text)])
            print(printable(text))
        for position, tokens in enumerate(answer.masks, 1):
            words = "  ".join(f"{printable(token)} {p:.3f}" for token, p in tokens)
            print(f"  [MASK] {position}: {words}")
        if not answer.masks and answer.is_next is None:
            print("  nothing to predict: write [MASK] in the text, or give a second text")
        if answer.is_next is not None:
            print(f"  B follows A: {answer.is_next:.3f}")
    if warning := unknown.warning("the text"):
        print(warning, file=sys.stderr)
    return FINISHED


def _read_pairs() -> Iterator[tuple[str, str, str | None]]:
    """Yields (where, A, B) of the lines of standard input that are not empty."""
    for where, line in read_lines():
        a, tab, b = line.partition("\t")
        if line.strip():
            yield where, a, b if tab else None


def _add_embed_arguments(parser: Parser) -> None:
    parser.add_argument(
        "text_file",
        metavar="TEXT_FILE",
        nargs="*",
        help="files with a text on each line, also compressed (.gz, .zst, .bz2, .xz); empty "
        "lines are embedded too [standard input]",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        required=True,
        help="file to write, a row for each text: .npz, .parquet or .jsonl",
    )
    parser.add_argument(
        "--pooling",
        choices=("mean", "cls", "last", "tokens"),
        help="mean: mean of all tokens, including [CLS] and [SEP]; cls, last: the vector of [CLS] "
        "or of the last token; tokens: a vector for each token except [CLS] and [SEP] [as in the "
        "run or base, else mean]",
    )
    parser.add_argument(
        "--role",
        type=lambda word: "document" if word == "text" else word,  # `text` is the old name
        choices=("document", "query"),
        default="document",
        help="role of the texts, for an encoder with a prompt for each role [document]",
    )
    parser.add_argument(
        "--quantize",
        choices=("none", "int8", "binary"),
        default="none",
        help="write one byte or one bit for each number, and print the quantization error [none]",
    )


def embed(args: argparse.Namespace) -> int:
    """Writes vectors of texts, or of their tokens."""
    require_file_path("--out", args.out)
    run = open_run_or_base(args.workdir)
    from bert_jax.embeddings import embed as embed_lib
    from bert_jax.text import line_reader

    located_lines = line_reader.read(args.text_file) if args.text_file else read_lines()
    _, embedder = _load_embedder(run, args, args.normalize)
    # For each file that has been opened: the number of texts before it, and its name.
    starts: list[tuple[int, str]] = []

    def read_texts() -> Iterator[str]:
        for index, (where, line) in enumerate(located_lines):
            file, _, line_number = where.rpartition(":")
            if line_number == "1":
                starts.append((index, file))
            yield line

    def name_text(number: int) -> str:
        """Returns FILE:LINE for error messages; `number` counts texts from 1 over all files."""
        first, file = max(start for start in starts if start[0] < number)
        return f"{file}:{number - first}"

    out = epath.Path(args.out)
    embed_lib.write(embedder, read_texts(), out, print_now, args.role, args.quantize, name_text)
    return FINISHED


def _load_embedder(
    run: Workdir, args: argparse.Namespace, normalize: bool | None
) -> "tuple[LoadedModel, Embedder]":
    """Returns the model of a run or base and its embedder.

    Args:
      run: the workdir that `open_run_or_base` returned.
      args: the arguments, with --pooling and those of `shared.VECTORS`.
      normalize: whether vectors are scaled to length 1; None: as in the run or base.
    """
    from bert_jax.embeddings import embed
    from bert_jax.training import mesh as mesh_lib

    features = embed.Features(
        pooling=args.pooling,
        layers=args.layers,
        combine=args.combine,
        normalize=normalize,
        dimensions=args.dimensions,
    )
    model = load_model(run, args.base, args.checkpoint)
    mesh = mesh_lib.make_mesh(Parallelism())
    return model, embed.Embedder(model, features, mesh, args.max_length, args.batch_tokens)


def _add_search_arguments(parser: Parser) -> None:
    parser.add_argument(
        "texts",
        metavar="TEXT_FILE",
        help="a file with a text on each line, also compressed; empty lines are skipped",
    )
    parser.add_argument(
        "query", metavar="QUERY", nargs="*", help="queries [lines of standard input]"
    )
    parser.add_argument(
        "--queries", metavar="FILE", help="take each line of this file as a query; needs --out"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="with --queries: file to write, a JSON line for each query"
    )
    parser.add_argument(
        "--top", metavar="K", type=integer(1), default=10, help="number of texts to find [10]"
    )
    parser.add_argument(
        "--long-texts",
        "--long",
        choices=("beginning", "passages"),
        default="beginning",
        help="index only the beginning of a text that is too long for the encoder, or all its "
        "passages [beginning]",
    )
    parser.add_argument(
        "--vectors",
        metavar="FOLDER",
        help="where the vectors of TEXT_FILE are kept, so that they are computed once "
        "[TEXT_FILE.vectors]",
    )


def search(args: argparse.Namespace) -> int:
    """Finds the texts that are nearest to queries."""
    if (args.queries is None) != (args.out is None):
        raise InputError("--queries and --out: give both or neither")
    if args.queries is not None and args.query:
        raise InputError("QUERY: --queries reads them from a file; remove QUERY")
    if "://" in args.texts and args.vectors is None:
        raise InputError(f"{args.texts}: is in a bucket; name a local folder with --vectors")
    require_file_path("--out", args.out)
    run = open_run_or_base(args.workdir)
    from bert_jax.embeddings import search as search_lib

    folder = epath.Path(args.vectors or f"{args.texts}.vectors")
    model, embedder = _load_embedder(run, args, True)
    index = search_lib.Index(args.texts, folder, model, embedder, print_now, args.long_texts)
    if args.queries is not None:
        index.answer_file(args.queries, epath.Path(args.out), args.top)
        return FINISHED
    for query in args.query or (line for _, line in read_lines()):
        print(printable(query))
        for answer in index.nearest([query], args.top)[0]:
            preview = printable(answer.text[:_PREVIEW_CHARACTERS])
            print(f"  {answer.score:.3f}  line {answer.line}: {preview}")
    return FINISHED


def _add_serve_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--workdir", metavar="W", required=True, help="a run, a base or a fine-tuned run"
    )
    parser.add_argument(
        "--host",
        metavar="H",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0: all interfaces. There is no authentication "
        "[127.0.0.1]",
    )
    parser.add_argument(
        "--port",
        metavar="P",
        type=integer(0, 65535),
        default=8000,
        help="port to listen on; 0: any free port [8000]",
    )
    parser.add_argument(
        "--queue",
        metavar="N",
        type=integer(64, 65536),
        default=256,
        help="maximum number of pending requests; further ones are answered 503 [256]",
    )
    parser.add_argument(
        "--max-texts",
        metavar="N",
        type=integer(1, 65536),
        default=2048,
        help="maximum number of texts in a request [2048]",
    )
    parser.add_argument(
        "--max-bytes",
        metavar="N",
        type=integer(1024, 1 << 30),
        default=2 << 20,
        help="maximum number of bytes in a request [2097152]",
    )
    parser.add_argument(
        "--max-windows",
        "--max-rows",
        metavar="N",
        type=integer(1, 65536),
        default=128,
        help="maximum number of windows into which the context of a question is split [128]",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=number(1, 3600),
        default=30.0,
        help="maximum number of seconds for an answer [30]",
    )


def serve(args: argparse.Namespace) -> int:
    """Serves vectors or a fine-tuned run's task over HTTP."""
    run = open_run_or_base(args.workdir)
    is_tuned = holds_finetuning(run)
    if not is_tuned:
        reject_flags(run, ONLY_FINETUNED_REASON, {"--from": args.base})
    from bert_jax.running.environment import enable_compilation_cache
    from bert_jax.tasks.finetuned_model import TaskModel

    try:
        from bert_jax.serve import endpoints, service
    except ModuleNotFoundError as error:
        raise InputError(
            f"serve: {error.name} is not installed: pip install 'bert-jax[serve]'"
        ) from error

    limits = endpoints.Limits(
        args.queue, args.max_texts, args.max_bytes, args.timeout, args.max_windows
    )
    with service.listening(args.host, args.port) as listener:
        enable_compilation_cache()
        task = TaskModel(run, args.base, args.checkpoint) if is_tuned else None
        if task is not None and task.kind.reads != "vectors":
            _reject_vector_flags(args)
            endpoint = endpoints.PredictEndpoint(task)
        else:
            model, embedder = _load_embedder(run, args, args.normalize)
            endpoint = endpoints.EmbedEndpoint(model.name, embedder)
        service.serve(endpoint, listener, limits, print_now)
    return FINISHED


def _reject_vector_flags(args: argparse.Namespace) -> None:
    """Raises InputError for the first flag about vectors that was given."""
    defaults = {"pooling": None, "layers": (-1,), "combine": "concat", "normalize": None}
    defaults |= {"dimensions": 0, "max_length": 0, "batch_tokens": 0}
    given = {
        f"--{name.replace('_', '-')}": getattr(args, name)
        for name, default in defaults.items()
        if getattr(args, name) != default
    }
    if given:
        flag = next(iter(given))
        raise InputError(f"{flag}: {args.workdir}: this run makes no vectors; remove {flag}")


COMMANDS = {
    "predict": Command(
        predict,
        "fill [MASK], judge whether a sentence follows, or predict with a fine-tuned run",
        _add_predict_arguments,
        (shared.COLUMNS, *shared.MODEL_FLAGS),
    ),
    "embed": Command(
        embed,
        "write vectors of texts, or of their tokens",
        _add_embed_arguments,
        (shared.VECTORS, shared.NORMALIZE, shared.RUN_OR_BASE, *shared.MODEL_FLAGS),
    ),
    "search": Command(
        search,
        "find the texts of a file that are nearest to a query, by the cosine of their vectors",
        _add_search_arguments,
        (shared.POOLING, shared.VECTORS, shared.RUN_OR_BASE, *shared.MODEL_FLAGS),
    ),
    "serve": Command(
        serve,
        "serve vectors (OpenAI-compatible API) or predictions of a fine-tuned run over HTTP",
        _add_serve_arguments,
        (shared.POOLING, shared.VECTORS, shared.NORMALIZE, *shared.MODEL_FLAGS),
    ),
}
