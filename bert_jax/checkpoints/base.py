"""A base: weights to start from, as `import` writes them, whatever they were before.

B/base.json             the Model section, where the weights come from, which are fresh, how vectors
                        of texts are made of them
B/params.safetensors    float32, by the paths of the tree: encoder/layers/query/kernel, ...
B/moments.safetensors   Adam's means of gradients and of their squares, if they were asked for:
                        mean/encoder/layers/query/kernel, square/...
B/head.safetensors      kernel and bias of the head of a task, if the source was fine-tuned for one
B/tokenizer/            the tokenizer they belong to
B/COMPLETE              written last
"""

import dataclasses
import hashlib
import io
import typing
from collections.abc import Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np
from etils import epath
from flax import traverse_util
from safetensors import deserialize
from safetensors.numpy import save

from bert_jax import config
from bert_jax.config import Experiment, Model
from bert_jax.errors import InputError, RustErrors, reading
from bert_jax.storage.copies import new_folder
from bert_jax.storage.workdir import (
    is_complete,
    mark_complete,
    read_json,
    translate_os_errors,
    write_json,
)
from bert_jax.text import tokenizer as tokenizer_lib

FORMAT_VERSION = 1

_JSON, _WEIGHTS, _TOKENIZER = "base.json", "params.safetensors", "tokenizer"
_MOMENTS, _HEAD = "moments.safetensors", "head.safetensors"
# What of a model its weights do not depend on; all else must be as it was.
_FREE = ("compute_dtype", "dropout_rng", "initializer_range", "initialization")
_FREE_ENDING = "dropout_prob"
_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass
class Moments:
    """The moments that the reference's Adam (`bert_adam`) keeps next to weights."""

    step: int  # steps that it had done
    mean: dict[str, Any]  # of the gradients, a tree like the parameters
    square: dict[str, Any]  # of their squares, another


@dataclasses.dataclass(frozen=True)
class TextVectors:
    """The way in which the vector of a text is made of those of its pieces."""

    # `mean` of all, [CLS] and [SEP] among them, the one of [CLS], or the last, of [SEP].
    pooling: Literal["mean", "cls", "last"] = "mean"
    normalize: bool = False  # whether it is scaled to length 1
    # Pieces that are read, those two among them; 0: as many as there are positions.
    max_length: int = 0
    query_prefix: str = ""  # what stands before a text that asks
    text_prefix: str = ""  # and before all others


@dataclasses.dataclass(frozen=True)
class Head:
    """The head of the task that a base was fine-tuned for."""

    kinds: tuple[str, ...]  # of `task.kind`, those whose outputs these are
    labels: tuple[str, ...]  # of the outputs; () where they have no names
    kernel: np.ndarray  # float32 [D, outputs]
    bias: np.ndarray  # float32 [outputs]
    # What it reads of a whole text: the vector of [CLS], or the mean of all pieces.
    pooling: Literal["cls", "mean"] = "cls"


@dataclasses.dataclass
class Base:
    """Weights, and what they mean."""

    model: Model  # their shape
    params: dict[str, Any]  # nested dict of float32 arrays, as model.heads.init_params gives it
    tokenizer: tokenizer_lib.Tokenizer  # whose ids the rows of the word embeddings are
    source: str = ""  # in words, where they come from
    # Parts (`pooler`, `masked_lm`, `next_sentence`) that the source did not have; or of one that it
    # had in part what is missing, `masked_lm/output_bias`.
    fresh: tuple[str, ...] = ()
    moments: Moments | None = None  # what a run that begins here begins with, too; None: with zeros
    # Of the weights, and of the moments if there are some; "" before it is written.
    sha256: str = ""
    # As its source makes them; None if the source says nothing of it.
    vectors: TextVectors | None = None
    head: Head | None = None  # None: it was fine-tuned for no task


def is_base(folder: epath.Path) -> bool:
    """Returns whether a complete base lies here."""
    return (folder / _JSON).exists() and is_complete(folder)


def write(base: Base, folder: epath.Path) -> None:
    """Writes a base into a new folder, whole or not at all."""
    with new_folder(folder) as made:
        write_tensors(made / _WEIGHTS, flat(base.params), {"format": "bert_jax"})
        base.tokenizer.save(made / _TOKENIZER)
        record = {
            "format_version": FORMAT_VERSION,
            "model": dataclasses.asdict(base.model),
            "source": base.source,
            "fresh": list(base.fresh),
            "weights_sha256": _sha256(made / _WEIGHTS),
            "tokenizer_sha256": base.tokenizer.sha256,
            "vectors": base.vectors and dataclasses.asdict(base.vectors),
        }
        if base.moments is not None:
            trees = {"mean": base.moments.mean, "square": base.moments.square}
            write_tensors(made / _MOMENTS, flat(trees), {"format": "bert_jax"})
            record["moments_step"] = base.moments.step
            record["moments_sha256"] = _sha256(made / _MOMENTS)
        if base.head is not None:
            tensors = {"kernel": base.head.kernel, "bias": base.head.bias}
            write_tensors(made / _HEAD, tensors, {"format": "bert_jax"})
            names = ("kinds", "labels", "pooling")
            record["head"] = {name: getattr(base.head, name) for name in names}
            record["head_sha256"] = _sha256(made / _HEAD)
        write_json(made / _JSON, record)
        mark_complete(made)


