"""`bert-jax import`: a checkpoint of others, or a run, to a base."""

from typing import Literal

import numpy as np
from etils import epath

from bert_jax import base as base_lib
from bert_jax import weights
from bert_jax.base import Base
from bert_jax.errors import InputError, printable
from bert_jax.interop import fitting, names, settings, surgery, tf1, vocabularies
from bert_jax.interop.fitting import Say
from bert_jax.predict import Trained
from bert_jax.storage import mirror
from bert_jax.text import tokenizer as tokenizer_lib


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
      what: `with_moments` takes what the reference's Adam keeps, too.

    Raises:
      InputError: nothing that can be read, or something that would be computed differently here.
    """
    base = _read(source, say, what)
    if vocabulary is not None:
        tokenizer = tokenizer_lib.load(vocabulary, base.tokenizer.case)
        base, known = surgery.with_tokenizer(base, tokenizer)
        new = tokenizer.size - known
        say(f"{known} pieces keep their rows; {new} are new, and begin with the mean of the old")
    base_lib.write(base, target)
    cfg, kept = base.model, "" if base.moments is None else f", moments of step {base.moments.step}"
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
        raise InputError(f"{source}: no run there; checkpoints of others are read on this machine")
    prefix = tf1.find(source)
    if prefix is not None:
        return tf1.read(prefix, what, say)
    if not source.is_dir():
        raise InputError(
            f"{source}: no such folder; SOURCE is a folder with config.json, model.safetensors and "
            "a vocabulary, a TensorFlow checkpoint, or a run"
        )
    if what == "with_moments":
        raise InputError(
            f"{source}: --with-optimizer: a Hugging Face folder holds weights alone; leave it out"
        )
    return read_folder(source, say)


def _of_run(source: epath.Path, what: Literal["params", "with_moments"]) -> Base:
    trained = Trained.of(source, what)
    where = f"{source.name}, step {trained.step}"
    return Base(trained.model, trained.params, trained.tokenizer, where, moments=trained.moments)


def read_folder(folder: epath.Path, say: Say) -> Base:
    """What `save_pretrained` wrote: BertModel, BertForMaskedLM or BertForPreTraining.

    Raises:
      InputError: as `import_weights`.
    """
    claimed = settings.read(folder / "config.json")
    tokenizer = vocabularies.read(folder)
    file = _weights_file(folder)
    found = weights.read_shards(file) if file.suffix == ".json" else weights.read(file)
    tensors = _without_copies(found, str(file))
    source = f"Hugging Face folder {folder.name}"
    return fitting.base_of(tensors, names.HUGGING_FACE, claimed, tokenizer, file, source, say)


def _weights_file(folder: epath.Path) -> epath.Path:
    """All weights in one file, or the index of several."""
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).exists():
            return folder / name
    instead = {
        "pytorch_model.bin": "a pickle, which may run code when it is read",
        "tf_model.h5": "TensorFlow's weights",
        "flax_model.msgpack": "Flax's weights",
    }
    for name, what in instead.items():
        if (folder / name).exists():
            raise InputError(
                f"{folder / name}: {what}: not read; load it in transformers and save it with "
                "save_pretrained"
            )
    raise InputError(f"{folder / 'model.safetensors'}: no such file")


def _without_copies(found: dict[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """Tensors by canonical names; buffers and copies of tied weights are gone.

    Raises:
      InputError: two tensors of one name, a type that is no float, or weights that are not tied.
    """
    tensors: dict[str, np.ndarray] = {}
    spelled: dict[str, str] = {}
    for name, value in found.items():
        ours = names.canonical(name)
        if ours in names.IGNORED:
            continue
        if ours in tensors:
            raise InputError(f"{where}: tensors {spelled[ours]!r} and {name!r} are the same one")
        if value.dtype != np.float32:
            raise InputError(
                f"{where}: tensor {name!r} is neither float32 nor float16 nor bfloat16"
            )
        tensors[ours], spelled[ours] = value, name
    for copy, original in names.TIED.items():
        if copy in tensors:
            value = tensors.pop(copy)
            if not np.array_equal(tensors.setdefault(original, value), value):
                raise InputError(
                    f"{where}: tensor {copy!r} of {list(value.shape)} differs from {original!r} of "
                    f"{list(tensors[original].shape)}; only tied weights are supported"
                )
    return tensors
