"""The commands that ask trained models, and those that bring and take them."""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from etils import epath

from bert_jax.cli.command import (
    COLUMNS,
    columns_of,
    command,
    input_lines,
    is_finetuned,
    require_file,
    require_run,
    say,
    trained_of,
)
from bert_jax.config import Parallelism
from bert_jax.errors import FINISHED, InputError, prefix_errors, printable
from bert_jax.storage import copies

_SHOWN = 200  # characters of a text that was searched for
# What is asked of vectors, where nothing is.
_FEATURES = {"pooling": None, "layers": (-1,), "combine": "concat", "normalize": None}
_FEATURES |= {"dimensions": 0, "max_length": 0, "batch_tokens": 0}


@command()
def predict(args: argparse.Namespace) -> int:
    """Do the task of a fine-tuned run; else fill [MASK], and say whether B follows A.

    CODE CACHE
    --workdir W (required): a run
    [TEXTS...]: a text with [MASK]; of a fine-tuned run all texts of an example, e.g. QUESTION
        CONTEXT; left out: lines of standard input, texts separated by tabs
    --next B: a second text; says whether it follows the first
    --top K (int from 1): how many pieces are shown for each [MASK] [5]
    --source SOURCE...: of a fine-tuned run: answer the examples of a file, written as in
        task.train, e.g. tsv:FILE; may be repeated
    --score: of a fine-tuned run: print scores instead of answers; on task.validation if there is
        no --source
    --input FILE: of a fine-tuned run: a .csv, .tsv or .jsonl to answer; its rows go to --out with
        a column `predicted`, and next to a label its `probability`
    --beam N (int from 1 to 64): of a run of task.kind=generate: width of the beam search, 1 takes
        the likeliest piece each time [1]
    --out FILE: of a fine-tuned run: file to write answers to, as JSON lines [standard output]; with
        --input a .csv, .tsv or .jsonl
    COLUMNS CHECKPOINT TUNED_BASE
    """
    require_file("--out", args.out)
    tuned = ("source", "score", "input", "out", "beam", "base", *COLUMNS)
    return _do_task(args) if is_finetuned(args, "next", "top", tuned=tuned) else _fill_masks(args)


def _do_task(args: argparse.Namespace) -> int:
    from bert_jax.running.environment import keep_compiled_programs
    from bert_jax.tasks import predict as predict_lib

    if args.texts and (args.source or args.score):
        raise InputError("TEXTS: --source and --score read examples elsewhere; leave it out")
    if args.input is not None and (args.texts or args.source or args.score or args.out is None):
        raise InputError("--input: needs --out, and no TEXTS, --source or --score")
    reading = columns_of(args)
    if reading and not (args.source or args.score or args.input):
        flag = next(flag for flag, field in COLUMNS.items() if field in reading).replace("_", "-")
        raise InputError(f"--{flag}: describes a file; name one with --source or --input")
    keep_compiled_programs()
    model = predict_lib.TaskModel(args.workdir, args.base, args.checkpoint, args.beam, reading)
    if args.input is not None:
        written = predict_lib.predict_table(model, args.input, args.out)
        say(f"{printable(args.out)}: {printable(written)}")
        return FINISHED
    texts, what = args.texts or input_lines(), "score" if args.score else "predict"
    for line in predict_lib.predict(model, texts, tuple(args.source), what, args.out):
        print(line)
    return FINISHED


