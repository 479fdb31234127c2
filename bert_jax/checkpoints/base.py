"""A base: weights to start from, in the format that `import` writes.

B/base.json             the Model section, the source of the weights, freshly initialized parts, how
                        to compute vectors of texts
B/params.safetensors    float32, by the paths of the tree: encoder/layers/query/kernel, ...
B/moments.safetensors   Adam's means of gradients and of their squares, with --with-optimizer:
                        mean/encoder/layers/query/kernel, square/...
B/head.safetensors      kernel and bias of the head of a task, if the source was fine-tuned for one
B/tokenizer/            the tokenizer of the weights
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
from bert_jax.errors import InputError, TranslateRustErrors, translate_parser_errors
from bert_jax.storage.copies import new_folder
from bert_jax.storage.workdir import (
    HEAD,
    is_complete,
    mark_complete,
    read_json,
    translate_os_errors,
    write_json,
)
from bert_jax.text import tokenizer as tokenizer_lib

FORMAT_VERSION = 1

_JSON, _WEIGHTS, _TOKENIZER = "base.json", "params.safetensors", "tokenizer"
_MOMENTS = "moments.safetensors"
# Endings of fields of a model that may differ from those of the weights.
_FREE = ("compute_dtype", "dropout_rng", "initializer_range", "initialization", "dropout_prob")
_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass
class Moments:
    """The moments of the reference's Adam (`bert_adam`)."""

    step: int  # steps done
    mean: dict[str, Any]  # of the gradients; a tree like the parameters
    square: dict[str, Any]  # of their squares; a tree like the parameters


# Parts of the weights that only vectors of texts use: see `TextVectors.form` and `.dense_width`.
VECTOR_PARTS = frozenset({"projection", "dense"})


@dataclasses.dataclass(frozen=True)
class TextVectors:
    """Settings of text vectors: how hidden states of tokens become the vector of a text."""

    # The mean of all tokens with [CLS] and [SEP], the state of [CLS], or that of the last, [SEP].
    pooling: Literal["mean", "cls", "last"] = "mean"
    normalize: bool = False  # whether the vector is scaled to length 1
    max_length: int = 0  # most tokens that are read, with [CLS] and [SEP]; 0: all positions
    query_prefix: str = ""  # prompt that is put before a query
    text_prefix: str = ""  # prompt that is put before a document
    # dense: one vector, by `pooling` and `normalize`; sparse: a weight for each token of the
    # vocabulary; multi_vector: a vector for each token, by the part `projection` of the weights.
    form: Literal["dense", "sparse", "multi_vector"] = "dense"
    # For multi_vector, as in `config.MultiVectors`.
    query_length: int = 0
    skipped_tokens: Literal["punctuation", "none"] = "none"
    # For dense: numbers of a vector after the part `dense` of the weights, a linear layer and an
    # activation after the pooling; 0: there is no such part.
    dense_width: int = 0
    dense_activation: Literal["identity", "tanh"] = "identity"


@dataclasses.dataclass(frozen=True)
class Head:
    """The head of the task that a base was fine-tuned for."""

    # Values of `task.kind` that the head fits; `predict` uses the first.
    kinds: tuple[str, ...]
    labels: tuple[str, ...]  # names of the outputs; () if they have none
    kernel: np.ndarray  # float32 [D, outputs]
    bias: np.ndarray  # float32 [outputs]
    pooling: Literal["cls", "mean"] = "cls"  # reads the state of [CLS], or the mean of all tokens
    settings: tuple[str, ...] = ()  # FIELD=VALUE of its `Finetuning`; see `tasks.imported_head`


