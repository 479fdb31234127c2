"""`bert-jax import`: makes a base from a run or from another library's checkpoint."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base, Moments
from bert_jax.config import Corpus
from bert_jax.errors import InputError, pluralize, printable
from bert_jax.interop import huggingface, tf1
from bert_jax.interop.names import Report
from bert_jax.model.encoder import padded_vocab_size
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage import mirror
from bert_jax.storage.workdir import SWEEP, Workdir
from bert_jax.tasks.adaptation import head_experiment
from bert_jax.text import documents, sentence_splitter, vocabulary_edits
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text.records import quote_names
from bert_jax.text.sources import source_from_path
from bert_jax.text.tokenizer import Tokenizer, WordPiece


def import_weights(
    source: epath.Path,
    target: epath.Path,
    vocabulary: str | None,
    report: Report,
    with_moments: bool = False,
    text: str = "",
    limit: int = 0,
    words: str = "",
    kind: str | None = None,
    settings: Sequence[str] = (),
) -> None:
    """Makes a base from a run's newest checkpoint, or from another library's checkpoint.

    Args:
      source: a folder of `save_pretrained`, a TensorFlow 1 checkpoint (see `interop.tf1`) or a run.
      target: the folder of the base, which must not exist.
      vocabulary: a vocab.txt or tokenizer folder, which replaces the source's vocabulary.
      report: prints a line for the result, and for each difference from the source.
      with_moments: whether to import a run's moments of `bert_adam`, too.
      text: a source of text; tokens that it does not use are removed.
      limit: maximum number of tokens that `text` keeps, the most frequent ones; 0: all used ones.
      words: a file of words, one on each line, that become tokens.
      kind: the `task.kind` of the source's head; None: the one that is likely.
      settings: FIELD=VALUE of the `Finetuning` of the head, such as "task.no_answer=possible".
    """
    base = _read(source, report, with_moments)
    if kind or settings:
        base = set_task(base, kind, settings, str(source))
    if vocabulary is not None:
        tokenizer = tokenizer_lib.load(vocabulary, base.tokenizer.case)
        base, known = replace_tokenizer(base, tokenizer)
        count = tokenizer.size - known
        report(f"{known} tokens keep their rows; {count} new ones begin with the mean of the old")
    added = []
    if words:  # first, as the text may remove the tokens that these words consist of
        tokenizer, origins, added = vocabulary_edits.add_words(base.tokenizer, epath.Path(words))
        slots = len(added) - (tokenizer.size - base.tokenizer.size)
        report(f"{len(added)} words of {words} are tokens now, {slots} of them in unused slots")
        base = replace_rows(base, tokenizer, origins)
    if text:
        base = reduce_vocabulary(base, text, limit, added, report)
    base_lib.write(base, target)
    cfg, more = base.model, "" if base.moments is None else f", moments of step {base.moments.step}"
    if vectors := base.vectors:
        length = ", scaled to length 1" * vectors.normalize
        max_length = vectors.max_length or cfg.max_position_embeddings
        more += f"; vectors of texts: {vectors.pooling}{length}, at most {max_length} tokens"
    if head := base.head:
        labels = f" with the labels {quote_names(head.labels)}" if head.labels else ""
        others = f" (or --kind {' or '.join(head.kinds[1:])})" if head.kinds[1:] else ""
        more += f"; task.kind={head.kinds[0]}{labels}{others}"
    report(
        printable(
            f"imported {source} to {target}: {pluralize(cfg.num_hidden_layers, 'layer')}, "
            f"{cfg.hidden_size} "
            f"wide, {cfg.vocab_size} tokens, {base.tokenizer.case}{more}"
        )
    )


def set_task(base: Base, kind: str | None, settings: Sequence[str], name: str) -> Base:
    """Returns the base with another kind and other settings of its head's task.

    Labels in the settings rename those of the head. `name` is that of the base in messages.
    """
    head = base.head
    if head is None or kind not in (None, *head.kinds):
        fits = "no head of a task" if head is None else f"a head for {' or '.join(head.kinds)}"
        flag = f"--kind {kind}" if kind else "--set"
        raise InputError(f"{flag}: {name} has {fits}; remove or change the flag")
    kinds = tuple(sorted(head.kinds, key=lambda other: other != kind))  # the chosen one is first
    inherited = head.settings if kinds == head.kinds else ()  # not for another kind
    head = dataclasses.replace(head, kinds=kinds, settings=(*inherited, *settings))
    labels = head_experiment(dataclasses.replace(base, head=head), name).task.labels
    if head.labels:
        if len(labels) != len(head.labels):
            raise InputError(f"task.labels: the head of {name} has {len(head.labels)} labels")
        head = dataclasses.replace(head, labels=labels)
    return dataclasses.replace(base, head=head)


def _read(source: epath.Path, report: Report, with_moments: bool) -> Base:
    run = mirror.open_workdir(source)
    if run.experiment.exists() or (run.root / SWEEP).exists():
        return _read_run(run, with_moments)  # raises InputError for a sweep, naming one of its runs
    if run.remote is not None:
        raise InputError(f"{source}: no run; copy checkpoints of other libraries to this machine")
    prefix = tf1.find(source)
    if with_moments:
        raise InputError(f"{source}: only runs have moments; remove --with-optimizer")
    return huggingface.read_folder(source, report) if prefix is None else tf1.read(prefix, report)


def _read_run(run: Workdir, with_moments: bool) -> Base:
    trained = LoadedModel.of(run, with_moments)  # a Base
    fresh, experiment = trained.fresh, trained.experiment
    # The head is as random as at the start if no phase and no earlier model trained it.
    if "next_sentence" in trained.idle and experiment and not experiment.init_from:
        fresh = (*fresh, "next_sentence")
    return dataclasses.replace(
        trained, source=f"{run.address.name}, step {trained.step}", fresh=fresh
    )


def replace_tokenizer(base: Base, tokenizer: Tokenizer) -> tuple[Base, int]:
    """Returns the base with another WordPiece vocabulary, and the number of shared tokens.

    The rows of a new token are the mean of all old rows, so that it is neither likely nor unlikely.
    """
    for vocabulary in (base.tokenizer, tokenizer):
        if not isinstance(vocabulary, WordPiece):
            raise InputError(
                f"--tokenizer: a vocabulary of kind {vocabulary.kind}: both must be WordPiece"
            )
    old = {base.tokenizer.token(i): (i,) for i in range(base.tokenizer.size)}
    origins = [old.get(tokenizer.token(i), ()) for i in range(tokenizer.size)]
    return replace_rows(base, tokenizer, origins), sum(map(len, origins))


def reduce_vocabulary(
    base: Base, text: str, limit: int, required: Sequence[int], report: Report
) -> Base:
    """Returns the base with only the tokens that a text uses, and the `required` ones.

    The text is a file, a folder or a source as in `corpus.sources`. `limit` tokens are kept, 0: all
    used ones.
    """

    def encode(tokenizer: Tokenizer) -> Iterator[list[int]]:
        """Yields the token ids of paragraphs, and of sentences as in a corpus."""
        for document in documents.read(Corpus(sources=(source_from_path(text),))):
            yield from map(tokenizer.encode, document.paragraphs())
            yield from map(tokenizer.encode_after_space, sentence_splitter.split(document, "en"))

    old = base.tokenizer
    counts = vocabulary_edits.count_tokens(old, encode(old))
    tokenizer, origins = vocabulary_edits.trim(old, counts, limit, flag="--keep", required=required)
    changed, count = vocabulary_edits.count_changes(origins, encode(old), encode(tokenizer))
    report(
        f"keeps {tokenizer.size} of {old.size} tokens; {changed} of {count} sentences and "
        f"paragraphs of {text} ({changed / max(count, 1):.1%}) contain a removed token, whose "
        "text is now split into other tokens, mostly shorter ones"
    )
    return replace_rows(base, tokenizer, origins)


def replace_rows(base: Base, tokenizer: Tokenizer, origins: Sequence[tuple[int, ...]]) -> Base:
    """Returns the base with another vocabulary.

    `origins` has for each new id the old ids whose mean is its word embedding and output bias; ()
    is the mean of all. The moments of a token are zero unless it has exactly one origin.
    """
    cfg = dataclasses.replace(base.model, vocab_size=tokenizer.size)
    # By new id, the old id whose row is copied, or -1; the new ids whose rows are means.
    copied_from = np.array([ids[0] if len(ids) == 1 else -1 for ids in origins])
    averaged = [new_id for new_id, ids in enumerate(origins) if len(ids) != 1]

    def resize(tree: dict[str, Any], fill: Literal["mean", "zero"]) -> dict[str, Any]:
        tree = jax.tree.map(np.asarray, tree)  # a copy
        word, head = tree["encoder"]["embeddings"]["word"], tree["masked_lm"]
        tables = [(word, "embedding"), (head, "output_bias")]
        tables += [(head["output"], "embedding")] if "output" in head else []
        for node, name in tables:
            table = node[name][: base.model.vocab_size]
            new = np.zeros((padded_vocab_size(cfg), *table.shape[1:]), np.float32)
            new[: tokenizer.size][copied_from >= 0] = table[copied_from[copied_from >= 0]]
            if fill == "mean" and averaged:
                mean = table.mean(0, dtype=np.float64)
                for new_id in averaged:
                    old = table[list(origins[new_id])]
                    new[new_id] = old.mean(0, dtype=np.float64) if len(old) else mean
            node[name] = new
        return tree

    moments = base.moments
    if moments is not None:
        trees = (resize(tree, "zero") for tree in (moments.mean, moments.square))
        moments = Moments(moments.step, *trees)
    return dataclasses.replace(
        base,
        model=cfg,
        params=resize(base.params, "mean"),
        tokenizer=tokenizer,
        source=f"{base.source}, with another vocabulary",
        moments=moments,
        sha256="",
    )
