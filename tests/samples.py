"""Small things to train on."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from small_run import write_text

from bert_jax import config
from bert_jax.config import Data, Experiment, Model, Optimizer, Parallelism
from bert_jax.data import batches, corpus, stream
from bert_jax.data.plans import Plans, PlanSpec
from bert_jax.text.vocabulary import WordCounts
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining

MODEL = Model(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)
IDS = batches.Ids(0, 2, 3, 4, 100, np.zeros(100, bool))
SHAPE = batches.BatchShape(sequence_length=16, max_predictions=3, batch_size=8)
# The gradient of a key bias is zero but for rounding, which Adam with a small eps would blow up
# into a parameter: nothing to compare.
OPTIMIZER = Optimizer(
    name="adamw", peak_learning_rate=1e-2, warmup_steps=2, schedule="linear", eps=1e-4
)
TOTAL = 100


def word_counts(counts: Mapping[str, int]) -> WordCounts:
    """Counts of words that all train a vocabulary."""
    counted = WordCounts(sorted(counts), [counts[word] for word in sorted(counts)])
    counted.add(counts)
    return counted


def small_stream(documents: int = 12, seed: int = 0) -> stream.Stream:
    """Documents of sentences whose pieces depend on the one before: there is something to learn."""
    rng = np.random.default_rng(seed)

    def sentence():
        first = int(rng.integers(5, 95))
        return [5 + (first + i) % 95 for i in range(int(rng.integers(2, 9)))]

    return stream.make_stream(
        [[sentence() for _ in range(int(rng.integers(3, 12)))] for _ in range(documents)]
    )


def train_batches(
    shape: batches.BatchShape = SHAPE, phase: int = 0, data: Data | None = None
) -> batches.TrainBatches:
    data, names = data or Data(), (0, "train", phase)
    widths = shape.sequence_length, data.short_seq_prob
    plans = Plans(small_stream(), PlanSpec(names, *widths, data.row_kind))
    return batches.TrainBatches(plans, IDS, data, shape)


def mesh_of(devices: int, parallelism: Parallelism | None = None) -> jax.sharding.Mesh:
    return mesh_lib.make_mesh(parallelism or Parallelism(), jax.devices()[:devices])


def run(
    steps: int,
    devices: int = 1,
    model: Model = MODEL,
    optimizer: Optimizer = OPTIMIZER,
    parallelism: Parallelism | None = None,
    shape: batches.BatchShape = SHAPE,
    change_state: Callable[[dict], object] = lambda state: None,
    change_batch: Callable[[dict], object] = lambda batch: None,
    learns: type[Pretraining] = Pretraining,
    data: Data | None = None,
) -> tuple[dict, list[dict[str, np.ndarray]]]:
    """Trains from seed 0; returns the final state and each step's metric sums.

    The first state and the batches may be changed in place. Whoever asks for the same layout
    twice finds its program compiled.
    """
    parallelism = parallelism or Parallelism()
    mesh, objective = mesh_of(devices, parallelism), learns(model)
    if data is not None:
        objective = learns(model, data.objective)
    abstract = step.abstract_state(objective, optimizer, parallelism, mesh)
    places = jax.tree.map(lambda s: s.sharding, abstract)
    state = step.init_state(objective, optimizer, 0)
    change_state(state)
    state = jax.device_put(state, places)
    parts = parallelism.accumulation_of(0)
    spec = step.StepSpec(objective, optimizer, parallelism, parts, mesh)
    train_step = step.make_train_step(spec, TOTAL)
    train = train_batches(shape, data=data)
    sharding = mesh_lib.batch_sharding(mesh)
    rows = np.arange(shape.batch_size)
    seen = []
    for number in range(steps):
        batch = train.batch(number, rows)
        change_batch(batch)
        batch = feed.place(batch, rows, shape.batch_size, sharding)
        window = jax.device_put(step.empty_window(objective.metrics), mesh_lib.replicated(mesh))
        state, window = train_step(state, window, batch, step.phase_key(model, 0, 0))
        seen.append(jax.device_get(window))
    return jax.device_get(state), seen


def without_dropout(model: Model = MODEL) -> Model:
    return dataclasses.replace(model, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def small_corpus(folder: pathlib.Path) -> tuple[Experiment, epath.Path]:
    """A small run's experiment, and its corpus, prepared."""
    experiment = config.load(str(write_text(folder)))
    made = epath.Path(folder / "corpus")
    corpus.prepare(experiment.corpus, experiment.model.vocab_size, made, lambda line: None)
    return experiment, made


def ready_dataset(
    folder: pathlib.Path, key: str, features: dict, splits: dict[str, list[dict]]
) -> pathlib.Path:
    """Writes a TFDS dataset as `download_and_prepare` leaves it; returns its own folder."""

    class Ready(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """A dataset of a few examples."""

        name = key
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            of = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=of, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {name: enumerate(examples) for name, examples in splits.items()}

        def _generate_examples(self, examples):
            yield from examples

    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(None):
        Ready(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder / key / "1.0.0"


def text_dataset(folder: pathlib.Path, texts: list[str] | list[dict[str, str]]) -> pathlib.Path:
    """The same of texts, or of rows of texts."""
    rows = [text if isinstance(text, dict) else {"text": text} for text in texts]
    features = dict.fromkeys(rows[0], tfds.features.Text())
    return ready_dataset(folder, "texts", features, {"train": rows})