def read(folder: epath.Path) -> Base:
    """Opens a base, complete as `write` left it."""
    if not is_base(folder):
        raise InputError(
            f"{folder}: no base here; make one with `bert-jax import SOURCE --workdir B` (SOURCE "
            "may be a run, too)"
        )
    where, remedy = folder / _JSON, "import it again"
    record = read_json(where, FORMAT_VERSION, remedy, remedy)
    tokenizer = tokenizer_lib.load(folder / _TOKENIZER)
    files = {"weights": _WEIGHTS, "moments": _MOMENTS, "head": _HEAD}
    now = {f"{name}_sha256": _sha256(folder / file) for name, file in files.items()}
    for name, sha256 in (now | {"tokenizer_sha256": tokenizer.sha256}).items():
        if record.get(name, "") != sha256:
            raise InputError(f"{where}: {name} differs from what lies next to it; {remedy}")
    with reading(where, remedy):
        model = config.section(Model, record["model"], f"{where}: model")
        moments = None
        if now["moments_sha256"]:
            trees = _tree(folder / _MOMENTS)
            moments = Moments(record["moments_step"], trees["mean"], trees["square"])
        params, fresh = _tree(folder / _WEIGHTS), tuple(record["fresh"])
        source, vectors, head = record["source"], vectors_of(record), None
        if now["head_sha256"]:
            kinds, labels = (tuple(record["head"][name]) for name in ("kinds", "labels"))
            pooling = record["head"].get("pooling", "cls")  # once there was no other
            head = Head(kinds, labels, **read_tensors(folder / _HEAD), pooling=pooling)
    sha256 = _together(now["weights_sha256"], now["moments_sha256"])
    return Base(model, params, tokenizer, source, fresh, moments, sha256, vectors, head)


def vectors_of(record: Mapping[str, Any]) -> TextVectors | None:
    """Returns how vectors are made, as a base or a run's checkpoint records it; None: unsaid."""
    recorded = record.get("vectors")
    return recorded and TextVectors(**recorded)


def begins_with(folder: epath.Path) -> str:
    """Returns a hash of the weights that lie here now, and of the moments."""
    return _together(_sha256(folder / _WEIGHTS), _sha256(folder / _MOMENTS))


def _together(params: str, moments: str) -> str:
    return hashlib.sha256(f"{params} {moments}".encode()).hexdigest() if moments else params


def flat(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree by their paths."""
    return {k: np.asarray(v) for k, v in traverse_util.flatten_dict(params, sep="/").items()}


def _tree(path: epath.Path) -> dict[str, Any]:
    return traverse_util.unflatten_dict(read_tensors(path), sep="/")


def require_same_model(base: Base, model: Model, where: str) -> None:
    """Raises InputError if the weights are those of a model of another shape or function."""
    changed = [
        f"model.{line}"
        for line in config.differences(base.model, model, "all")
        if not (name := line.split(":")[0]).endswith(_FREE_ENDING) and name not in _FREE
    ]
    if changed:
        raise InputError(
            f"{where}: weights of another model (theirs -> yours: {'; '.join(changed)}); set these "
            "fields to theirs"
        )


def require_same_tokenizer(base: Base, tokenizer: tokenizer_lib.Tokenizer, where: str) -> None:
    """Raises InputError if ids would stand for other pieces than the weights were made with."""
    if base.tokenizer.sha256 != tokenizer.sha256:
        raise InputError(
            f"{where}: weights of another vocabulary than the corpus's; prepare the text with "
            f"corpus.tokenizer={where}/{_TOKENIZER}"
        )


def start_of(experiment: Experiment) -> Base | None:
    """Reads the weights that a run begins with; None: fresh ones."""
    if not experiment.init_from:
        return None
    base = read(epath.Path(experiment.init_from))
    require_same_model(base, experiment.model, experiment.init_from)
    if base.moments is not None and experiment.optimizer.name != "bert_adam":
        raise InputError(
            f"init_from={experiment.init_from}: holds the moments of bert_adam, which "
            f"optimizer.name={experiment.optimizer.name} does not go on with; import it without "
            "--with-optimizer"
        )
    return base


def read_tensors(path: epath.Path) -> dict[str, np.ndarray]:
    """Reads a file of safetensors by name; its floats of 16 and 32 bits as float32, losing nothing.

    Other types are kept as raw bytes: those who want such a tensor see a `uint8` array.
    """
    with translate_os_errors(path):
        content = path.read_bytes()
    with RustErrors(lambda: f"{path}: damaged or cut off; restore the complete safetensors file"):
        entries = deserialize(content)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in entries:
        dtype = _FLOATS.get(tensor["dtype"])
        if dtype is None:
            tensors[name] = np.frombuffer(tensor["data"], np.uint8)
        else:
            values = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
            tensors[name] = values.astype(np.float32)
    return tensors


def write_tensors(
    path: epath.Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Writes tensors of any layout; equal tensors give equal bytes, with one metadata entry."""
    # The library writes memory as it lies, whatever the strides say.
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    content = save(whole, metadata)
    with translate_os_errors(path):
        path.write_bytes(content)


def _sha256(path: epath.Path) -> str:
    """Returns the SHA-256 of a file that may be missing; "" if it is."""
    if not path.exists():
        return ""
    with translate_os_errors(path), path.open("rb") as file:
        return hashlib.file_digest(typing.cast(io.BufferedReader, file), "sha256").hexdigest()
