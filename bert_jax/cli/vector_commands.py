"""The commands that embed, search and rank texts, and the server of vectors and predictions."""

import argparse
import os
import typing
from collections.abc import Sequence

from etils import epath

from bert_jax.cli import shared
from bert_jax.cli.loading import (
    load_model,
    open_run_or_base,
    print_now,
    read_input_lines,
    reject_base_unless_finetuned,
    require_writable_path,
)
from bert_jax.cli.parsing import Argument, CommandTable, integer, number, reject_flags
from bert_jax.config import Parallelism, source_of
from bert_jax.errors import FINISHED, InputError, printable
from bert_jax.process import logger
from bert_jax.storage import copies
from bert_jax.storage.workdir import Workdir, holds_task

if typing.TYPE_CHECKING:
    from bert_jax.embeddings.embed import Embedder
    from bert_jax.embeddings.search import SearchHit
    from bert_jax.pretraining.loaded_model import LoadedModel
    from bert_jax.tasks.finetuned_model import TaskModel

COMMANDS = CommandTable()

_PREVIEW_CHARACTERS = 200  # `search` prints at most this many characters of a text


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
        # "document" was formerly called "text".
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
    *shared.VECTOR_ARGUMENTS,
    shared.NORMALIZE,
    shared.RUN_OR_BASE,
    *shared.MODEL_ARGUMENTS,
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

    options = embed.VectorOptions(
        pooling=args.pooling,
        layers=args.layers,
        combine=args.combine,
        normalize=normalize,
        dimensions=args.dimensions,
    )
    model = load_model(run, args)
    mesh = mesh_lib.make_mesh(Parallelism())
    return model, embed.Embedder(model, options, mesh, args.max_length, args.batch_tokens)


@COMMANDS.add(
    "search",
    "find the texts of a file that are nearest to a query, by their vectors",
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
        help="run or base of task.kind=rank that reranks the results",
    ),
    Argument(
        "--candidates",
        metavar="K",
        help="with --rerank: number of texts to rerank [100]",
        type=integer(1),
        default=100,
    ),
    shared.POOLING,
    *shared.VECTOR_ARGUMENTS,
    shared.RUN_OR_BASE,
    *shared.MODEL_ARGUMENTS,
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
    truncated_texts = embedder.truncated_texts

    def find(queries: Sequence[str]) -> "list[list[SearchHit]]":
        if reranker is None:
            return index.nearest(queries, args.top)
        from bert_jax.tasks import rank

        hits = index.nearest(queries, max(args.candidates, args.top))
        return rank.rerank(reranker, queries, hits, args.top)

    if args.queries is not None:
        search_lib.answer_file(find, args.queries, epath.Path(args.out))
    else:
        for query in args.query or (line for _, line in read_input_lines()):
            print(printable(query))
            for hit in find([query])[0]:
                preview = printable(hit.text[:_PREVIEW_CHARACTERS])
                print(f"  {hit.score:.3f}  line {hit.line}: {preview}")
    if count := embedder.truncated_texts - truncated_texts:
        limit = embedder.token_limit("query")
        logger.warning("truncated to %d tokens: %d of the queries", limit, count)
    return FINISHED


@COMMANDS.add(
    "whiten",
    "make a base whose vectors are whitened, so that cosines of texts tell more",
    Argument(
        "text_file",
        metavar="TEXT_FILE",
        help="files with thousands of texts without labels, one on each line, of the kind that "
        "will be compared [standard input]",
        nargs="*",
    ),
    Argument("--out", metavar="FOLDER", help="folder to write the base to", required=True),
    Argument(
        "--dimensions",
        metavar="N",
        help="how many numbers a new vector has; 0: as many as the model's vectors have [0]",
        type=integer(0),
        default=0,
    ),
    shared.RUN_OR_BASE,
    *shared.MODEL_ARGUMENTS,
)
def whiten(args: argparse.Namespace) -> int:
    """Makes a base whose vectors are whitened."""
    target = epath.Path(args.out)
    copies.require_new_folder(target)
    run = open_run_or_base(args.workdir)
    from bert_jax.embeddings import whitening
    from bert_jax.text import line_reader

    lines = line_reader.read(args.text_file) if args.text_file else read_input_lines()
    model = load_model(run, args)
    name = f"{model.name}, step {model.step}"
    whitening.whiten(model, name, lines, target, print_now, args.dimensions)
    return FINISHED


