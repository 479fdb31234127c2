"""What a notebook wants: a trained model in one call, the batches of a step, a run.

`import bert_jax` gives `bert_jax.load`, `bert_jax.batches` and `bert_jax.pretrain`; everything else
is a module of its own. Paths are strings or `pathlib` paths.

Shape letters: B rows, S pieces of a text with [CLS] and [SEP], D width, H heads, L layers.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from bert_jax import base as base_lib
from bert_jax import config
from bert_jax import embed as embed_lib
from bert_jax.config import Experiment, Model, Parallelism
from bert_jax.config.code import name_file
from bert_jax.data import corpus
from bert_jax.data.batches import Batch
from bert_jax.embed import Embedder, Features
from bert_jax.errors import InputError
from bert_jax.interop import huggingface
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import attention_probabilities, encode
from bert_jax.predict import Trained
from bert_jax.storage import mirror
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import pretraining
from bert_jax.training.evaluators import Prediction, Predictor
from bert_jax.training.progress import LineConsole, Progress

Path = str | os.PathLike[str]

# Lengths are rounded up to a multiple, so that texts share compiled programs.
_LENGTH_STEP = 32


class LoadedModel:
    """A trained model, to be asked about texts."""

    def __init__(self, trained: Trained):
        self._trained = trained
        # Of the checkpoint; 0 of weights without one.
        self.name, self.step = trained.name, trained.step  # of the run, the base or the folder
        self.model: Model = trained.model  # the shape and numerics
        self.params: dict[str, Any] = trained.params  # nested dicts of float32 arrays
        self.tokenizer: Tokenizer = trained.tokenizer  # whose ids they know
        self._predictor = Predictor(self.model, self.tokenizer)

        def hidden(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
            encoder = heads.merge(self.model, params).encoder
            return encode(
                encoder, self.model, ids, jnp.zeros_like(ids), mask, None, Loop(), "all"
            ).astype(jnp.float32)

        self._hidden = jax.jit(hidden)
        self._apply = jax.jit(
            functools.partial(heads.pretraining_logits, self.model, noise=None, loop=Loop())
        )

    def __repr__(self) -> str:
        """Returns the name, the step and the size."""
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"<bert_jax model {self.name}, step {self.step}, {count / 1e6:.1f}M parameters>"

    def tokenize(self, text: str) -> list[str]:
        """Returns the pieces of a text, in which [MASK] stands for itself."""
        return [self.tokenizer.piece(i) for i in self._predictor.encode(text)]

    def fill(self, text: str, next_text: str | None = None, top: int = 5) -> Prediction:
        """Fills every [MASK] with its likeliest pieces.

        Args:
          text: A, with any number of [MASK]s.
          next_text: B, if the question is whether it follows A, too.
          top: how many pieces are returned for each [MASK].

        Returns:
          `masks`, a list of (piece, probability) for each [MASK], and `is_next`, the probability
          that B follows A, None without B.
        """
        return self._predictor.predict(self.params, text, next_text, top)

    def hidden(self, texts: str | Sequence[str], layers: Sequence[int] = (-1,)) -> list[np.ndarray]:
        """Returns what layers make of each text, piece by piece, [CLS] first and [SEP] last.

        Args:
          texts: one or several.
          layers: 0 the embeddings, 1 the first layer; negative numbers count from the last, -1.

        Returns:
          For each text float32 [layers, S, D].
        """
        chosen = embed_lib.layer_numbers(tuple(layers), self.model)
        results = []
        for text in [texts] if isinstance(texts, str) else texts:
            ids = self._ids(text)
            every = np.asarray(self._all_hidden(ids))[:, 0, : len(ids)]
            results.append(every[list(chosen)])
        return results

    def embed(
        self,
        texts: str | Sequence[str],
        pooling: Literal["mean", "cls"] | None = None,
        layers: Sequence[int] = (-1,),
        length: Literal["as_is", "unit"] | None = None,
    ) -> np.ndarray:
        """Returns a vector of each text, float32 [texts, W]; see `bert_jax.embed.Features`.

        What is None is as the run or base says. Longer texts than are read are cut.
        """
        features = Features(pooling=pooling, layers=tuple(layers), length=length)
        embedder = Embedder(self._trained, features, mesh_lib.make_mesh(Parallelism()))
        asked = [texts] if isinstance(texts, str) else texts
        parts = [part.vectors for part in embedder.embed(asked)]
        return np.concatenate(parts) if parts else np.empty((0, embedder.width), np.float32)

    def attention(self, text: str) -> tuple[list[str], np.ndarray]:
        """Returns a text's pieces, [CLS] and [SEP] too, and where each of them looks.

        Returns:
          The S pieces, and float32 [L, H, S, S]: of each layer and head the probabilities with
          which a piece (third dimension) attends to each piece (last dimension).
        """
        ids = self._ids(text)
        hidden = self._all_hidden(ids)[:-1, 0, : len(ids)]
        encoder = heads.merge(self.model, self.params).encoder
        maps = attention_probabilities(encoder, self.model, hidden)
        return [self.tokenizer.piece(i) for i in ids], np.asarray(maps)

    def apply(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Computes both heads' scores of a batch, for any parameters of this shape.

        Args:
          params: nested dicts of float32 arrays; `self.params`, or others.
          batch: as `bert_jax.batches` returns it.

        Returns:
          float32 [B, P, V] of masked pieces, V rounded up to 1,024s, and [B, 2] of "B follows A"
          and "B is random". May be differentiated.
        """
        if self.model.kind == "bilstm":
            raise InputError("model.kind=bilstm: has neither head; ask hidden or embed")
        return self._apply(params, batch)

    def _ids(self, text: str) -> list[int]:
        tok, limit = self.tokenizer, self.model.max_position_embeddings
        ids = [tok.cls_id, *self._predictor.encode(text), tok.sep_id]
        if len(ids) > limit:
            raise InputError(f"text of {len(ids)} pieces; the model reads {limit} at most")
        return ids

    def _all_hidden(self, ids: list[int]) -> jax.Array:
        """Returns float32 [L + 1, 1, S, D], S rounded up; no piece attends to what is added."""
        limit = self.model.max_position_embeddings
        length = min(-(-len(ids) // _LENGTH_STEP) * _LENGTH_STEP, limit)
        row = np.pad(np.array(ids, np.int32), (0, length - len(ids)))
        return self._hidden(self.params, row[None], (np.arange(length) < len(ids))[None])


def load(place: Path, checkpoint: str = "newest", code: Path | None = None) -> LoadedModel:
    """Loads a model from a run, a base, or a folder that transformers wrote.

    Args:
      place: the folder; of a run or a base it may lie in a bucket.
      checkpoint: of a run: `newest`, `best` (by held-out loss), or a step.
      code: the file of a run's own objective or encoder, which runs if its hash is the run's.
    """
    if code is not None:
        name_file(os.fspath(code))
    folder = epath.Path(place)
    run = mirror.opened(folder)
    theirs = (run.root / "config.json").exists() and not run.experiment.exists()
    if not theirs or base_lib.is_base(run.root):
        return LoadedModel(Trained.of(folder, which=checkpoint))
    base = huggingface.read_folder(run.root, lambda line: None)
    params, known = jax.device_put(base.params), {"source": base.source, "vectors": base.vectors}
    return LoadedModel(
        Trained(folder.name, base.model, params, base.tokenizer, base.fresh, **known)
    )


def batches(experiment: Experiment | Path, step: int, workdir: Path | None = None) -> Batch:
    """Returns the batch of a step of a run, whatever was done before; the corpus is made if needed.

    Args:
      experiment: a value, an experiment file, or a resolved config as JSON.
      step: how many steps are done before it, over all phases.
      workdir: of the run; None: runs/NAME.

    Returns:
      NumPy arrays: input_ids, segment_ids, input_mask int32 [B, S]; masked_lm_positions,
      masked_lm_ids int32 and masked_lm_weights float32 [B, P]; next_sentence_labels int32 [B], 1
      for a random next; rows uint32 [B]; row_weights float32 [B].
    """
    experiment = _experiment(experiment)
    if not 0 <= step < experiment.total_steps:
        raise InputError(f"step {step}: the run has steps 0 to {experiment.total_steps - 1}")
    place = _workdir(experiment, workdir)
    cfg, size = experiment.corpus, experiment.model.vocab_size
    corpus.prepare(cfg, size, place.corpus, lambda line: None)
    phase, first = experiment.phase_at(step)
    train = pretraining.Prepared.open(place.corpus).train_batches(experiment, phase)
    return train.batch(step - first, np.arange(experiment.phases[phase].batch_size))


def pretrain(experiment: Experiment | Path, workdir: Path | None = None) -> LoadedModel:
    """Pre-trains to the end, or goes on where the run stopped, and loads the result.

    Args:
      experiment: a value, an experiment file, or a resolved config as JSON.
      workdir: where the run lives; None: runs/NAME.

    Raises:
      RuntimeError: it ended before its last step.
    """
    experiment = _experiment(experiment)
    place = _workdir(experiment, workdir)
    outcome = pretraining.pretrain(experiment, place, "keep", Progress(LineConsole()))
    if outcome != "finished":
        raise RuntimeError(f"{place.named}: the run has {outcome}; call again to go on")
    return load(place.named)


def _experiment(experiment: Experiment | Path) -> Experiment:
    if isinstance(experiment, Experiment):
        return experiment
    return config.load(os.fspath(experiment))


def _workdir(experiment: Experiment, workdir: Path | None):
    root = f"runs/{experiment.name}" if workdir is None else workdir
    return mirror.opened(root, experiment.run.corpus_dir, "write")
