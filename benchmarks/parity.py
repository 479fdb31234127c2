"""Our numbers against PyTorch's, through folders that `export` writes: `make parity`.

Exports a small model of each kind in every form, computes its outputs, trains it for 50 steps; then
`parity_peer` does the same in its own environment with what it loads from these folders and says
how far it is off. At last what transformers saves is imported and compared bit for bit. No figure
is a speed; the exit code is 1 if one is beyond its bound.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from bert_jax import config
from bert_jax.checkpoints import base
from bert_jax.config import Experiment, Model, Optimizer, Phase
from bert_jax.data import corpus
from bert_jax.interop import huggingface, importing, names, weights
from bert_jax.model import heads
from bert_jax.model.encoder import Loop, padded_vocab_size
from bert_jax.model.kinds import encode
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.running import lines as lines_lib
from bert_jax.storage.mirror import open_workdir
from bert_jax.text import tokenizer
from bert_jax.training import feed, optimizer, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective as objective_lib

Arrays = dict[str, Any]  # by name
STEPS = 50
_MODERN = ("model.kind=modern", "model.intermediate_size=344")
# What of tiny_paper.py is otherwise, a line a family. A window is shorter than a row.
MODELS = {
    "bert": (),
    "roberta": (
        *("model.type_vocab_size=1", "model.position_offset=1", "model.layer_norm_eps=1e-5"),
        *("data.objective=mlm", "data.short_seq_prob=0"),
    ),
    "distilbert": ("model.type_vocab_size=0", "data.objective=mlm", "data.short_seq_prob=0"),
    "modern": (*_MODERN, "model.num_hidden_layers=4", "model.local_window=16"),
    "modern, stretched": (
        *(*_MODERN, "model.num_hidden_layers=3", "model.local_window=17"),
        *("model.global_rotary_scaling=yarn:32:4", "model.output_table=own"),
    ),
}
TEXTS = [
    "The quick brown Fox jumps over the lazy dog.",
    "Fellow-citizens of the Senate and of the House of Representatives:",
    "Überraschung, naïve café: ÅNGSTRÖM, İstanbul, ǅ, ﬁne",
    "日本語 text 漢字 한국어 ไทย",
    "a" * 150 + " " + "b" * 250,
    "don't stop-me_now (please)! 3.14% $5 #x @y ~z `w` ^^",
    "tabs\tand\nlines\r\n and\u00a0spaces \u200b\u0007bell \ufffd \u2028",
    "",
    "   ",
    "Ελληνικά και кириллица, עברית, العربية 😀👩‍👩‍👧",
    "unaffable unwantedness internationalization",
]


def main() -> int:
    """Makes the folders, asks the peer, and imports what it saved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=".venv-torch/bin/python", help="with torch")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        codes = [compare(model, pathlib.Path(name) / model, flags.python) for model in MODELS]
    return max(codes)


def compare(model: str, folder: pathlib.Path, python: str) -> int:
    """Compares one of `MODELS`: 1 if a figure is beyond its bound."""
    print(model, flush=True)
    trained, prepared, experiment = make_model(folder, MODELS[model])
    # The class of causal encoders has golden figures in the tests.
    architectures = {
        kind: name
        for kind, name in huggingface.ARCHITECTURES[names.family(trained.model)].items()
        if kind != "causal_lm"
    }
    for kind in architectures:
        huggingface.write_folder(trained, kind, "float32", epath.Path(folder / kind))
    cased = tokenizer.WordPiece(trained.tokenizer.vocab, "cased")
    other = dataclasses.replace(trained, tokenizer=cased)
    huggingface.write_folder(other, "encoder", "float32", epath.Path(folder / "cased"))
    ids = {
        "encoder": [trained.tokenizer.encode(text) for text in TEXTS],
        "cased": [cased.encode(text) for text in TEXTS],
    }
    says = {"texts": TEXTS, "ids": ids, "architectures": architectures}
    (folder / "says.json").write_text(json.dumps(says))
    above = {part: trained.params[part] for part in ("pooler", "next_sentence")}
    np.savez(folder / "above.npz", **base.flatten(above))
    np.savez(folder / "outputs.npz", **outputs(trained, prepared, experiment))
    for name, trains in {"adamw": experiment, **also(experiment)}.items():
        if name == "adamw" or model == "bert":
            np.savez(folder / f"training {name}.npz", **training(trained, prepared, trains))
    command = [python, "-m", "benchmarks.parity_peer", str(folder)]
    code = subprocess.run(command, check=False).returncode
    return code or returned(trained, architectures, folder)


