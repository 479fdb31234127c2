"""The commands that use trained models."""

import argparse
import sys
import typing
from collections.abc import Iterator, Sequence

from etils import epath

from bert_jax.cli import shared
from bert_jax.cli.loading import (
    load_model,
    open_run_or_base,
    print_now,
    read_input_lines,
    reject_flags_unless_finetuned,
    require_writable_path,
)
from bert_jax.cli.parsing import (
    Argument,
    CommandTable,
    find_changed_flags,
    integer,
    number,
    reject_flags,
)
from bert_jax.config import Finetuning, Parallelism
from bert_jax.errors import FINISHED, InputError, prefix_errors, printable
from bert_jax.storage.workdir import Workdir, holds_finetuning, load_experiment

if typing.TYPE_CHECKING:
    from bert_jax.embeddings.embed import Embedder
    from bert_jax.embeddings.search import SearchHit
    from bert_jax.pretraining.loaded_model import LoadedModel
    from bert_jax.tasks.finetuned_model import TaskModel

COMMANDS = CommandTable()

_PREVIEW_CHARACTERS = 200  # `search` prints at most this many characters of a text


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
    *shared.COLUMNS,
    *shared.MODEL_FLAGS,
)
def predict(args: argparse.Namespace) -> int:
    """Predicts with a fine-tuned run, or fills [MASK]."""
    require_writable_path("--out", args.out)
    run = open_run_or_base(args.workdir)
    if holds_finetuning(run):
        reject_flags(args, ("--next", "--top"), f"{run.address}: no fine-tuned run takes this")
        return _predict_finetuned(run, args)
    flags = ("--source", "--score", "--input", "--out", "--beam", *shared.COLUMN_FLAGS)
    reject_flags_unless_finetuned(run, args, *flags)
    return _fill_masks(run, args)


def _predict_finetuned(run: Workdir, args: argparse.Namespace) -> int:
    from bert_jax.running.environment import enable_compilation_cache
    from bert_jax.tasks import predict as predict_lib
    from bert_jax.tasks.finetuned_model import TaskModel

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
    from bert_jax.text.vocabulary import MASK

    encode = Predictor(model.model, model.tokenizer).encode
    unknown = UnknownShare(model.tokenizer)
    inputs = [("TEXTS", text, args.next) for text in args.texts]
    for where, a, b in inputs or _read_pairs():
        with prefix_errors(where):
            if model.head is not None and MASK not in f"{a} {b}":
                kinds = model.head.kinds
                raise InputError(
                    f"{args.workdir}: predict cannot use the imported task head of this base; "
                    "write [MASK] in the text, or fine-tune the head with `bert-jax finetune "
                    f"--kind {kinds[0]} --from {args.workdir} ...` and pass that run as --workdir"
                )
            answer = model.fill(a, b, args.top or 5)
        for text in (a,) if b is None else (a, b):
            unknown.add([encode(text)])
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
    for where, line in read_input_lines():
        a, tab, b = line.partition("\t")
        if line.strip():
            yield where, a, b if tab else None


@COMMANDS.add(
    "embed",
    "write vectors of texts, or of their tokens",
    Argument(
        "text_file",
        metavar="TEXT_FILE",
        help="files with a text on each line, also compressed (.gz, .zst, .bz2, .xz); empty "
        "lines are embedded too [standard input]",
        nargs="*",
    ),
    Argument(
        "--out",
        metavar="FILE",
        help="file to write, a row for each text: .npz, .parquet or .jsonl",
        required=True,
    ),
    Argument(
        "--pooling",
        help="mean: mean of all tokens, including [CLS] and [SEP]; cls, last: the vector of [CLS] "
        "or of the last token; tokens: a vector for each token except [CLS] and [SEP] [as in the "
        "run or base, else mean]",
        choices=("mean", "cls", "last", "tokens"),
    ),
    Argument(
        "--role",
        help="role of the texts, for an encoder with a prompt for each role [document]",
        # "text" is the former name of the role.
        type=lambda word: "document" if word == "text" else word,
        choices=("document", "query"),
        default="document",
    ),
    Argument(
        "--quantize",
        help="write one byte or one bit for each number, and print the quantization error [none]",
        choices=("none", "int8", "binary"),
        default="none",
    ),
    *shared.VECTORS,
    shared.NORMALIZE,
    shared.RUN_OR_BASE,
    *shared.MODEL_FLAGS,
)
def embed(args: argparse.Namespace) -> int:
    """Writes vectors of texts, or of their tokens."""
    require_writable_path("--out", args.out)
    run = open_run_or_base(args.workdir)
    from bert_jax.embeddings import embed as embed_lib
    from bert_jax.text import line_reader

    lines = line_reader.read(args.text_file) if args.text_file else read_input_lines()
    _, embedder = _load_embedder(run, args, args.normalize)
    embed_lib.write(embedder, lines, epath.Path(args.out), print_now, args.role, args.quantize)
    return FINISHED


