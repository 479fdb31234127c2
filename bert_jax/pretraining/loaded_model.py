"""A trained model, loaded from a run or a base, and its predictions for texts.

Shape letters: B rows, S tokens of a text with [CLS] and [SEP], D width, H heads, L layers.
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
from bert_jax.checkpoints.load import Checkpoints, Restored
from bert_jax.config import Experiment, Parallelism
from bert_jax.embeddings import embed as embed_lib
from bert_jax.embeddings.embed import Embedder, Features, TextRole
from bert_jax.errors import InputError, require_choice
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import attention_probabilities, encode
from bert_jax.pretraining.evaluators import Arrays, Prediction, Predictor, evaluate, logits_fn
from bert_jax.pretraining.pretraining_job import OpenCorpus
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.text.vocabulary import MASK
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective, step
from bert_jax.training import optimizer as optimizer_lib

What = Literal["params", "with_moments"]
Texts = str | Iterable[str]
Floats = npt.NDArray[np.float32]
# For each head, the remedy if it is not trained.
_REMEDIES = {
    "masked_lm": "import weights that have one; `bert-jax embed` and `finetune` take its encoder",
    "next_sentence": "remove B, or use a model of data.objective=mlm_nsp or mlm_sop",
}
# Lengths are rounded up to a multiple of this, so that texts share compiled programs.
_LENGTH_STEP = 32


@dataclasses.dataclass(repr=False)
class LoadedModel(Base):
    """A model with its weights on one device, its origin, and methods for texts.

    For a run, `source` is "", and `vectors` are those of the base that the run started from.
    """

    name: str = ""  # of the run, the base or the folder
    step: int = 0  # of the checkpoint; 0 for a base
    experiment: Experiment | None = None  # of the run; None for a base
    manifest: dict[str, Any] | None = None  # of the run's corpus; None for a base
    # The line of metrics.jsonl of this step; None if there is none.
    evaluation: dict[str, Any] | None = None
    idle: tuple[str, ...] = ()  # parts that no phase of the run has trained up to this step

    @classmethod
    def of(cls, run: Workdir, what: What = "params", which: str = "newest") -> "LoadedModel":
        """Reads a base, or a checkpoint of a run.

        Args:
          run: the workdir of the run, or the folder of the base, opened.
          what: the parts of a checkpoint to read.
          which: a run's checkpoint: `newest`, `best`, or a step.
        """
        if base_lib.is_base(run.root):
            _require_newest(run.address, which)
            return cls.load_base(base_lib.read(run.root), run.address.name)
        experiment = load_experiment(run)
        workdir = run.with_corpus(experiment.run.corpus_dir)
        prepared = OpenCorpus.open(workdir.corpus)
        if what == "with_moments" and experiment.optimizer.name != "bert_adam":
            raise InputError(
                f"{run.address}: optimizer.name={experiment.optimizer.name}; only bert_adam's "
                "moments can be imported; remove --with-optimizer"
            )
        names = ("params",) if what == "params" else ("params", "optimizer")
        mesh = mesh_lib.one_device()
        restored = _read_checkpoint(experiment, workdir, prepared, mesh, names, which)
        state, done = restored.state, restored.step
        moments = None
        if what == "with_moments":
            adam = jax.device_get(optimizer_lib.moments(state["optimizer"]))
            moments = Moments(done, adam.mu, adam.nu)
        params, fresh = heads.add_missing_heads(experiment.model, state["params"])
        phases = range(experiment.phase_at(max(done - 1, 0))[0] + 1)  # that have started
        objectives = (objective.make_objective(experiment, number) for number in phases)
        return cls(
            experiment.model_after(done),
            params,
            prepared.tokenizer,
            fresh=fresh,
            moments=moments,
            vectors=base_lib.read_vectors(restored.metadata.get("notes", {})),
            name=experiment.name,
            step=done,
            experiment=experiment,
            manifest=prepared.manifest,
            evaluation=metrics_line(workdir, "evaluation", done),
            idle=tuple(set.intersection(*(set(getattr(o, "idle", ())) for o in objectives))),
        )

    @classmethod
    def load_base(cls, base: Base, name: str) -> "LoadedModel":
        """Puts the weights of a base on a device."""
        fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(Base)}
        return cls(**fields | {"params": jax.device_put(base.params)}, name=name)

    def __repr__(self) -> str:
        """Returns the name, the step and the size."""
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"<bert_jax model {self.name}, step {self.step}, {count / 1e6:.1f}M parameters>"

    def tokenize(self, text: str) -> list[str]:
        """Returns the tokens of a text; "[MASK]" in it is one token."""
        _require_text(text, "text")
        return [self.tokenizer.piece(i) for i in self._predictor.encode(text)]

    @typing.overload
    def fill(self, text: str, next_text: str | None = None, top: int = 5) -> Prediction: ...

    @typing.overload
    def fill(
        self, text: Iterable[str], next_text: Iterable[str] | None = None, top: int = 5
    ) -> list[Prediction]: ...

    def fill(
        self,
        text: Texts,
        next_text: Texts | None = None,
        top: int = 5,
    ) -> Prediction | list[Prediction]:
        """Predicts the most likely tokens of every [MASK].

        Args:
          text: A, with any number of [MASK]s; or a list of such texts.
          next_text: B, to predict whether it follows A; or a list with one for each A.
          top: the number of tokens for each [MASK].

        Returns:
          `masks`, a list of (token, probability) for each [MASK], and `is_next`, the probability
          that B follows A, None without B. For a list of texts, a list of these.
        """
        firsts = list_texts(text, "text")
        seconds = [None] * len(firsts) if next_text is None else list_texts(next_text, "next_text")
        if len(seconds) != len(firsts):
            raise InputError(f"next_text: {len(seconds)} texts, but text has {len(firsts)}")
        predictions = [self._fill(a, b, top) for a, b in zip(firsts, seconds, strict=True)]
        return predictions[0] if isinstance(text, str) else predictions

    def _fill(self, text: str, next_text: str | None, top: int) -> Prediction:
        is_masked, is_pair = MASK in f"{text} {next_text}", next_text is not None
        for head, is_needed in {"masked_lm": is_masked, "next_sentence": is_pair}.items():
            if is_needed and any(part.startswith(head) for part in (*self.fresh, *self.idle)):
                raise InputError(f"{self.name}: its {head} head is untrained; {_REMEDIES[head]}")
        return self._predictor.predict(self.params, text, next_text, top)

    def layer_outputs(self, texts: Texts, layers: Sequence[int] = (-1,)) -> list[Floats]:
        """Returns the outputs of layers for each token of each text; [CLS] is first, [SEP] last.

        Args:
          texts: one or several.
          layers: 0 is the embeddings, 1 the first layer; negative numbers count from the last, -1.

        Returns:
          For each text float32 [layers, S, D].
        """
        numbers = list(embed_lib.layer_numbers(tuple(layers), self.model))
        results = []
        for text in list_texts(texts):
            ids = self._ids(text)
            results.append(np.asarray(self._run_layers(ids))[numbers, 0, : len(ids)])
        return results

    def embed(
        self,
        texts: Texts,
        pooling: Literal["mean", "cls", "last"] | None = None,
        layers: Sequence[int] = (-1,),
        normalize: bool | None = None,
        role: TextRole = "document",
    ) -> Floats:
        """Returns the vector of each text, float32 [texts, W]; see `embeddings.embed.Features`.

        Texts are truncated to the maximum length of the run or the base.

        Args:
          texts: one or several.
          pooling: the mean of the vectors of all tokens, or the vector of [CLS] or of the last
            token; None: as the run or base has it, else the mean.
          layers: 0 is the embeddings, 1 the first layer; negative numbers count from the last, -1.
            The vectors of several layers are concatenated.
          normalize: whether vectors are scaled to length 1; None: as the run or base has it.
          role: selects the prompt, for a model with a prompt for each role.
        """
        require_choice("pooling", pooling, (None, "mean", "cls", "last"))
        require_choice("role", role, typing.get_args(TextRole))
        features = Features(pooling=pooling, layers=tuple(layers), normalize=normalize)
        embedder = Embedder(self, features, mesh_lib.make_mesh(Parallelism()))
        parts = [part.vectors for part in embedder.embed(list_texts(texts), role)]
        return np.concatenate(parts) if parts else np.empty((0, embedder.width), np.float32)

    def attention(self, text: str) -> tuple[list[str], Floats]:
        """Returns a text's tokens, with [CLS] and [SEP], and the attention between them.

        Returns:
          The S tokens, and float32 [L, H, S, S]: for each layer and head, the probabilities with
          which a token (third dimension) attends to each token (last dimension).
        """
        _require_text(text, "text")
        ids = self._ids(text)
        hidden = self._run_layers(ids)[:-1, 0, : len(ids)]
        encoder = heads.merge(self.model, self.params).encoder
        maps = attention_probabilities(encoder, self.model, hidden)
        return [self.tokenizer.piece(i) for i in ids], np.asarray(maps)

    def apply(self, params: heads.Params, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        """Computes the logits of both heads for a batch. Can be differentiated.

        Args:
          params: nested dicts of float32 arrays: `self.params`, or others of the same shapes.
          batch: as `bert_jax.batches` returns it.

        Returns:
          float32 [B, P, V] for masked tokens, where V is rounded up to a multiple of 1,024, and
          [B, 2] for "B follows A" and "B is random".
        """
        return logits_fn(self.model)(params, batch)

    @functools.cached_property
    def _predictor(self) -> Predictor:
        return Predictor(self.model, self.tokenizer)

    @functools.cached_property
    def _layers_program(self) -> Callable[..., jax.Array]:
        def run(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
            encoder, kinds = heads.merge(self.model, params).encoder, jnp.zeros_like(ids)
            hidden = encode(encoder, self.model, ids, kinds, mask, None, Loop(), "all")
            return hidden.astype(jnp.float32)

        return jax.jit(run)

    def _ids(self, text: str) -> list[int]:
        tok, limit = self.tokenizer, self.model.max_position_embeddings
        ids = [tok.cls_id, *self._predictor.encode(text), tok.sep_id]
        if len(ids) > limit:
            raise InputError(f"text of {len(ids)} tokens; the model reads {limit} at most")
        return ids

    def _run_layers(self, ids: list[int]) -> jax.Array:
        """Returns float32 [L + 1, 1, S, D]; S is rounded up, and no token attends to padding."""
        limit = self.model.max_position_embeddings
        length = min(-(-len(ids) // _LENGTH_STEP) * _LENGTH_STEP, limit)
        row = np.pad(np.array(ids, np.int32), (0, length - len(ids)))
        return self._layers_program(self.params, row[None], (np.arange(length) < len(ids))[None])


def list_texts(texts: Texts, name: str = "texts") -> list[str]:
    """Returns one or several texts as a list; `name` is the argument's name for errors."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        _require_text(texts, name)
        return [texts]
    for position, text in enumerate(texts := list(texts)):
        _require_text(text, f"{name}[{position}]")
    return texts


