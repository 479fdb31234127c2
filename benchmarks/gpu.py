"""Tokens a second of training steps on GPUs, with attention by cuDNN, by XLA, and in PyTorch.

`XLA_PYTHON_CLIENT_PREALLOCATE=false python -m benchmarks.gpu`. Steps in bfloat16, on all GPUs of
this machine, take turns: one with `parallelism.attention=auto`, one with `xla`, and if the other
environment has PyTorch with CUDA, one of transformers with its fused attention (`sdpa`), eager and
compiled. No attention probabilities are dropped, since cuDNN's attention cannot; hidden states of
BERT are, a tenth. Figures are per GPU: tokens a second without padding, and the share of the peak
that the useful arithmetic takes, where attention counts whole rows. The wall time counts.

`modern_17m` and `modern_32m` have Ettin's vocabulary and rows of 1,024 tokens here. A name that
ends with `_packed` has rows of several documents, which attend to themselves only.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import measure, ours
from bert_jax import config, hardware
from bert_jax.config import Model, Parallelism
from bert_jax.data.batches import Batch
from bert_jax.model import cudnn_attention, flops

_PACKED = "_packed"
_MASKED = 0.15  # share of the tokens of a row
_DOCUMENTS = 5  # of a packed row, in the mean; their lengths are random
_ETTIN = {"vocab_size": 50_368, "max_position_embeddings": 1_024}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its rows."""

    model: Model
    rows: int  # of a GPU
    length: int


def _load(name: str, **fields: Any) -> Model:
    """Returns the model of an experiment, in bfloat16 and without dropout of probabilities."""
    model = config.load(str(measure.ROOT / "experiments" / f"{name}.py")).model
    fields |= {"compute_dtype": "bfloat16", "dropout_rng": "rbg16"}
    return dataclasses.replace(model, attention_probs_dropout_prob=0.0, **fields)


_MICRO = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
_MICRO |= {"num_hidden_layers": 2, "local_window": 16}
_CASES: dict[str, Callable[[], Case]] = {
    "base_128": lambda: Case(_load("bert_base"), 256, 128),
    "base_512": lambda: Case(_load("bert_base"), 64, 512),
    "large_128": lambda: Case(_load("bert_large"), 128, 128),
    "large_512": lambda: Case(_load("bert_large"), 32, 512),
    "modern_base_1024": lambda: Case(_load("modern_base_pod"), 32, 1_024),
    "modern_17m": lambda: Case(_load("modern_17m", **_ETTIN), 128, 1_024),
    "modern_32m": lambda: Case(_load("modern_32m", **_ETTIN), 96, 1_024),
    "micro": lambda: Case(_load("modern_17m", **_MICRO), 2, 64),
    "micro_bert": lambda: Case(_load("bert_base", **_MICRO | {"local_window": 128}), 2, 64),
}
NAMES = [
    name + packed for name in _CASES if not name.startswith("micro") for packed in ("", _PACKED)
]


def case_of(name: str) -> Case:
    """Returns the case of a name, with or without `_packed`."""
    return _CASES[name.removesuffix(_PACKED)]()


def make_batch(case: Case, rows: int, packed: bool) -> Batch:
    """Returns random rows without padding: of one text each, or of several documents."""
    rng, length = np.random.default_rng(0), case.length
    count, shape = round(_MASKED * length), (rows, length)
    ids = rng.integers(5, case.model.vocab_size, shape).astype(np.int32)
    shuffled = rng.permuted(np.tile(np.arange(length, dtype=np.int32), (rows, 1)), axis=1)
    positions = np.sort(shuffled[:, :count], axis=1)
    batch = {
        "rows": np.arange(rows, dtype=np.uint32),
        "row_weights": np.ones(rows, np.float32),
        "input_ids": ids,
        "segment_ids": np.zeros(shape, np.int32),
        "input_mask": np.ones(shape, np.int32),
        "masked_lm_positions": positions,
        "masked_lm_ids": np.take_along_axis(ids, positions, axis=1),
        "masked_lm_weights": np.ones((rows, count), np.float32),
        "next_sentence_labels": rng.integers(0, 2, rows).astype(np.int32),
    }
    if not packed:
        return batch
    begins = rng.random(shape) < (_DOCUMENTS - 1) / length
    begins[:, 0] = True
    numbers = np.cumsum(begins, axis=1, dtype=np.int32)
    first = np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1)
    return batch | {
        "example_numbers": numbers,
        "positions": (np.arange(length) - first).astype(np.int32),
    }


