"""`bert-jax import`: a Hugging Face folder, or a run, to a base."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from etils import epath

from bert_jax import base as base_lib
from bert_jax import weights
from bert_jax.base import Base
from bert_jax.config import InputError, Model
from bert_jax.interop import names, settings, surgery, vocabularies
from bert_jax.model import heads
from bert_jax.predict import Trained
from bert_jax.section import printable
from bert_jax.text import tokenizer as tokenizer_lib

# Others pad the vocabulary's tables to a multiple of one of these.
_MULTIPLES = (8, 64, 128, 256, 512, 1024)
_FRESH_SEED = 0

Say = Callable[[str], None]


def import_weights(
    source: epath.Path, target: epath.Path, vocabulary: str | None, say: Say
) -> None:
    """Makes a base of a folder as `save_pretrained` writes it, or of a run's newest checkpoint.

    Args:
      source: the folder.
      target: where the base goes; nothing may be there.
      vocabulary: a vocab.txt or a tokenizer folder whose pieces take the place of the source's;
        None keeps those.
      say: is given a line about what was made, and one about what is not as in the source.

    Raises:
      InputError: nothing that can be read, or something that would be computed differently here.
    """
    if not source.is_dir():
        raise InputError(
            f"{source}: no such folder; SOURCE is a folder with config.json, model.safetensors and "
            "a vocabulary, or a run"
        )
    if (source / "experiment.json").exists():
        run = Trained.of(source)
        base = Base(run.model, run.params, run.tokenizer, f"{source.name}, step {run.step}")
    else:
        base = read_folder(source, say)
    if vocabulary is not None:
        tokenizer = tokenizer_lib.load(vocabulary, base.tokenizer.case)
        base, known = surgery.with_tokenizer(base, tokenizer)
        new = tokenizer.size - known
        say(f"{known} pieces keep their rows; {new} are new, and begin with the mean of the old")
    base_lib.write(base, target)
    cfg = base.model
    say(
        printable(
            f"imported {source} to {target}: {cfg.num_hidden_layers} layers, {cfg.hidden_size} "
            f"wide, {cfg.vocab_size} pieces, {base.tokenizer.case}"
        )
    )


def read_folder(folder: epath.Path, say: Say) -> Base:
    """What `save_pretrained` wrote: BertModel, BertForMaskedLM or BertForPreTraining.

    Raises:
      InputError: as `import_weights`.
    """
    claimed = settings.read(folder / "config.json")
    tokenizer = vocabularies.read(folder)
    file = _weights_file(folder)
    tensors = _without_copies(weights.read(file), str(file))
    cfg = _without_padding(claimed, tokenizer.size, tensors, file, say)
    params, missing = names.to_ours(tensors, cfg, str(file))
    if missing:
        # The values of a seed, so that the same source makes the same base.
        key = jax.random.key(_FRESH_SEED, impl="threefry2x32")
        fresh = jax.device_get(heads.init_params(cfg, key))
        for part in missing:
            params[part] = fresh[part]
            held = ", ".join(f"{part}/{path}" for path in base_lib.flat(params[part]))
            say(f"not in {file.name}, freshly initialised: {held}")
    return Base(cfg, params, tokenizer, f"Hugging Face folder {folder.name}", missing)


def _weights_file(folder: epath.Path) -> epath.Path:
    path = folder / "model.safetensors"
    if path.exists():
        return path
    instead = {
        "model.safetensors.index.json": "weights in several files",
        "pytorch_model.bin": "a pickle, which may run code when it is read",
        "tf_model.h5": "TensorFlow's weights",
        "flax_model.msgpack": "Flax's weights",
        "bert_model.ckpt.index": "a TensorFlow 1 checkpoint",
    }
    for name, what in instead.items():
        if (folder / name).exists():
            raise InputError(
                f"{folder / name}: {what}: not read; load it in transformers and save it with "
                "save_pretrained as one model.safetensors"
            )
    raise InputError(f"{path}: no such file")


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


def _without_padding(
    claimed: Model, size: int, tensors: dict[str, np.ndarray], file: epath.Path, say: Say
) -> Model:
    """The model with as many pieces as the vocabulary has; the rows beyond are padding.

    Raises:
      InputError: the vocabulary, config.json and the word embeddings do not fit together.
    """
    word = tensors.get(names.WORD_EMBEDDINGS)
    if word is None:
        raise InputError(f"{file}: tensor {names.WORD_EMBEDDINGS!r} is missing")
    rows = claimed.vocab_size
    if word.shape[:1] != (rows,):
        raise InputError(
            f"{file}: tensor {names.WORD_EMBEDDINGS!r} has the shape {list(word.shape)}, "
            f"config.json says vocab_size={rows}"
        )
    padded = {-(-size // multiple) * multiple for multiple in _MULTIPLES}
    if rows != size and rows not in padded:
        raise InputError(
            f"{file}: tensor {names.WORD_EMBEDDINGS!r} has {rows} rows, the vocabulary beside it "
            f"has {size} pieces; put the vocabulary there that belongs to these weights"
        )
    bias = tensors.get(names.OUTPUT_BIAS)
    if bias is not None and bias.shape != (rows,):
        raise InputError(
            f"{file}: tensor {names.OUTPUT_BIAS!r} has the shape {list(bias.shape)}, config.json "
            f"says vocab_size={rows}"
        )
    if rows != size:
        say(f"the vocabulary has {size} pieces: rows {size} to {rows - 1} of the table left out")
    return dataclasses.replace(claimed, vocab_size=size)
