"""`bert-jax import`: a checkpoint of others, or a run, to a base."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base, Moments
from bert_jax.config import Corpus
from bert_jax.errors import InputError, printable
from bert_jax.interop import huggingface, tf1
from bert_jax.interop.names import Say
from bert_jax.model.encoder import padded_vocab_size
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage import mirror
from bert_jax.text import documents, fitting, sentence_splitter
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text.tokenizer import Tokenizer, WordPiece


def import_weights(
    source: epath.Path,
    target: epath.Path,
    vocabulary: str | None,
    say: Say,
    what: Literal["params", "with_moments"] = "params",
    text: str = "",
    most: int = 0,
    words: str = "",
) -> None:
    """Makes a base of a checkpoint of others, or of a run's newest one.

    Args:
      source: a folder as `save_pretrained` writes it, a TensorFlow 1 checkpoint (see `interop.tf1`)
        or a run.
      target: where the base goes; nothing may be there.
      vocabulary: a vocab.txt or a tokenizer folder whose pieces take the place of the source's.
      say: is given a line about what was made, and one about what is not as in the source.
      what: `with_moments` takes what `bert_adam` keeps of a run, too.
      text: a source of text; pieces that it does not use are left out.
      most: of pieces that are kept then, the commonest; 0: all that the text uses.
      words: a file of words, one a line, that become pieces.
    """
    base = _read(source, say, what)
    if vocabulary is not None:
        tokenizer = tokenizer_lib.load(vocabulary, base.tokenizer.case)
        base, known = with_tokenizer(base, tokenizer)
        new = tokenizer.size - known
        say(f"{known} pieces keep their rows; {new} are new, and begin with the mean of the old")
    new = []
    if words:  # before pieces that stood for them are cut away
        tokenizer, begins, new = fitting.with_words(base.tokenizer, epath.Path(words))
        slots = len(new) - (tokenizer.size - base.tokenizer.size)
        say(f"{len(new)} words of {words} are pieces now, {slots} of them in unused slots")
        base = with_rows(base, tokenizer, begins)
    if text:
        base = fitted(base, text, most, new, say)
    base_lib.write(base, target)
    cfg, kept = base.model, "" if base.moments is None else f", moments of step {base.moments.step}"
    if vectors := base.vectors:
        length = ", scaled to length 1" * vectors.normalize
        most = vectors.max_length or cfg.max_position_embeddings
        kept += f"; vectors of texts: {vectors.pooling}{length}, of {most} pieces at most"
    say(
        printable(
            f"imported {source} to {target}: {cfg.num_hidden_layers} layers, {cfg.hidden_size} "
            f"wide, {cfg.vocab_size} pieces, {base.tokenizer.case}{kept}"
        )
    )


def _read(source: epath.Path, say: Say, what: Literal["params", "with_moments"]) -> Base:
    run = mirror.open_workdir(source)
    if run.experiment.exists():
        return _of_run(source, what)
    if run.remote is not None:
        raise InputError(f"{source}: no run there; copy others' checkpoints to this machine first")
    prefix = tf1.find(source)
    if what == "with_moments":
        raise InputError(
            f"{source}: --with-optimizer: only those of a run are imported, of others' checkpoints "
            "weights alone; remove it"
        )
    return huggingface.read_folder(source, say) if prefix is None else tf1.read(prefix, say)


def _of_run(source: epath.Path, what: Literal["params", "with_moments"]) -> Base:
    trained = LoadedModel.of(source, what)
    fresh, experiment = trained.fresh, trained.experiment
    if "next_sentence" in trained.idle and experiment and not experiment.init_from:
        fresh = (*fresh, "next_sentence")
    return dataclasses.replace(trained, source=f"{source.name}, step {trained.step}", fresh=fresh)


def with_tokenizer(base: Base, tokenizer: Tokenizer) -> tuple[Base, int]:
    """Returns the base with the pieces of another WordPiece vocabulary, and how many it knew.

    A new piece begins with the mean of all old ones, so that it is neither likely nor unlikely.
    """
    for one in (base.tokenizer, tokenizer):
        if not isinstance(one, WordPiece):
            raise InputError(
                f"--tokenizer: only a WordPiece vocabulary can take another's place, not {one.kind}"
            )
    old = {base.tokenizer.piece(i): (i,) for i in range(base.tokenizer.size)}
    begins = [old.get(tokenizer.piece(i), ()) for i in range(tokenizer.size)]
    return with_rows(base, tokenizer, begins), sum(map(len, begins))


def fitted(base: Base, text: str, most: int, asked: Sequence[int], say: Say) -> Base:
    """Returns the base with those pieces alone that a text uses, and with some that are asked for.

    The text is a source as in `corpus.sources`; `most` are kept, 0: all that it uses.
    """

    def rows(tokenizer: Tokenizer) -> Iterator[list[int]]:
        """Yields the ids of paragraphs, and of sentences as a corpus has them."""
        for document in documents.read(Corpus(sources=(text,))):
            yield from map(tokenizer.encode, document.paragraphs())
            yield from map(tokenizer.encode_within, sentence_splitter.split(document, "en"))

    old = base.tokenizer
    tokenizer, begins = fitting.trim(old, fitting.counts(old, rows(old)), most, "--keep", asked)
    differ, count = fitting.count_changes(begins, rows(old), rows(tokenizer))
    say(
        f"{tokenizer.size} of {old.size} pieces stay; {differ} of {count} sentences and paragraphs "
        f"of {text} are cut another way now"
    )
    return with_rows(base, tokenizer, begins)


def with_rows(base: Base, tokenizer: Tokenizer, begins: Sequence[tuple[int, ...]]) -> Base:
    """Returns the base with another vocabulary.

    A piece's word embedding and its output bias begin with the mean of those of old pieces, of
    which `begins` has a tuple for each new id; () for the mean of all. Moments of a piece that is
    not one old one begin with zero.
    """
    cfg = dataclasses.replace(base.model, vocab_size=tokenizer.size)
    copied = np.array([ids[0] if len(ids) == 1 else -1 for ids in begins])
    made = [number for number, ids in enumerate(begins) if len(ids) != 1]

    def resized(tree: dict[str, Any], start: Literal["mean", "zero"]) -> dict[str, Any]:
        tree = jax.tree.map(np.asarray, tree)  # a tree of its own
        word, head = tree["encoder"]["embeddings"]["word"], tree["masked_lm"]
        leaves = [(word, "embedding"), (head, "output_bias")]
        leaves += [(head["output"], "embedding")] if "output" in head else []
        for leaf, name in leaves:
            table = leaf[name][: base.model.vocab_size]
            new = np.zeros((padded_vocab_size(cfg), *table.shape[1:]), np.float32)
            new[: tokenizer.size][copied >= 0] = table[copied[copied >= 0]]
            of_all = table.mean(0, dtype=np.float64) if made and start == "mean" else None
            for number in made if start == "mean" else ():
                old = table[list(begins[number])]
                new[number] = old.mean(0, dtype=np.float64) if len(old) else of_all
            leaf[name] = new
        return tree

    moments = base.moments
    if moments is not None:
        trees = (resized(tree, "zero") for tree in (moments.mean, moments.square))
        moments = Moments(moments.step, *trees)
    return dataclasses.replace(
        base,
        model=cfg,
        params=resized(base.params, "mean"),
        tokenizer=tokenizer,
        source=f"{base.source}, with another vocabulary",
        moments=moments,
        sha256="",
    )