def also(experiment: Experiment) -> dict[str, Experiment]:
    """What else BERT is trained by: another optimizer, and two objectives in turn."""
    (phase,) = experiment.phases
    half = dataclasses.replace(phase, steps=STEPS // 2)
    causal = dataclasses.replace(half, objective="causal", max_predictions_per_seq=63)
    muon = config.override(
        experiment, ["optimizer.name=muon", "optimizer.matrix_learning_rate=0.01"]
    )
    return {
        "muon": muon,
        "causal, then mlm_nsp": dataclasses.replace(experiment, phases=(causal, half)),
    }


def make_model(
    folder: pathlib.Path, settings: Sequence[str]
) -> tuple[LoadedModel, PreparedCorpus, Experiment]:
    """tiny_paper.py's model on its corpus without dropout; no parameter is zero or one."""
    experiment = config.override(
        config.load("experiments/tiny_paper.py"),
        ["model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0", *settings],
    )
    experiment = dataclasses.replace(
        experiment,
        phases=(Phase(steps=STEPS, sequence_length=64, max_predictions_per_seq=10, batch_size=16),),
        optimizer=Optimizer(
            name="adamw", peak_learning_rate=1e-3, warmup_steps=10, schedule="linear"
        ),
    )
    place = epath.Path(folder / "corpus")
    corpus.prepare(experiment.corpus, experiment.model.vocab_size, place, lambda line: None)
    prepared = PreparedCorpus.open(place)
    write_base(experiment.model, prepared.tokenizer, 0.02, folder / "base")
    return LoadedModel.of(open_workdir(folder / "base")), prepared, experiment


def write_base(
    cfg: Model, of: Any, deviation: float, folder: pathlib.Path, fresh: tuple[str, ...] = ()
) -> None:
    """A base with this tokenizer, none of whose parameters is zero or one."""
    rng = np.random.default_rng(0)

    def stirred(value: jax.Array) -> np.ndarray:
        moved = np.asarray(value) + deviation * rng.standard_normal(value.shape).astype(np.float32)
        if len(moved) == padded_vocab_size(cfg):
            moved[cfg.vocab_size :] = 0  # other tables are shorter
        return moved

    params = jax.tree.map(stirred, heads.init_params(cfg, jax.random.key(0)))
    base.write(base.Base(cfg, params, of, "benchmarks.parity", fresh), epath.Path(folder))


def outputs(trained: LoadedModel, prepared: PreparedCorpus, experiment: Experiment) -> Arrays:
    """One batch, and what all forms make of it."""
    batch = prepared.train_batches(experiment, 0).batch(0, np.arange(16))
    ready = {name: jnp.asarray(value) for name, value in batch.items()}
    masked_lm, next_sentence = heads.pretraining_logits(
        trained.model, trained.params, ready, None, Loop()
    )
    model = heads.merge(trained.model, trained.params)
    inputs = (ready["input_ids"], ready["segment_ids"], ready["input_mask"])
    hidden = encode(model.encoder, trained.model, *inputs, None, Loop())
    return batch | {
        "prediction_logits": masked_lm[..., : trained.model.vocab_size],
        "seq_relationship_logits": next_sentence,
        "last_hidden_state": hidden,
        "pooler_output": jnp.tanh(model.pooler(hidden[:, 0])),
    }


def training(trained: LoadedModel, prepared: PreparedCorpus, experiment: Experiment) -> Arrays:
    """Batches, learning rates and losses of 50 steps."""
    mesh = mesh_lib.make_mesh(experiment.parallelism)
    cfg, total = experiment.optimizer, experiment.total_steps
    objective = objective_lib.make_objective(experiment, 0)
    state = step.init_state(objective, cfg, 0) | {"params": trained.params}
    # A copy: the step is given its state to keep.
    state = jax.device_put(jax.tree.map(jnp.copy, state), mesh_lib.replicated(mesh))
    sharding, rows = mesh_lib.batch_sharding(mesh), np.arange(16)
    arrays, losses = {}, []
    for number in range(STEPS):
        phase, first = experiment.phase_at(number)
        objective = objective_lib.make_objective(experiment, phase)
        spec = step.StepSpec(objective, cfg, experiment.parallelism, 1, mesh)
        train_step = step.make_train_step(spec, total)
        batch = prepared.train_batches(experiment, phase).batch(number - first, rows)
        window = jax.device_put(step.empty_window(objective.metrics), mesh_lib.replicated(mesh))
        placed = feed.place(batch, rows, len(rows), sharding)
        key = step.phase_key(experiment.model, experiment.seed, phase)
        state, window = train_step(state, window, placed, key)
        means = lines_lib.mean_metrics(jax.device_get(window))
        losses.append(sum(means[name] for name in objective.losses))
        arrays |= {f"{number}/{name}": value for name, value in batch.items()}
    rates = [float(optimizer.schedule(cfg, total, jnp.int32(i))) for i in range(STEPS)]
    return arrays | {"losses": np.array(losses), "learning_rates": np.array(rates)}


def returned(trained: LoadedModel, architectures: dict[str, str], folder: pathlib.Path) -> int:
    """Imports what transformers has saved: 1 if a bit of it differs."""
    wrong = 0
    for kind, architecture in architectures.items():
        said: list[str] = []
        target = epath.Path(folder / f"back_{kind}")
        importing.import_weights(epath.Path(folder / f"saved_{kind}"), target, None, said.append)
        found = base.read(target)
        same = found.tokenizer.sha256 == trained.tokenizer.sha256
        came, went = (
            weights.export_tensors(params, trained.model, architecture)
            for params in (found.params, trained.params)
        )
        same = same and all(np.array_equal(came[name], value) for name, value in went.items())
        wrong += not same
        fresh = ", ".join(found.fresh) or "none"
        print(f"saved by transformers, imported as {kind}: bits equal: {same}; fresh: {fresh}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
