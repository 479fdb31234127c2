"""A base: weights to start from, as `import` writes them, whatever they were before.

B/base.json             the Model section, where the weights come from, which are fresh
B/params.safetensors    float32, by the paths of the tree: encoder/layers/query/kernel, ...
B/tokenizer/            the tokenizer they belong to
B/COMPLETE              written last
"""

import dataclasses
import json
from typing import Any

import numpy as np
from etils import epath

from bert_jax import resolve, weights
from bert_jax.config import Experiment, InputError, Model
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.workdir import is_complete, mark_complete, new_folder, read_json, write_atomic

FORMAT_VERSION = 1

_JSON, _WEIGHTS, _TOKENIZER = "base.json", "params.safetensors", "tokenizer"
# What of a model its weights do not depend on; all else must be as it was.
_FREE = ("compute_dtype", "dropout_rng", "initializer_range")
_FREE_ENDING = "dropout_prob"


@dataclasses.dataclass
class Base:
    """Weights, and what they mean.

    Attributes:
      model: their shape.
      params: nested dict of float32 arrays, as model.heads.init_params gives it.
      tokenizer: whose ids the rows of the word embeddings are.
      source: in words, where they come from.
      fresh: parts (`pooler`, `masked_lm`, `next_sentence`) that the source did not have.
      sha256: of the file of weights; "" before it is written.
    """

    model: Model
    params: dict[str, Any]
    tokenizer: tokenizer_lib.Tokenizer
    source: str
    fresh: tuple[str, ...] = ()
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
        write_atomic(made / _JSON, json.dumps(record, indent=2) + "\n")
        mark_complete(made)


def read(folder: epath.Path) -> Base:
    """Opens a base.

    Raises:
      InputError: none here, or damaged.
    """
    record = _record(folder)
    where = folder / _JSON
    model = resolve.section(Model, record["model"], f"{where}: model")
    loaded = tokenizer_lib.load(folder / _TOKENIZER)
    sha256 = weights_sha256(folder)
    for name, now in (("weights_sha256", sha256), ("tokenizer_sha256", loaded.sha256)):
        if record[name] != now:
            raise InputError(f"{where}: {name} differs from what lies beside it; import it anew")
    params: dict[str, Any] = {}
    for path, value in weights.read(folder / _WEIGHTS).items():
        *above, name = path.split("/")
        node = params
        for key in above:
            node = node.setdefault(key, {})
        node[name] = value
    return Base(model, params, loaded, record["source"], tuple(record["fresh"]), sha256)


def weights_sha256(folder: epath.Path) -> str:
    """Which weights lie here now.

    Raises:
      InputError: there are none.
    """
    return weights.sha256(folder / _WEIGHTS)


def flat(params: dict[str, Any], above: str = "") -> dict[str, np.ndarray]:
    """The leaves of a tree by their paths."""
    found: dict[str, np.ndarray] = {}
    for name, value in params.items():
        path = f"{above}{name}"
        found |= flat(value, path + "/") if isinstance(value, dict) else {path: np.asarray(value)}
    return found


def require_same_model(base: Base, model: Model, where: str) -> None:
    """Raises InputError if the weights are those of a model of another shape or function."""
    changed = [
        f"model.{line}"
        for line in resolve.differences(base.model, model, "all")
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
    if weights_sha256(epath.Path(where)) != sha256:
        raise InputError(
            f"init_from={where}: holds other weights than those this run began with; put those "
            "back, or choose another --workdir"
        )


def start_of(experiment: Experiment) -> Base | None:
    """The weights that a run begins with; None: fresh ones.

    Raises:
      InputError: `init_from` names no base, or one of another model.
    """
    if not experiment.init_from:
        return None
    base = read(epath.Path(experiment.init_from))
    require_same_model(base, experiment.model, experiment.init_from)
    return base


def _record(folder: epath.Path) -> dict[str, Any]:
    if not is_base(folder):
        raise InputError(
            f"{folder}: no base here; make one with `bert-jax import SOURCE --workdir B` (SOURCE "
            "may be a run, too)"
        )
    record = read_json(folder / _JSON, FORMAT_VERSION)
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
    return record
