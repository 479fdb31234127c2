"""TensorFlow 1 checkpoints as google-research/bert writes and reads them.

PREFIX.index, PREFIX.data-*    the variables; PREFIX is bert_model.ckpt, or as it was released
bert_config.json, vocab.txt    beside them
tokenizer_config.json          ours, which their code passes over: whether text is lower-cased
"""

from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from bert_jax.base import Base, Moments
from bert_jax.errors import InputError
from bert_jax.interop import fitting, names, settings, tf1_files, tf1_names, vocabularies
from bert_jax.interop.fitting import Say
from bert_jax.predict import Trained
from bert_jax.storage.workdir import new_folder

DESCRIPTION = "TensorFlow 1 checkpoint"

_PREFIX = "bert_model.ckpt"


def find(source: epath.Path) -> epath.Path | None:
    """The common beginning of the files of a checkpoint; None if `source` is none.

    Args:
      source: that beginning, with or without .index, or a folder with one checkpoint and no
        safetensors.

    Raises:
      InputError: a folder with several, of which none has the name of the released ones.
    """
    if source.is_dir():
        if any(source.glob("*.safetensors*")):
            return None
        found = sorted(path.name.removesuffix(".index") for path in source.glob("*.ckpt*.index"))
        if len(found) > 1 and _PREFIX not in found:
            raise InputError(f"{source}: several checkpoints; name one of {', '.join(found)} there")
        if not found:
            return None
        return source / (_PREFIX if _PREFIX in found else found[0])
    name = source.name.removesuffix(".index")
    if not name:
        return None
    prefix = source.with_name(name)
    return prefix if prefix.with_name(f"{prefix.name}.index").exists() else None


def read(prefix: epath.Path, what: Literal["params", "with_moments"], say: Say) -> Base:
    """A base of a checkpoint.

    Args:
      prefix: the common beginning of its files, as `find` gives it.
      what: `with_moments` wants what Adam keeps, too.
      say: is told what is not as in the source.

    Raises:
      InputError: nothing that can be read, or that does not fit together.
    """
    folder = prefix.parent
    claimed = settings.read_tf1(folder / tf1_names.CONFIG, say)
    tokenizer = vocabularies.read_plain(folder, say)
    found = tf1_files.read(prefix, lambda name: what == "with_moments" or not _is_kept(name))
    for name, value in found.items():
        if name != tf1_names.STEP and value.dtype != np.float32:
            raise InputError(f"{prefix}: variable {name!r} is {value.dtype}; only float32 is read")
    variables = {name: value for name, value in found.items() if not _is_kept(name)}
    source = f"TensorFlow checkpoint {prefix.name} of {folder.absolute().name}"
    base = fitting.base_of(variables, tf1_names.naming(), claimed, tokenizer, prefix, source, say)
    if what == "with_moments":
        base.moments = _moments(found, base, prefix)
    return base


def _is_kept(name: str) -> bool:
    """Whether it is not of the model, but of its training."""
    return name == tf1_names.STEP or name.endswith(tuple(f"/{slot}" for slot in tf1_names.SLOTS))


def _moments(found: dict[str, np.ndarray], base: Base, prefix: epath.Path) -> Moments:
    step = found.get(tf1_names.STEP)
    if step is None or step.shape != () or step.dtype.kind != "i" or not 0 <= step < 2**32:
        raise InputError(
            f"{prefix}: --with-optimizer: no count of steps, {tf1_names.STEP!r}, in it; a released "
            "checkpoint holds weights alone, leave it out"
        )
    trees = []
    for slot in tf1_names.SLOTS:
        held = {name: value for name, value in found.items() if name.endswith(f"/{slot}")}
        tree, missing = names.to_ours(held, base.model, str(prefix), tf1_names.naming(slot))
        if missing != base.fresh:
            raise InputError(
                f"{prefix}: --with-optimizer: {slot} is not kept of the parts that are there"
            )
        zeros = {part: jax.tree.map(np.zeros_like, base.params[part]) for part in missing}
        trees.append(tree | zeros)
    return Moments(int(step), *trees)


def write(trained: Trained, target: epath.Path) -> None:
    """Writes a folder that google-research/bert reads, whole or not at all.

    Args:
      trained: what to write, in float32, and its moments if it has some; parts that were never
        trained are left out, since nothing there could say so.
      target: where it goes; nothing may be there.

    Raises:
      InputError: something is there, it cannot be written, or the vocabulary is no WordPiece.
    """
    tf1_files.tensorflow(str(target))  # before anything is made
    cfg, kept = trained.model, trained.moments
    variables = _values(trained, trained.params)
    if kept is not None:
        for slot, tree in zip(tf1_names.SLOTS, (kept.mean, kept.square), strict=True):
            variables |= _values(trained, tree, slot)
        variables[tf1_names.STEP] = np.array(kept.step, np.int64)
    with new_folder(target) as folder:
        vocabularies.write_plain(trained.tokenizer, folder)
        (folder / tf1_names.CONFIG).write_text(settings.write_tf1(cfg), encoding="utf-8")
        tf1_files.write(folder / _PREFIX, variables)


def _values(trained: Trained, tree: dict[str, Any], slot: str = "") -> dict[str, np.ndarray]:
    """The variables of what was trained, or one of their slots."""
    wanted = tf1_names.naming(slot).tensors(trained.model)
    held = (tensor for tensor in wanted if tensor.part not in trained.fresh)
    return names.values(tree, trained.model, held)