def _fill_masks(args: argparse.Namespace) -> int:
    if args.next is not None and len(args.texts) != 1:
        raise InputError("--next: give exactly one text with it")
    trained = trained_of(args)
    from bert_jax.pretraining.evaluators import Predictor
    from bert_jax.text.tokenizer import UnknownShare
    from bert_jax.text.vocabulary import MASK

    predictor = Predictor(trained.model, trained.tokenizer)
    share = UnknownShare(trained.tokenizer)
    asked = [("TEXTS", text, args.next) for text in args.texts]
    for where, a, b in asked or _asked_lines():
        with prefix_errors(where):
            if trained.head is not None and MASK not in f"{a} {b}":
                kinds = trained.head.kinds
                raise InputError(
                    f"{args.workdir} is a base with an imported head for task.kind="
                    f"{' or '.join(kinds)}, which predict cannot use; write [MASK] in the text, or "
                    f"run `bert-jax finetune --kind {kinds[0]} --from {args.workdir} ...`, which "
                    "starts with this head, and give that run to predict"
                )
            answer = trained.fill(a, b, args.top or 5)
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


def _asked_lines() -> Iterator[tuple[str, str, str | None]]:
    """Yields (where, A, B) of the lines of standard input that hold something."""
    for where, line in input_lines():
        a, tab, b = line.partition("\t")
        if line.strip():
            yield where, a, b if tab else None


@command()
def embed(args: argparse.Namespace) -> int:
    """Write vectors of texts: of each text, or of each of its pieces.

    CODE RUN_OR_BASE CACHE
    [TEXT_FILE...]: files with a text on each line, also compressed (.gz, .zst, .bz2, .xz); without
        a file: standard input. An empty line is a text
    --out FILE (required): file to write, a row for each text: .npz, .parquet or .jsonl
    --pooling (mean | cls | last | tokens): mean of a text's tokens, [CLS] and [SEP] too; the vector
        of [CLS], or of the last token; or a vector for each piece, without [CLS] and [SEP] [as the
        run or base says, else mean]
    --role (text | query = text): what the encoder knows texts by, if it puts something before them
    --quantize (none | int8 | binary = none): write a byte a number, or a bit; a line says what is
        lost by it
    FEATURES NORMALIZE CHECKPOINT TUNED_BASE
    """
    require_file("--out", args.out)
    require_run(args.workdir)
    from bert_jax.embeddings import embed
    from bert_jax.text import lines

    texts = lines.read(args.text_file) if args.text_file else input_lines()
    _, embedder = _embedder(args, args.normalize)
    lines_only = (line for _, line in texts)
    files = args.text_file or ["standard input"]
    place, out = files[0] if len(files) == 1 else "TEXT_FILE", epath.Path(args.out)
    how = args.role, args.quantize, lambda number: f"{place}:{number}"
    embed.write(embedder, lines_only, out, say, *how)
    return FINISHED


def _embedder(args: argparse.Namespace, normalize: bool | None):
    """The run or base in --workdir, and what gives its vectors; None: scaled as that says."""
    from bert_jax.embeddings import embed
    from bert_jax.training import mesh as mesh_lib

    features = embed.Features(
        pooling=args.pooling,
        layers=args.layers,
        combine=args.combine,
        length={None: None, True: "unit", False: "as_is"}[normalize],
        dimensions=args.dimensions,
    )
    trained = trained_of(args)
    mesh = mesh_lib.make_mesh(Parallelism())
    return trained, embed.Embedder(trained, features, mesh, args.max_length, args.batch_tokens)


