"""A base: weights to start from, as `import` writes them, whatever they were before.

B/base.json             the Model section, where the weights come from, which are fresh
B/params.safetensors    float32, by the paths of the tree: encoder/layers/query/kernel, ...
B/moments.safetensors   Adam's means of gradients and of their squares, if they were asked for:
                        mean/encoder/layers/query/kernel, square/...
B/tokenizer/            the tokenizer they belong to
B/COMPLETE              written last
"""

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
from etils import epath

from bert_jax import config, weights
from bert_jax.config import Experiment, Model
from bert_jax.errors import InputError
from bert_jax.storage.workdir import (
    is_complete,
    mark_complete,
    new_folder,
    read_json,
    sealed,
    write_atomic,
)
from bert_jax.text import tokenizer as tokenizer_lib

FORMAT_VERSION = 1

_JSON, _WEIGHTS, _TOKENIZER = "base.json", "params.safetensors", "tokenizer"
_MOMENTS = "moments.safetensors"
# What of a model its weights do not depend on; all else must be as it was.
_FREE = ("compute_dtype", "dropout_rng", "initializer_range")
_FREE_ENDING = "dropout_prob"


@dataclasses.dataclass
class Moments:
    """What the reference's Adam (`bert_adam`) keeps beside weights.

    Attributes:
      step: steps that it had done.
      mean: of the gradients, a tree like the parameters.
      square: of their squares, another.
    """

    step: int
    mean: dict[str, Any]
    square: dict[str, Any]


@dataclasses.dataclass
class Base:
    """Weights, and what they mean.

    Attributes:
      model: their shape.
      params: nested dict of float32 arrays, as model.heads.init_params gives it.
      tokenizer: whose ids the rows of the word embeddings are.
      source: in words, where they come from.
      fresh: parts (`pooler`, `masked_lm`, `next_sentence`) that the source did not have.
      moments: what a run that begins here begins with, too; None: with zeros.
      sha256: of the weights, and of the moments if there are some; "" before it is written.
    """

    model: Model
    params: dict[str, Any]
    tokenizer: tokenizer_lib.Tokenizer
    source: str
    fresh: tuple[str, ...] = ()
    moments: Moments | None = None
    sha256: str = ""


def is_base(folder: epath.Path) -> bool:
    """Whether a complete base lies here."""
    return (folder / _JSON).exists() and is_complete(folder)


def write(base: Base, folder: epath.Path) -> None:
    """Makes the folder, whole or not at all.

    Raises:
      InputError: something is there already, or it cannot be written.
    """
    with new_folder(folder) as made:
        weights.write(made / _WEIGHTS, flat(base.params), {"format": "bert_jax"})
        base.tokenizer.save(made / _TOKENIZER)
        record = {
            "format_version": FORMAT_VERSION,
            "model": dataclasses.asdict(base.model),
            "source": base.source,
            "fresh": list(base.fresh),
            "weights_sha256": weights.sha256(made / _WEIGHTS),
            "tokenizer_sha256": base.tokenizer.sha256,
        }
        if base.moments is not None:
            trees = {"mean": base.moments.mean, "square": base.moments.square}
            weights.write(made / _MOMENTS, flat(trees), {"format": "bert_jax"})
            record["moments_step"] = base.moments.step
            record["moments_sha256"] = weights.sha256(made / _MOMENTS)
        write_atomic(made / _JSON, json.dumps(sealed(record), indent=2) + "\n")
        mark_complete(made)


