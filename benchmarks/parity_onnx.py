"""Our outputs against those of ONNX files that optimum makes of exported folders.

`make parity-onnx` runs it. Models of random weights of four families (tests/interop/exports.py) are
exported as encoder, masked LM, classifier and reranker. `parity_onnx_peer` makes an ONNX file of
each, and onnxruntime computes it. The exit code is 1 if a difference exceeds 1e-5.
"""

import argparse
import itertools
import pathlib
import subprocess
import sys
import tempfile

import exports
import jax
import numpy as np

from bert_jax.config import Adapt
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import encode
from bert_jax.tasks import task_objective

_BOUND = 1e-5
_PEER = pathlib.Path(__file__).with_name("parity_onnx_peer.py")
FORMS = ("encoder", "masked_lm", *exports.TASKS)
TEXTS = (
    "we the people of the united states",
    "a more perfect union , in order to form we the people , states of union . we the people",
)


def token_ids() -> dict[str, np.ndarray]:
    """Returns the inputs of transformers for `TEXTS`, int64 [texts, tokens]."""
    tokenizer = exports.load("bert").tokenizer
    rows = [[tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id] for text in TEXTS]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def our_outputs(family: str, form: str, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the hidden states of an encoder, or the logits of a head."""
    names = {"input_ids": "input_ids", "segment_ids": "token_type_ids"}
    batch = {ours: inputs[name].astype(np.int32) for ours, name in names.items()}
    batch["input_mask"] = inputs["attention_mask"].astype(np.int32)
    if form in exports.TASKS:
        model = exports.load_finetuned(family, form).task_model
        head = len(model.params["head"]["bias"])
        task = task_objective.TaskObjective(model.model, "labels", "pooled", head, 1, Adapt())
        return np.asarray(task.logits(model.params, None, batch, None, Loop()))
    loaded = exports.load(family)
    module = heads.merge(loaded.model, loaded.params)
    ids, segments, mask = (batch[name] for name in ("input_ids", "segment_ids", "input_mask"))
    hidden = encode(module.encoder, loaded.model, ids, segments, mask, None, Loop())
    if form == "masked_lm":
        hidden = heads.token_logits(module, loaded.model, hidden)[..., : loaded.model.vocab_size]
    return np.asarray(hidden)


def main() -> int:
    """Prints the largest difference of each folder; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=".venv-onnx/bin/python", help="with optimum-onnx")
    flags, largest, inputs = parser.parse_args(), 0.0, token_ids()
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        np.savez(root / "inputs.npz", **inputs)
        for family, form in itertools.product(exports.FAMILIES, FORMS):
            exports.write(family, form, root / family / form)
        subprocess.run([flags.python, str(_PEER), name], check=True)
        for family, form in itertools.product(exports.FAMILIES, FORMS):
            theirs = np.load(root / family / form / "outputs.npz")["outputs"]
            is_token = inputs["attention_mask"] > 0 if theirs.ndim > 2 else slice(None)
            ours = jax.device_get(our_outputs(family, form, inputs))
            difference = float(np.abs(ours - theirs)[is_token].max())
            print(f"{family} {form}: {difference:.1e}, outputs up to {np.abs(theirs).max():.1f}")
            largest = max(largest, difference)
    print(f"largest difference {largest:.1e}")
    return int(not largest <= _BOUND)


if __name__ == "__main__":
    sys.exit(main())