def list_examples(examples: Iterable[str | Sequence[str]]) -> list[str | Sequence[str]]:
    """Returns examples, each a text or a sequence of texts, as a list; a text is one example."""
    if isinstance(examples, str) or not isinstance(examples, Iterable):
        return [*list_texts(examples)]
    return list(examples)


def _require_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        raise InputError(f"{name}: {reprlib.repr(value)} is a {type(value).__name__}, not a text")


def load_params(
    experiment: Experiment,
    workdir: Workdir,
    prepared: OpenCorpus,
    mesh: jax.sharding.Mesh,
    which: str = "newest",
) -> tuple[Any, int]:
    """Returns the parameters of a run's checkpoint, replicated over the mesh, and its step.

    The step of a base is 0.
    """
    if base_lib.is_base(workdir.root):
        _require_newest(workdir.root, which)
        base = base_lib.read(workdir.root)
        base_lib.require_same_model(base, experiment.model, str(workdir.root))
        base_lib.require_same_tokenizer(base, prepared.tokenizer, str(workdir.root))
        return jax.device_put(base.params, mesh_lib.replicated(mesh)), 0
    restored = _read_checkpoint(experiment, workdir, prepared, mesh, ("params",), which)
    return restored.state["params"], restored.step


def score_held_out(
    experiment: Experiment, run: Workdir, which: str
) -> tuple[int, dict[str, float]]:
    """Returns the step of a run's checkpoint and its metrics on the held-out rows.

    Args:
      experiment: the run's experiment; fields of placement may differ.
      run: the workdir, opened with the corpus.
      which: the checkpoint: `newest`, `best`, or a step.
    """
    prepared = OpenCorpus.open(run.corpus)
    parallelism = Parallelism()  # the run's own is for the devices of its training
    mesh = mesh_lib.make_mesh(parallelism)
    params, done = load_params(experiment, run, prepared, mesh, which)
    scored = objective.of(experiment.model_scored(done), experiment.data)
    held_out = prepared.held_out(experiment, mesh)
    return done, evaluate(held_out, params, scored, parallelism, mesh)