def main() -> None:
    """Measures, case after case."""
    flags = measure.parser(
        __doc__,
        cases=(",".join(NAMES), "also micro and micro_bert, for tests"),
        rows=(0, "rows of a GPU; default: the case's"),
        remat=("dots", "or none, which needs more memory"),
        rounds=5,
        steps=(10, "of a turn"),
        python=measure.TORCH,
    ).parse_args()
    figures, details = {}, {}
    for name in flags.cases.split(","):
        case = case_of(name)
        case = dataclasses.replace(case, rows=flags.rows or case.rows)
        found, details[name] = compare(name, case, flags)
        figures |= found
        measure.report("gpu", figures, details, flags.out)  # the larger models take long


def compare(name: str, case: Case, flags: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the figures of a case, and seconds of its steps."""
    packed, devices = name.endswith(_PACKED), jax.device_count()
    batch = make_batch(case, case.rows * devices, packed)
    model, turns = case.model, {}
    # Rows of several documents have no pairs.
    objective = "mlm" if packed or model.kind == "modern" else "mlm_nsp"
    for attention in ("auto", "xla"):
        parallelism = Parallelism(attention=attention, remat=flags.remat)
        bare = ours.Bare(model, batch, parallelism, objective)
        turns[attention] = lambda bare=bare: bare.take(flags.steps)[1]
    reason = cudnn_attention.training_refusal(model, jax.devices()[0], Parallelism())
    details: dict[str, Any] = {"rows": case.rows, "why_auto_is_xla": reason}
    if packed or not os.path.exists(flags.python):
        details["seconds"] = measure.in_turns(turns, flags.rounds)
    else:
        with measure.peer(flags.python, "step", threads=1) as peer:
            details |= _add_peer(peer, turns, case, batch, flags.steps)
            details["seconds"] = measure.in_turns(turns, flags.rounds)
    tokens = int(batch["input_mask"].sum()) / devices
    count = batch["masked_lm_positions"].shape[1]
    useful = flops.train_step_flops(model, case.rows, case.length, count)
    peak = hardware.peak_flops(model.compute_dtype)
    figures = {}
    for entry, seconds in details["seconds"].items():
        # A peer uses one GPU, with the rows of one.
        figures[f"{name}_{entry}_tokens_per_second"] = tokens / min(seconds)
        if peak is not None:
            figures[f"{name}_{entry}_utilisation"] = useful / min(seconds) / (peak / devices)
    return figures, details


def _add_peer(
    peer: measure.Ask, turns: dict[str, Any], case: Case, batch: Batch, steps: int
) -> dict[str, Any]:
    """Adds the turns of transformers, if its environment can use the device; returns versions."""
    model = case.model
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    names += "intermediate_size", "max_position_embeddings"
    fields: dict[str, Any] = {name: getattr(model, name) for name in names}
    if model.kind == "modern":
        fields |= {"local_attention": model.local_window, "pad_token_id": 0}
        fields |= {"global_attn_every_n_layers": model.global_every}
    else:
        fields |= {"attention_probs_dropout_prob": 0.0}
    device = "cuda" if jax.devices()[0].platform == "gpu" else "cpu"
    rows = {name: values[: case.rows].tolist() for name, values in batch.items()}
    build = {"fields": fields, "batch": rows, "turn": steps, "device": device}
    try:
        versions = peer("build", **build, kind=model.kind)
    except RuntimeError as error:  # no PyTorch, or none with CUDA
        return {"no_peer": str(error)}
    for how in ("eager", "compiled"):
        entry = f"torch_{how}"
        # The stronger form: it scores the vocabulary at the masked positions only.
        peer("add", entry=entry, dtype="bfloat16", kind="patched", how=how)
        turns[entry] = lambda entry=entry: peer("step", entry=entry)[1]
    return {"versions": versions}


if __name__ == "__main__":
    main()