def read(folder: epath.Path) -> Base:
    """Opens a base.

    Raises:
      InputError: none here, or damaged.
    """
    record = _record(folder)
    where = folder / _JSON
    model = config.section(Model, record["model"], f"{where}: model")
    loaded = tokenizer_lib.load(folder / _TOKENIZER)
    found = {
        "weights_sha256": weights.sha256(folder / _WEIGHTS),
        "tokenizer_sha256": loaded.sha256,
        "moments_sha256": _moments_sha256(folder),
    }
    for name, now in found.items():
        if record.get(name, "") != now:
            raise InputError(f"{where}: {name} differs from what lies beside it; import it anew")
    moments = None
    if found["moments_sha256"]:
        trees = _tree(weights.read(folder / _MOMENTS))
        moments = Moments(record["moments_step"], trees["mean"], trees["square"])
    return Base(
        model,
        _tree(weights.read(folder / _WEIGHTS)),
        loaded,
        record["source"],
        tuple(record["fresh"]),
        moments,
        begins_with(folder),
    )


def begins_with(folder: epath.Path) -> str:
    """Which weights lie here now, and which moments: a hash of both.

    Raises:
      InputError: there are no weights.
    """
    found, moments = weights.sha256(folder / _WEIGHTS), _moments_sha256(folder)
    return hashlib.sha256(f"{found} {moments}".encode()).hexdigest() if moments else found


def _moments_sha256(folder: epath.Path) -> str:
    """Of the moments; "" if there are none."""
    return weights.sha256(folder / _MOMENTS) if (folder / _MOMENTS).exists() else ""


def flat(params: dict[str, Any], above: str = "") -> dict[str, np.ndarray]:
    """The leaves of a tree by their paths."""
    found: dict[str, np.ndarray] = {}
    for name, value in params.items():
        path = f"{above}{name}"
        found |= flat(value, path + "/") if isinstance(value, dict) else {path: np.asarray(value)}
    return found


def _tree(leaves: dict[str, np.ndarray]) -> dict[str, Any]:
    """The inverse of `flat`."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *above, name = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[name] = value
    return tree


def require_same_model(base: Base, model: Model, where: str) -> None:
    """Raises InputError if the weights are those of a model of another shape or function."""
    changed = [
        f"model.{line}"
        for line in config.differences(base.model, model, "all")
        if not (name := line.split(":")[0]).endswith(_FREE_ENDING) and name not in _FREE
    ]
    if changed:
        raise InputError(
            f"{where}: weights of another model (theirs -> yours: {'; '.join(changed)})"
        )


def require_same_tokenizer(base: Base, tokenizer: tokenizer_lib.Tokenizer, where: str) -> None:
    """Raises InputError if ids would stand for other pieces than the weights were made with."""
    if base.tokenizer.sha256 != tokenizer.sha256:
        raise InputError(
            f"{where}: weights of another vocabulary than the corpus's; prepare the text with "
            f"corpus.tokenizer={where}/{_TOKENIZER}"
        )


def require_same_weights(where: str, sha256: str) -> None:
    """Raises InputError if the base `where` holds other weights than those a run began with."""
    if begins_with(epath.Path(where)) != sha256:
        raise InputError(
            f"init_from={where}: holds other weights than those this run began with; put those "
            "back, or choose another --workdir"
        )


def start_of(experiment: Experiment) -> Base | None:
    """The weights that a run begins with; None: fresh ones.

    Raises:
      InputError: `init_from` names no base, or one of another model, or one with moments that
        the optimizer cannot go on with.
    """
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


def _record(folder: epath.Path) -> dict[str, Any]:
    if not is_base(folder):
        raise InputError(
            f"{folder}: no base here; make one with `bert-jax import SOURCE --workdir B` (SOURCE "
            "may be a run, too)"
        )
    record = read_json(folder / _JSON, FORMAT_VERSION, "import it anew", "import it anew")
    kinds = {
        "model": dict,
        "source": str,
        "fresh": list,
        "weights_sha256": str,
        "tokenizer_sha256": str,
    }
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise InputError(f"{folder / _JSON}: damaged, {name} is missing; import it anew")
    if "moments_sha256" in record and type(record.get("moments_step")) is not int:
        raise InputError(f"{folder / _JSON}: damaged, moments_step is missing; import it anew")
    return record