def _require_newest(folder: epath.Path, which: str) -> None:
    if which != "newest":
        raise InputError(f"--checkpoint {which}: {folder} is a base; remove --checkpoint")


def _read_checkpoint(
    experiment: Experiment,
    workdir: Workdir,
    prepared: OpenCorpus,
    mesh: jax.sharding.Mesh,
    names: tuple[str, ...],
    which: str,
) -> Restored:
    """Returns parts of a checkpoint's state, replicated over the mesh."""
    saved = Checkpoints(workdir.checkpoints)
    newest = saved.experiment(saved.find_step("newest"))
    if changed := config.differences(newest, experiment, "identity"):
        raise InputError(
            f"{workdir.address}: was trained with other settings ({'; '.join(changed)})"
        )
    trained = objective.of(experiment.model, experiment.data)
    abstract = step.abstract_state(trained, experiment.optimizer, Parallelism(), mesh)
    restored = saved.read(which, {name: abstract[name] for name in names})
    prepared.require_same(restored.metadata)
    return restored


def metrics_line(workdir: Workdir, kind: str, step: int) -> dict[str, Any] | None:
    """Returns the newest line of metrics.jsonl of a kind and a step; None if there is none."""
    lines = JsonLines(workdir.metrics).read()
    matches = [line for line in lines if line.get("kind") == kind and line["step"] == step]
    return matches[-1] if matches else None
