"""A trained model, from wherever it lies: its weights, what is known of them, and its answers.

Shape letters: B rows, S pieces of a text with [CLS] and [SEP], D width, H heads, L layers.
"""

import dataclasses
import functools
import reprlib
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from etils import epath

from bert_jax import config
from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base, Moments
from bert_jax.checkpoints.checkpoint import Checkpoints, Restored
from bert_jax.config import Experiment, Parallelism
from bert_jax.embeddings import embed as embed_lib
from bert_jax.embeddings.embed import Embedder, Features
from bert_jax.errors import InputError
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import attention_probabilities, encode
from bert_jax.pretraining.evaluators import Arrays, Prediction, Predictor, logits_of
from bert_jax.pretraining.pretraining import Prepared
from bert_jax.storage import mirror
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.text.vocabulary import MASK
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective, step
from bert_jax.training import optimizer as optimizer_lib

What = Literal["params", "with_moments"]
Floats = npt.NDArray[np.float32]
# By the head that a question is for, what to do where it has not learned.
_INSTEAD = {
    "masked_lm": "import weights that have one; `bert-jax embed` and `finetune` take its encoder",
    "next_sentence": "remove B, or use a model of data.objective=mlm_nsp or mlm_sop",
}
# Lengths are rounded up to a multiple, so that texts share compiled programs.
_LENGTH_STEP = 32