@command()
def search(args: argparse.Namespace) -> int:
    """Find the texts of a file that are nearest to a question, by the cosine of their vectors.

    CODE RUN_OR_BASE CACHE
    TEXTS: a file with a text on each line, also compressed; empty lines are no texts
    [QUESTION...]: left out: lines of standard input
    --queries FILE: ask each line of this file instead; needs --out
    --out FILE: with --queries: file to write, a line of JSON for each query
    --top K (int from 1 = 10): how many texts are shown
    --long (beginning | passages = beginning): a text that is longer than the encoder reads: its
        beginning stands for it, or it falls into passages, each of which is a text
    --vectors FOLDER: where the vectors of TEXTS are kept, so that they are made once
        [TEXTS.vectors]
    POOLING FEATURES CHECKPOINT TUNED_BASE
    """
    if (args.queries is None) != (args.out is None):
        raise InputError("--queries and --out: give both or neither")
    if args.queries is not None and args.question:
        raise InputError("QUESTION: --queries reads them elsewhere; leave it out")
    if "://" in args.texts and args.vectors is None:
        raise InputError(f"{args.texts}: name a folder of this machine for its --vectors")
    require_file("--out", args.out)
    require_run(args.workdir)
    from bert_jax.embeddings import search as search_lib

    folder = epath.Path(args.vectors or f"{args.texts}.vectors")
    index = search_lib.Index(args.texts, folder, *_embedder(args, True), say, args.long)
    if args.queries is not None:
        index.answer_file(args.queries, epath.Path(args.out), args.top)
        return FINISHED
    for question in args.question or (line for _, line in input_lines()):
        print(printable(question))
        for answer in index.nearest([question], args.top)[0]:
            print(f"  {answer.score:.3f}  line {answer.line}: {printable(answer.text[:_SHOWN])}")
    return FINISHED


@command()
def serve(args: argparse.Namespace) -> int:
    """Answer over HTTP: vectors as OpenAI's clients ask for them, or a fine-tuned run's task.

    CODE CACHE
    --workdir W (required): a run, a base or a fine-tuned run
    --host H (= 127.0.0.1): the address to listen on; 0.0.0.0 for all, without any password
    --port P (int from 0 to 65535 = 8000): port to listen on; 0: any that is free
    POOLING FEATURES NORMALIZE CHECKPOINT TUNED_BASE
    --queue N (int from 64 to 65536 = 256): most requests under way at once; further ones are
        answered 503
    --max-texts N (int from 1 to 65536 = 2048): most texts of a request
    --max-bytes N (int from 1024 to 1073741824 = 2097152): most bytes of a request
    --max-rows N (int from 1 to 65536 = 128): most windows of a context
    --timeout S (float from 1 to 3600 = 30): most seconds for an answer
    """
    tuned = is_finetuned(args)
    from bert_jax.running.environment import keep_compiled_programs
    from bert_jax.tasks.predict import TaskModel

    try:
        from bert_jax.serve import served, service
    except ModuleNotFoundError as error:
        raise InputError(
            f"serve: {error.name} is not installed: pip install 'bert-jax[serve]'"
        ) from error

    limits = args.queue, args.max_texts, args.max_bytes, args.timeout, args.max_rows
    with service.listening(args.host, args.port) as bound:
        keep_compiled_programs()
        model = TaskModel(args.workdir, args.base, args.checkpoint) if tuned else None
        if model is not None and model.experiment.task.kind != "similar":
            for name, usual in _FEATURES.items():
                if getattr(args, name) != usual:
                    why = f"{args.workdir} has learned no vectors; leave it out"
                    raise InputError(f"--{name.replace('_', '-')}: {why}")
            of: Any = served.PredictEndpoint(model)
        else:
            trained, embedder = _embedder(args, args.normalize)
            of = served.EmbedEndpoint(trained.name, embedder)
        service.serve(of, bound, served.Limits(*limits), say)
    return FINISHED


@command()
def import_(args: argparse.Namespace) -> int:
    """Make a base, to start from, of another library's checkpoint or of a run.

    CODE
    SOURCE: a folder as save_pretrained writes it, a TensorFlow 1 checkpoint (its folder, or the
        prefix of its files) with bert_config.json and vocab.txt, or a run's workdir
    --workdir W (required): folder to write the base to
    --tokenizer FILE_OR_FOLDER: another WordPiece vocabulary: pieces that both have keep their
        weights
    --vocabulary TEXT: a file or folder of text, or a source as in corpus.sources; pieces that it
        does not use are left out
    --keep N (int = 0): of these, the commonest so many; 0: all
    --add FILE: words, one a line, that become pieces
    --with-optimizer: import bert_adam's moments of a run, too: a run with init_from=B then begins
        with them, at step 0 of its own schedule
    """
    what = "with_moments" if args.with_optimizer else "params"
    text = args.vocabulary or ""
    if args.keep and not text:
        raise InputError("--keep: says how many pieces of --vocabulary TEXT stay; name a TEXT")
    if args.tokenizer and (text or args.add):
        raise InputError("--tokenizer: brings pieces of its own; leave out --vocabulary and --add")
    copies.require_new(epath.Path(args.workdir))
    _require_source(args.source)
    from bert_jax.interop import importing

    source, target = epath.Path(args.source), epath.Path(args.workdir)
    importing.import_weights(
        source, target, args.tokenizer, say, what, text, args.keep, args.add or ""
    )
    return FINISHED