@dataclasses.dataclass
class Base:
    """Weights with their model and tokenizer."""

    model: Model
    params: dict[str, Any]  # nested dict of float32 arrays, as from model.heads.init_params
    tokenizer: tokenizer_lib.Tokenizer  # its ids are the rows of the word embeddings
    source: str = ""  # description of where the weights come from
    # Freshly initialized parts that the source did not have: `pooler`, `masked_lm`,
    # `next_sentence`, or an array of a part, such as `masked_lm/output_bias`.
    fresh: tuple[str, ...] = ()
    moments: Moments | None = None  # initial moments of a run; None: zeros
    sha256: str = ""  # of the weights, and of the moments if there are any; "" before `write`
    vectors: TextVectors | None = None  # settings of vectors; None: the source has none
    head: Head | None = None  # None: the source was not fine-tuned for a task


def is_base(folder: epath.Path) -> bool:
    """Returns whether the folder holds a complete base."""
    return (folder / _JSON).exists() and is_complete(folder)


def write(base: Base, folder: epath.Path) -> None:
    """Writes a base into a new folder, completely or not at all."""
    metadata = {"format": "bert_jax"}
    with new_folder(folder) as new:
        write_tensors(new / _WEIGHTS, flatten(base.params), metadata)
        base.tokenizer.save(new / _TOKENIZER)
        record = {
            "format_version": FORMAT_VERSION,
            "model": dataclasses.asdict(base.model),
            "source": base.source,
            "fresh": list(base.fresh),
            "weights_sha256": _sha256(new / _WEIGHTS),
            "tokenizer_sha256": base.tokenizer.sha256,
            "vectors": base.vectors and dataclasses.asdict(base.vectors),
        }
        if base.moments is not None:
            trees = {"mean": base.moments.mean, "square": base.moments.square}
            write_tensors(new / _MOMENTS, flatten(trees), metadata)
            step, sha256 = base.moments.step, _sha256(new / _MOMENTS)
            record |= {"moments_step": step, "moments_sha256": sha256}
        if base.head is not None:
            head = dict(vars(base.head))
            tensors = {name: head.pop(name) for name in ("kernel", "bias")}
            write_tensors(new / HEAD, tensors, metadata)
            record |= {"head": head, "head_sha256": _sha256(new / HEAD)}
        write_json(new / _JSON, record)
        mark_complete(new)


def read(folder: epath.Path) -> Base:
    """Reads a complete base; verifies its checksums."""
    if not is_base(folder):
        raise InputError(
            f"{folder}: no base here; make one with `bert-jax import SOURCE --workdir B` (SOURCE "
            "may be a run, too)"
        )
    path, remedy = folder / _JSON, "import it again"
    record = read_json(path, FORMAT_VERSION, remedy, remedy)
    tokenizer = tokenizer_lib.load(folder / _TOKENIZER)
    files = {"weights": _WEIGHTS, "moments": _MOMENTS, "head": HEAD}
    hashes = {f"{name}_sha256": _sha256(folder / file) for name, file in files.items()}
    for name, sha256 in (hashes | {"tokenizer_sha256": tokenizer.sha256}).items():
        if record.get(name, "") != sha256:
            raise InputError(f"{path}: {name} is not that of the file in this folder; {remedy}")
    with translate_parser_errors(path, remedy):
        model = config.build_section(Model, record["model"], f"{path}: model")
        moments = None
        if hashes["moments_sha256"]:
            trees = _tree(folder / _MOMENTS)
            moments = Moments(record["moments_step"], trees["mean"], trees["square"])
        params, fresh = _tree(folder / _WEIGHTS), tuple(record["fresh"])
        source, vectors, head = record["source"], read_vectors(record), None
        if hashes["head_sha256"]:
            # Older versions wrote neither `pooling` nor `settings`.
            fields = {"settings": ()} | record["head"]
            lists = {name: tuple(fields[name]) for name in ("kinds", "labels", "settings")}
            head = Head(**fields | lists | read_tensors(folder / HEAD))
    sha256 = _combine_hashes(hashes["weights_sha256"], hashes["moments_sha256"])
    return Base(model, params, tokenizer, source, fresh, moments, sha256, vectors, head)