@dataclasses.dataclass(repr=False)
class Loaded(Base):
    """Weights on one device, and what is known about them; to be asked about texts.

    Of a run `source` is "", and `vectors` are as the base makes them that it began with.
    """

    name: str = ""  # of the run, the base or the folder
    step: int = 0  # of the checkpoint; 0 of weights without one
    experiment: Experiment | None = None  # of a run; None of a base
    manifest: dict[str, Any] | None = None  # of the corpus; None of a base
    # The line of metrics.jsonl of this step; None if there is none.
    evaluation: dict[str, Any] | None = None
    idle: tuple[str, ...] = ()  # parts that no phase of a run has taught up to this step

    @classmethod
    def of(cls, folder: epath.Path, what: What = "params", which: str = "newest") -> "Loaded":
        """Reads a base, or a checkpoint of a run.

        Args:
          folder: of a base or a run.
          what: is wanted of a run.
          which: of a run's checkpoints: `newest`, `best`, or a step.
        """
        run = mirror.open_workdir(folder)
        if base_lib.is_base(run.root):
            _require_newest(folder, which)
            return cls.of_base(base_lib.read(run.root), folder.name)
        experiment = load_experiment(run)
        workdir = run.with_corpus(experiment.run.corpus_dir)
        prepared = Prepared.open(workdir.corpus)
        if what == "with_moments" and experiment.optimizer.name != "bert_adam":
            raise InputError(
                f"{folder}: --with-optimizer: optimizer.name={experiment.optimizer.name}; only "
                "bert_adam's moments can be imported"
            )
        wanted = ("params",) if what == "params" else ("params", "optimizer")
        mesh = mesh_lib.one_device()
        restored = _restored(experiment, workdir, prepared, mesh, wanted, which)
        state, done = restored.state, restored.step
        moments = None
        if what == "with_moments":
            kept = jax.device_get(optimizer_lib.moments(state["optimizer"]))
            moments = Moments(done, kept.mu, kept.nu)
        params, fresh = heads.add_missing_heads(experiment.model, state["params"])
        begun = range(experiment.phase_at(max(done - 1, 0))[0] + 1)
        learned = (objective.make_objective(experiment, number) for number in begun)
        return cls(
            experiment.model_after(done),
            params,
            prepared.tokenizer,
            fresh=fresh,
            moments=moments,
            vectors=base_lib.vectors_of(restored.metadata.get("notes", {})),
            name=experiment.name,
            step=done,
            experiment=experiment,
            manifest=prepared.manifest,
            evaluation=line_of(workdir, "evaluation", done),
            idle=tuple(set.intersection(*(set(getattr(one, "idle", ())) for one in learned))),
        )

    @classmethod
    def of_base(cls, base: Base, name: str) -> "Loaded":
        """Puts the weights of a base on a device."""
        fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(Base)}
        return cls(**fields | {"params": jax.device_put(base.params)}, name=name)

    def __repr__(self) -> str:
        """Returns the name, the step and the size."""
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"<bert_jax model {self.name}, step {self.step}, {count / 1e6:.1f}M parameters>"

    def tokenize(self, text: str) -> list[str]:
        """Returns the pieces of a text, in which [MASK] stands for itself."""
        _require_text(text, "text")
        return [self.tokenizer.piece(i) for i in self._predictor.encode(text)]

    @typing.overload
    def fill(self, text: str, next_text: str | None = None, top: int = 5) -> Prediction: ...

    @typing.overload
    def fill(
        self, text: Sequence[str], next_text: Sequence[str] | None = None, top: int = 5
    ) -> list[Prediction]: ...

    def fill(
        self,
        text: str | Sequence[str],
        next_text: str | Sequence[str] | None = None,
        top: int = 5,
    ) -> Prediction | list[Prediction]:
        """Fills every [MASK] with its likeliest pieces.

        Args:
          text: A, with any number of [MASK]s; or a list of such texts.
          next_text: B, if the question is whether it follows A, too; or a list, one for each A.
          top: how many pieces are returned for each [MASK].

        Returns:
          `masks`, a list of (piece, probability) for each [MASK], and `is_next`, the probability
          that B follows A, None without B; of a list of texts a list of these.
        """
        firsts = texts_of(text, "text")
        seconds = [None] * len(firsts) if next_text is None else texts_of(next_text, "next_text")
        if len(seconds) != len(firsts):
            raise InputError(f"next_text: {len(seconds)} texts, but text has {len(firsts)}")
        predictions = [self._fill(a, b, top) for a, b in zip(firsts, seconds, strict=True)]
        return predictions[0] if isinstance(text, str) else predictions

    def _fill(self, text: str, next_text: str | None, top: int) -> Prediction:
        is_masked, is_pair = MASK in f"{text} {next_text}", next_text is not None
        for head, is_asked in {"masked_lm": is_masked, "next_sentence": is_pair}.items():
            if is_asked and any(part.startswith(head) for part in (*self.fresh, *self.idle)):
                why = f"{self.name} has no {head} head that has learned"
                raise InputError(f"{why}; {_INSTEAD[head]}")
        return self._predictor.predict(self.params, text, next_text, top)

    def hidden(self, texts: str | Sequence[str], layers: Sequence[int] = (-1,)) -> list[Floats]:
        """Returns what layers make of each text, piece by piece, [CLS] first and [SEP] last.

        Args:
          texts: one or several.
          layers: 0 the embeddings, 1 the first layer; negative numbers count from the last, -1.

        Returns:
          For each text float32 [layers, S, D].
        """
        chosen = embed_lib.layer_numbers(tuple(layers), self.model)
        results = []
        for text in texts_of(texts):
            ids = self._ids(text)
            every = np.asarray(self._all_hidden(ids))[:, 0, : len(ids)]
            results.append(every[list(chosen)])
        return results

    def embed(
        self,
        texts: str | Sequence[str],
        pooling: Literal["mean", "cls", "last"] | None = None,
        layers: Sequence[int] = (-1,),
        length: Literal["as_is", "unit"] | None = None,
    ) -> Floats:
        """Returns the vector of each text, float32 [texts, W]; see `embeddings.embed.Features`.

        What is None is as the run or base says. Longer texts than are read are cut.
        """
        features = Features(pooling=pooling, layers=tuple(layers), length=length)
        embedder = Embedder(self, features, mesh_lib.make_mesh(Parallelism()))
        parts = [part.vectors for part in embedder.embed(texts_of(texts))]
        return np.concatenate(parts) if parts else np.empty((0, embedder.width), np.float32)

    def attention(self, text: str) -> tuple[list[str], Floats]:
        """Returns a text's pieces, [CLS] and [SEP] too, and where each of them looks.

        Returns:
          The S pieces, and float32 [L, H, S, S]: of each layer and head the probabilities with
          which a piece (third dimension) attends to each piece (last dimension).
        """
        _require_text(text, "text")
        ids = self._ids(text)
        hidden = self._all_hidden(ids)[:-1, 0, : len(ids)]
        encoder = heads.merge(self.model, self.params).encoder
        maps = attention_probabilities(encoder, self.model, hidden)
        return [self.tokenizer.piece(i) for i in ids], np.asarray(maps)

    def apply(self, params: heads.Params, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        """Computes both heads' scores of a batch, for any parameters of this shape.

        Args:
          params: nested dicts of float32 arrays; `self.params`, or others.
          batch: as `bert_jax.batches` returns it.

        Returns:
          float32 [B, P, V] of masked pieces, V rounded up to 1,024s, and [B, 2] of "B follows A"
          and "B is random". May be differentiated.
        """
        return logits_of(self.model)(params, batch)

    @functools.cached_property
    def _predictor(self) -> Predictor:
        return Predictor(self.model, self.tokenizer)

    @functools.cached_property
    def _every_layer(self) -> Callable[..., jax.Array]:
        def run(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
            encoder, kinds = heads.merge(self.model, params).encoder, jnp.zeros_like(ids)
            hidden = encode(encoder, self.model, ids, kinds, mask, None, Loop(), "all")
            return hidden.astype(jnp.float32)

        return jax.jit(run)

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
        return self._every_layer(self.params, row[None], (np.arange(length) < len(ids))[None])


def texts_of(texts: str | Sequence[str], name: str = "texts") -> list[str]:
    """Returns one or several texts as a list; errors begin with `name`, that of the argument."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        _require_text(texts, name)
        return [texts]
    listed = list(texts)
    for position, text in enumerate(listed):
        _require_text(text, f"{name}[{position}]")
    return listed


def _require_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        raise InputError(f"{name}: {reprlib.repr(value)} is a {type(value).__name__}, not a text")


def load_params(
    experiment: Experiment,
    workdir: Workdir,
    prepared: Prepared,
    mesh: jax.sharding.Mesh,
    which: str = "newest",
) -> tuple[Any, int]:
    """Returns parameters, whole on each device of the mesh, and the step of their checkpoint; of a
    base its own, and 0.
    """
    if base_lib.is_base(workdir.root):
        _require_newest(workdir.root, which)
        base = base_lib.read(workdir.root)
        base_lib.require_same_model(base, experiment.model, str(workdir.root))
        base_lib.require_same_tokenizer(base, prepared.tokenizer, str(workdir.root))
        return jax.device_put(base.params, mesh_lib.replicated(mesh)), 0
    restored = _restored(experiment, workdir, prepared, mesh, ("params",), which)
    return restored.state["params"], restored.step


def _require_newest(folder: epath.Path, which: str) -> None:
    if which != "newest":
        raise InputError(f"--checkpoint {which}: {folder} is a base, which has none; remove it")


def _restored(
    experiment: Experiment,
    workdir: Workdir,
    prepared: Prepared,
    mesh: jax.sharding.Mesh,
    wanted: tuple[str, ...],
    which: str,
) -> Restored:
    """Returns parts of a checkpoint's state, whole on each device of the mesh: a run's own sharding
    is for the devices it had.
    """
    saved = Checkpoints(workdir.checkpoints)
    of_newest = saved.experiment(saved.find_step("newest"))
    if changed := config.differences(of_newest, experiment, "identity"):
        raise InputError(f"{workdir.named}: was trained with other settings ({'; '.join(changed)})")
    learned = objective.of(experiment.model, experiment.data)
    abstract = step.abstract_state(learned, experiment.optimizer, Parallelism(), mesh)
    restored = saved.read(which, {name: abstract[name] for name in wanted})
    prepared.require_same(restored.metadata)
    return restored


def line_of(workdir: Workdir, kind: str, step: int) -> dict[str, Any] | None:
    """Returns the newest line of metrics.jsonl of a kind and a step; None if there is none."""
    lines = JsonLines(workdir.metrics).read()
    of_step = [x for x in lines if x.get("kind") == kind and x["step"] == step]
    return of_step[-1] if of_step else None