def _load_embedder(
    run: Workdir, args: argparse.Namespace, normalize: bool | None
) -> "tuple[LoadedModel, Embedder]":
    """Returns the model of a run or base and its embedder.

    `normalize`: whether vectors are scaled to length 1; None: as in the run or base.
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
    model = load_model(run, args)
    mesh = mesh_lib.make_mesh(Parallelism())
    return model, embed.Embedder(model, features, mesh, args.max_length, args.batch_tokens)


@COMMANDS.add(
    "search",
    "find the texts of a file that are nearest to a query, by the cosine of their vectors",
    Argument(
        "text_file",
        metavar="TEXT_FILE",
        help="a file with a text on each line, also compressed; empty lines are skipped",
    ),
    Argument("query", metavar="QUERY", help="queries [lines of standard input]", nargs="*"),
    Argument(
        "--queries", metavar="FILE", help="take each line of this file as a query; needs --out"
    ),
    Argument(
        "--out", metavar="FILE", help="with --queries: file to write, a JSON line for each query"
    ),
    Argument(
        "--top", metavar="K", help="number of texts to find [10]", type=integer(1), default=10
    ),
    Argument(
        "--long-texts",
        "--long",
        help="index only the beginning of a text that is too long for the encoder, or all its "
        "passages [beginning]",
        choices=("beginning", "passages"),
        default="beginning",
    ),
    Argument(
        "--vectors",
        metavar="FOLDER",
        help="where the vectors of TEXT_FILE are kept, so that they are computed once "
        "[TEXT_FILE.vectors]",
    ),
    Argument(
        "--rerank",
        metavar="RUN",
        help="a run of task.kind=rank, which sorts the nearest texts again and gives their scores",
    ),
    Argument(
        "--candidates",
        metavar="K",
        help="with --rerank: number of texts to sort again [100]",
        type=integer(1),
        default=100,
    ),
    shared.POOLING,
    *shared.VECTORS,
    shared.RUN_OR_BASE,
    *shared.MODEL_FLAGS,
)
def search(args: argparse.Namespace) -> int:
    """Finds the texts that are nearest to queries."""
    if (args.queries is None) != (args.out is None):
        raise InputError("--queries and --out: give both or neither")
    if args.queries is not None and args.query:
        raise InputError("QUERY: --queries reads them from a file; remove QUERY")
    if "://" in args.text_file and args.vectors is None:
        raise InputError(f"{args.text_file}: is in a bucket; name a local folder with --vectors")
    require_writable_path("--out", args.out)
    run = open_run_or_base(args.workdir)
    reranker = _load_reranker(args.rerank)
    from bert_jax.embeddings import search as search_lib

    folder = epath.Path(args.vectors or f"{args.text_file}.vectors")
    model, embedder = _load_embedder(run, args, True)
    index = search_lib.Index(args.text_file, folder, model, embedder, print_now, args.long_texts)

    def find(queries: Sequence[str]) -> "list[list[SearchHit]]":
        if reranker is None:
            return index.nearest(queries, args.top)
        from bert_jax.tasks import rank

        found = index.nearest(queries, max(args.candidates, args.top))
        return rank.rerank(reranker, queries, found, args.top)

    if args.queries is not None:
        search_lib.answer_file(find, args.queries, epath.Path(args.out))
        return FINISHED
    for query in args.query or (line for _, line in read_input_lines()):
        print(printable(query))
        for answer in find([query])[0]:
            preview = printable(answer.text[:_PREVIEW_CHARACTERS])
            print(f"  {answer.score:.3f}  line {answer.line}: {preview}")
    return FINISHED


def _load_reranker(root: str | None) -> "TaskModel | None":
    """Returns the model of a run of task.kind=rank; None without a path."""
    if root is None:
        return None
    run = open_run_or_base(root)
    kind = load_experiment(run, Finetuning).task.kind if holds_finetuning(run) else "none"
    if kind != "rank":
        raise InputError(f"--rerank {root}: has task.kind={kind}; name a run of task.kind=rank")
    from bert_jax.tasks.finetuned_model import TaskModel

    return TaskModel(run)


@COMMANDS.add(
    "serve",
    "serve vectors (OpenAI-compatible API) or predictions of a fine-tuned run over HTTP",
    Argument("--workdir", metavar="W", help="a run, a base or a fine-tuned run", required=True),
    Argument(
        "--host",
        metavar="H",
        help="address to listen on; 0.0.0.0: all interfaces. There is no authentication "
        "[127.0.0.1]",
        default="127.0.0.1",
    ),
    Argument(
        "--port",
        metavar="P",
        help="port to listen on; 0: any free port [8000]",
        type=integer(0, 65535),
        default=8000,
    ),
    Argument(
        "--queue",
        metavar="N",
        help="maximum number of pending requests; further ones are answered 503 [256]",
        type=integer(64, 65536),
        default=256,
    ),
    Argument(
        "--max-texts",
        metavar="N",
        help="maximum number of texts in a request [2048]",
        type=integer(1, 65536),
        default=2048,
    ),
    Argument(
        "--max-bytes",
        metavar="N",
        help="maximum number of bytes in a request [2097152]",
        type=integer(1024, 1 << 30),
        default=2 << 20,
    ),
    Argument(
        "--max-windows",
        "--max-rows",
        metavar="N",
        help="maximum number of windows into which the context of a question is split [128]",
        type=integer(1, 65536),
        default=128,
    ),
    Argument(
        "--timeout",
        metavar="S",
        help="maximum number of seconds for an answer [30]",
        type=number(1, 3600),
        default=30.0,
    ),
    shared.POOLING,
    *shared.VECTORS,
    shared.NORMALIZE,
    *shared.MODEL_FLAGS,
)
def serve(args: argparse.Namespace) -> int:
    """Serves vectors or a fine-tuned run's task over HTTP."""
    run = open_run_or_base(args.workdir)
    reject_flags_unless_finetuned(run, args)
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
        task = TaskModel(run, args.base, args.checkpoint) if holds_finetuning(run) else None
        if task is not None and task.kind.reads != "vectors":
            reject_flags(args, shared.VECTOR_FLAGS, f"{args.workdir}: this run makes no vectors")
            endpoint = endpoints.PredictEndpoint(task)
        else:
            model, embedder = _load_embedder(run, args, args.normalize)
            endpoint = endpoints.EmbedEndpoint(model.name, embedder)
        service.serve(endpoint, listener, limits, print_now)
    return FINISHED