def read_vectors(record: Mapping[str, Any]) -> TextVectors | None:
    """Reads the TextVectors of a base's record or a checkpoint's notes; None if it has none."""
    vectors = record.get("vectors")
    return vectors and TextVectors(**vectors)


def hash_weights(folder: epath.Path) -> str:
    """Returns a hash of the weights in the folder now, and of the moments if there are any."""
    return _combine_hashes(_sha256(folder / _WEIGHTS), _sha256(folder / _MOMENTS))


def _combine_hashes(params: str, moments: str) -> str:
    return hashlib.sha256(f"{params} {moments}".encode()).hexdigest() if moments else params


def flatten(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns {path: leaf} of a tree of parameters."""
    return {k: np.asarray(v) for k, v in traverse_util.flatten_dict(params, sep="/").items()}


def _tree(path: epath.Path) -> dict[str, Any]:
    return traverse_util.unflatten_dict(read_tensors(path), sep="/")


def require_same_model(base: Base, model: Model, where: str) -> None:
    """Raises InputError if the weights belong to a model of another shape or function."""
    changed = [
        f"model.{line}"
        for line in config.differences(base.model, model, "all")
        if not line.split(":")[0].endswith(_FREE)
    ]
    if changed:
        raise InputError(
            f"{where}: weights of another model (base -> experiment: {'; '.join(changed)}); set "
            "these fields to those of the base"
        )


def require_same_tokenizer(base: Base, tokenizer: tokenizer_lib.Tokenizer, where: str) -> None:
    """Raises InputError if the weights were trained with another tokenizer."""
    if base.tokenizer.sha256 != tokenizer.sha256:
        raise InputError(
            f"{where}: weights of another vocabulary than the corpus's; prepare the text with "
            f"corpus.tokenizer={where}/{_TOKENIZER}"
        )


def load_initial(experiment: Experiment) -> Base | None:
    """Reads the base of `init_from`; None for a fresh initialization."""
    if not experiment.init_from:
        return None
    base = read(epath.Path(experiment.init_from))
    require_same_model(base, experiment.model, experiment.init_from)
    if base.vectors is not None and base.vectors.dense_width:
        raise InputError(
            f"init_from={experiment.init_from}: its vectors end in a Dense layer, which "
            "pre-training does not keep; delete modules.json of the imported folder, and import "
            "only the encoder"
        )
    if base.moments is not None and experiment.optimizer.name != "bert_adam":
        raise InputError(
            f"init_from={experiment.init_from}: holds the moments of bert_adam, which "
            f"optimizer.name={experiment.optimizer.name} cannot use; import it without "
            "--with-optimizer"
        )
    return base


def read_tensors(path: epath.Path) -> dict[str, np.ndarray]:
    """Reads {name: tensor} of a safetensors file; floats of 16 and 32 bits become float32.

    Tensors of other types are returned as raw bytes, in a `uint8` array.
    """
    with translate_os_errors(path):
        content = path.read_bytes()
    with TranslateRustErrors(
        lambda: f"{path}: damaged or cut off; restore the complete safetensors file"
    ):
        entries = deserialize(content)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in entries:
        dtype = _FLOATS.get(tensor["dtype"])
        tensors[name] = np.frombuffer(tensor["data"], np.uint8 if dtype is None else dtype)
        if dtype is not None:
            tensors[name] = tensors[name].reshape(tensor["shape"]).astype(np.float32)
    return tensors


def write_tensors(
    path: epath.Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Writes tensors of any layout; equal tensors and one metadata entry give equal bytes."""
    # The library writes the raw memory and ignores strides.
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    with translate_os_errors(path):
        path.write_bytes(save(contiguous, metadata))


def _sha256(path: epath.Path) -> str:
    """Returns the SHA-256 of a file; "" if it is missing."""
    if not path.exists():
        return ""
    with translate_os_errors(path), path.open("rb") as file:
        return hashlib.file_digest(typing.cast(io.BufferedReader, file), "sha256").hexdigest()