@COMMANDS.add(
    "mine",
    "find hard negatives for pairs of queries and answers: near texts that are no answers",
    Argument(
        "pairs",
        metavar="PAIRS",
        help="a .jsonl, .tsv or .csv with a query and an answer in each row",
    ),
    Argument("--query", metavar="COLUMN", help="column of the query [query]", default="query"),
    Argument(
        "--positive", metavar="COLUMN", help="column of the answer [positive]", default="positive"
    ),
    Argument(
        "--corpus",
        metavar="TEXT_FILE",
        help="further texts to choose negatives from, one on each line [only the answers of all "
        "queries]",
    ),
    Argument("--out", metavar="FILE", help="the .jsonl file to write", required=True),
    Argument(
        "--negatives",
        metavar="N",
        help="maximum number of negatives of a query [4]",
        type=integer(1),
        default=4,
    ),
    Argument(
        "--skip",
        metavar="N",
        help="number of the nearest texts to leave out [0]",
        type=integer(0),
        default=0,
    ),
    Argument(
        "--depth",
        metavar="N",
        help="number of the nearest texts to choose from [100]",
        type=integer(1),
        default=100,
    ),
    Argument(
        "--margin",
        metavar="X",
        help="minimum share by which a negative's score is below the answer's score [0.05]",
        type=number(0),
        default=0.05,
    ),
    Argument(
        "--workdir",
        metavar="W",
        help="the run or base whose vectors score texts [BM25 scores them]",
    ),
    shared.POOLING,
    *shared.VECTOR_ARGUMENTS,
    *shared.MODEL_ARGUMENTS,
)
def mine(args: argparse.Namespace) -> int:
    """Finds hard negatives for pairs of queries and answers."""
    require_writable_path("--out", args.out)
    if os.path.exists(args.out) and os.path.samefile(args.out, args.pairs):
        raise InputError(f"--out {args.out}: is the file of the pairs; choose another one")
    if args.skip + args.negatives > args.depth:
        raise InputError(f"--depth {args.depth}: must be at least --skip plus --negatives")
    run = None if args.workdir is None else open_run_or_base(args.workdir)
    if run is None:
        flags = (*shared.VECTOR_FLAGS, *(flag.names[0] for flag in shared.MODEL_ARGUMENTS))
        reject_flags(args, flags, "requires --workdir")
    from bert_jax.embeddings import bm25, negatives
    from bert_jax.tasks import formats
    from bert_jax.text import line_reader

    pairs = []
    source = source_of(flag="PAIRS", kind="similar", file=args.pairs)
    columns = args.query, args.positive
    for where, cells in formats.read_columns(source, "first_line", columns):
        query, positive = (
            formats.require_text(cell, f"column {name!r}", where)
            for cell, name in zip(cells, columns, strict=True)
        )
        pairs.append((query, positive))
    if not pairs:
        raise InputError(f"{args.pairs}: holds no pairs of queries and texts that answer them")
    lines = line_reader.read([args.corpus]) if args.corpus else ()
    corpus = [text for _, text in lines if text.strip()]
    scorer = bm25.all_scores
    if run is not None:
        scorer = negatives.vector_first_stage(_load_embedder(run, args, True)[1])
    limits = negatives.MiningLimits(args.negatives, args.skip, args.depth, args.margin)
    summary = negatives.write(negatives.mine(pairs, corpus, scorer, limits), epath.Path(args.out))
    print_now(f"{printable(args.out)}: {summary}")
    return FINISHED


def _load_reranker(path: str | None) -> "TaskModel | None":
    """Returns the model of a run or base of task.kind=rank; None if `path` is None."""
    if path is None:
        return None
    run = open_run_or_base(path)
    from bert_jax.tasks.finetuned_model import TaskModel

    model = TaskModel(run) if holds_task(run) else None
    kind = "none" if model is None else model.task.kind
    if model is None or kind != "rank":
        remedy = "name a run of task.kind=rank, or a base with the head of a cross-encoder"
        raise InputError(f"--rerank {path}: has task.kind={kind}; {remedy}")
    return model


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
    *shared.VECTOR_ARGUMENTS,
    shared.NORMALIZE,
    *shared.MODEL_ARGUMENTS,
)
def serve(args: argparse.Namespace) -> int:
    """Serves vectors or a fine-tuned run's task over HTTP."""
    run = open_run_or_base(args.workdir)
    reject_base_unless_finetuned(run, args)
    from bert_jax.running.environment import enable_compilation_cache
    from bert_jax.tasks.finetuned_model import TaskModel

    try:
        from bert_jax.serve import endpoints, service, tei
    except ModuleNotFoundError as error:
        raise InputError(
            f"serve: {error.name} is not installed: pip install 'bert-jax[serve]'"
        ) from error

    limits = endpoints.Limits(
        args.queue, args.max_texts, args.max_bytes, args.timeout, args.max_windows
    )
    with service.bind_socket(args.host, args.port) as bound_socket:
        enable_compilation_cache()
        task_model = TaskModel(run, args.base, args.checkpoint) if holds_task(run) else None
        if task_model is not None and not task_model.task.spec.makes_vectors:
            reject_flags(args, shared.VECTOR_FLAGS, f"{args.workdir}: this run makes no vectors")
            endpoint = endpoints.PredictEndpoint(task_model)
        else:
            model, embedder = _load_embedder(run, args, args.normalize)
            if embedder.form_name == "multi_vector":
                raise InputError(
                    f"{args.workdir}: makes multi_vector vectors, and serve only answers with "
                    "dense or sparse ones; use `bert-jax search`, or choose a --pooling"
                )
            is_sparse = embedder.form_name == "sparse"
            endpoint_class = tei.SparseEndpoint if is_sparse else endpoints.EmbedEndpoint
            endpoint = endpoint_class(model.name, embedder)
        service.serve(endpoint, bound_socket, limits, print_now)
    return FINISHED