def _require_source(source: str) -> None:
    """Raises InputError if nothing is there to import, before jax is loaded to read it."""
    name = source.removesuffix(".index")  # the files of a TensorFlow checkpoint begin with it
    if "://" in source or os.path.isdir(source) or os.path.isfile(f"{name}.index"):
        return
    # Old names on the hub have no organization: bert-base-uncased.
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*|\w+(-[\w.]+)+", source)
    fetched = f"; a hub's model, where there is a network: `hf download {source} --local-dir D`"
    raise InputError(
        f"{source}: no such folder; SOURCE is a folder with config.json, model.safetensors and "
        f"a vocabulary, a TensorFlow checkpoint, or a run{fetched if on_hub else ''}"
    )


@command()
def export(args: argparse.Namespace) -> int:
    """Write a run, a fine-tuned run or a base for transformers.

    CODE RUN_OR_BASE CACHE
    --as (pretraining | masked_lm | encoder | causal_lm | task | adapter): for BertForPreTraining,
        BertForMaskedLM, or BertModel and sentence-transformers; of model.kind=modern for
        ModernBertForMaskedLM or ModernBertModel; of data.objective=causal for BertLMHeadModel or
        ModernBertDecoderForCausalLM. Of a fine-tuned run task, for BertForSequenceClassification
        and the like [task], adapter, what adapt.how=lora learned, for PEFT, or encoder
    --out FOLDER (required): folder to write
    --dtype (float32 | bfloat16 = float32): type of the weights written; float32 loses nothing
    CHECKPOINT TUNED_BASE
    """
    copies.require_new(epath.Path(args.out))
    tuned = is_finetuned(args)
    from bert_jax.interop import finetuned, huggingface
    from bert_jax.tasks.predict import TaskModel

    form = args.kind
    if tuned:
        model = TaskModel(args.workdir, args.base, args.checkpoint)
        kind = model.experiment.task.kind
        forms = ("encoder",) if kind == "similar" else ("task", "adapter", "encoder")
        form = form or forms[0]
        if form not in forms:
            raise InputError(
                f"--as {form}: {args.workdir} has learned task.kind={kind}; choose "
                f"{' or '.join(forms)}"
            )
    if tuned and form != "encoder":
        architecture = finetuned.export(model, form, args.dtype, epath.Path(args.out))
        name, step = model.experiment.name, model.step
        if form == "adapter":
            architecture = f"adapter over {architecture}"
    else:
        trained = model.encoder() if tuned else trained_of(args)
        there = huggingface.forms_of(trained.model)  # none of an encoder that they do not have
        if there and form not in ("pretraining", "masked_lm", "encoder", "causal_lm"):
            given = ":" if form is None else f" {form}: {args.workdir} is not fine-tuned;"
            raise InputError(f"--as{given} choose {' or '.join(there)}")
        kind = form or "encoder"
        recipe = model.experiment if tuned else None
        huggingface.export_weights(trained, kind, args.dtype, epath.Path(args.out), recipe)
        architecture = huggingface.architecture_of(trained.model, kind)
        name, step = trained.name, trained.step
    say(
        f"exported {printable(name)}, step {step}: {architecture}, {args.dtype}, "
        f"in {printable(args.out)}"
    )
    return FINISHED
