"""`bert-jax import`: a checkpoint of others, or a run, to a base."""

import dataclasses
import os
import re
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from bert_jax import base as base_lib
from bert_jax.base import Base, Moments
from bert_jax.errors import InputError, printable
from bert_jax.interop import huggingface, tf1
from bert_jax.interop.names import Say
from bert_jax.loaded import Loaded
from bert_jax.model.encoder import padded_vocab_size
from bert_jax.storage import mirror
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text.tokenizer import Tokenizer, WordPiece


def import_weights(
    source: epath.Path,
    target: epath.Path,
    vocabulary: str | None,
    say: Say,
    what: Literal["params", "with_moments"] = "params",
) -> None:
    """Makes a base of a checkpoint of others, or of a run's newest one.

    Args:
      source: a folder as `save_pretrained` writes it, a TensorFlow 1 checkpoint (see `interop.tf1`)
        or a run.
      target: where the base goes; nothing may be there.
      vocabulary: a vocab.txt or a tokenizer folder whose pieces take the place of the source's;
        None keeps those.
      say: is given a line about what was made, and one about what is not as in the source.
      what: `with_moments` takes what `bert_adam` keeps of a run, too.
    """
    base = _read(source, say, what)
    if vocabulary is not None:
        tokenizer = tokenizer_lib.load(vocabulary, base.tokenizer.case)
        base, known = with_tokenizer(base, tokenizer)
        new = tokenizer.size - known
        say(f"{known} pieces keep their rows; {new} are new, and begin with the mean of the old")
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
    run = mirror.opened(source)
    if run.experiment.exists():
        return _of_run(source, what)
    if run.remote is not None:
        raise InputError(f"{source}: no run there; copy others' checkpoints to this machine first")
    prefix = tf1.find(source)
    if prefix is None and not source.is_dir():
        on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", os.fspath(source))
        fetched = f"; a hub's model, where there is a network: `hf download {source} --local-dir D`"
        raise InputError(
            f"{source}: no such folder; SOURCE is a folder with config.json, model.safetensors and "
            f"a vocabulary, a TensorFlow checkpoint, or a run{fetched if on_hub else ''}"
        )
    if what == "with_moments":
        raise InputError(
            f"{source}: --with-optimizer: only those of a run are imported, of others' checkpoints "
            "weights alone; leave it out"
        )
    return huggingface.read_folder(source, say) if prefix is None else tf1.read(prefix, say)


def _of_run(source: epath.Path, what: Literal["params", "with_moments"]) -> Base:
    trained = Loaded.of(source, what)
    where = f"{source.name}, step {trained.step}"
    kept = {"moments": trained.moments, "vectors": trained.vectors}
    return Base(trained.model, trained.params, trained.tokenizer, where, **kept)


def with_tokenizer(base: Base, tokenizer: Tokenizer) -> tuple[Base, int]:
    """Returns the base with the pieces of another WordPiece vocabulary, and how many it knew.

    A piece that both have keeps its word embedding and output bias; a new one begins with the mean
    of the old ones, so that it is neither likely nor unlikely, and with moments of zero.
    """
    for one in (base.tokenizer, tokenizer):
        if not isinstance(one, WordPiece):
            raise InputError(
                f"--tokenizer: only a WordPiece vocabulary can take another's place, not {one.kind}"
            )
    old = {base.tokenizer.piece(i): i for i in range(base.tokenizer.size)}
    rows = np.array([old.get(tokenizer.piece(i), -1) for i in range(tokenizer.size)])
    cfg = dataclasses.replace(base.model, vocab_size=tokenizer.size)

    def resized(tree: dict[str, Any], start: Literal["mean", "zero"]) -> dict[str, Any]:
        tree = jax.tree.map(np.asarray, tree)  # a tree of its own
        word, head = tree["encoder"]["embeddings"]["word"], tree["masked_lm"]
        leaves = [(word, "embedding"), (head, "output_bias")]
        leaves += [(head["output"], "embedding")] if "output" in head else []
        for leaf, name in leaves:
            table = leaf[name][: base.model.vocab_size]
            new = np.zeros((padded_vocab_size(cfg), *table.shape[1:]), np.float32)
            if start == "mean":
                new[: tokenizer.size] = table.mean(0, dtype=np.float64)
            new[: tokenizer.size][rows >= 0] = table[rows[rows >= 0]]
            leaf[name] = new
        return tree

    moments = base.moments
    if moments is not None:
        trees = (resized(tree, "zero") for tree in (moments.mean, moments.square))
        moments = Moments(moments.step, *trees)
    params, changed = resized(base.params, "mean"), f"{base.source}, with another vocabulary"
    known = int((rows >= 0).sum())
    kept = {"fresh": base.fresh, "moments": moments, "vectors": base.vectors}
    return Base(cfg, params, tokenizer, changed, **kept), known
