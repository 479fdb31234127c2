"""A trained model, loaded from a run or a base, and its predictions for texts.

Shape letters: B rows, S tokens of a text with [CLS] and [SEP], D width, H heads, L layers, P masked
positions of a row, V vocabulary, W width of a vector: D times the number of concatenated layers.
"""

import dataclasses
import functools
import reprlib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from bert_jax.config import Experiment, Model, Parallelism
from bert_jax.embeddings import embed as embed_lib
from bert_jax.embeddings.embed import Embedder, TextRole, VectorOptions
from bert_jax.errors import InputError, require_choice
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import attention_probabilities, encode
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.text.tokenizer import Tokenizer, add_special_tokens, first_segment_length
from bert_jax.text.vocabulary import MASK
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective, step
from bert_jax.training import optimizer as optimizer_lib

Arrays = Mapping[str, np.ndarray | jax.Array]  # a batch, on the host or on a device
Texts = str | Iterable[str]
Floats = npt.NDArray[np.float32]
# For each head, the remedy if it is not trained.
_REMEDIES = {
    "masked_lm": "import weights with this head; `bert-jax embed` and `finetune` do without it",
    "next_sentence": "remove the second text, or train with data.objective=mlm_nsp or mlm_sop",
}
_LENGTH_STEP = 32  # texts are padded to a multiple of this, to share compiled programs


@dataclasses.dataclass
class Prediction:
    """The model's predictions for a text."""

    masks: list[list[tuple[str, float]]]  # most likely (token, probability) for each [MASK]
    is_next: float | None  # the probability that the second text follows; None without one


@functools.lru_cache
def logits_fn(model: Model) -> Callable[[Any, Arrays], tuple[jax.Array, jax.Array]]:
    """Compiles (parameters, batch) -> logits of both heads; see `heads.pretraining_logits`."""
    # `noise` holds dropout keys; the default `Loop` scans the layers without rematerialization.
    return jax.jit(functools.partial(heads.pretraining_logits, model, noise=None, loop=Loop()))


def pad_row(
    ids: Sequence[int] | np.ndarray, pad_id: int, model: Model
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a text's token ids with padding, int32 [1, S + padding], and their mask, bool."""
    limit = model.max_position_embeddings
    if len(ids) > limit:
        raise InputError(f"text of {len(ids)} tokens; the model reads {limit} at most")
    mask = np.arange(min(-(-len(ids) // _LENGTH_STEP) * _LENGTH_STEP, limit)) < len(ids)
    row = np.full(len(mask), pad_id, np.int32)
    row[mask] = ids
    return row[None], mask[None]


class Predictor:
    """Predicts masked tokens, and whether a text follows another; each call takes parameters."""

    def __init__(self, model: Model, tokenizer: Tokenizer):
        self._model, self._tokenizer = model, tokenizer
        self._logits = logits_fn(model)

    def predict(self, params: Any, a: str, b: str | None, top: int) -> Prediction:
        """Predicts the `top` most likely tokens of every [MASK] in texts `a` and `b`."""
        second = None if b is None else self.encode(b)
        probs, is_next = self.probabilities(params, self.encode(a), second)
        return Prediction([self.top_tokens(p, top) for p in probs], is_next)

    def top_tokens(self, probs: np.ndarray, top: int) -> list[tuple[str, float]]:
        """Returns the `top` most likely tokens of one [MASK] with their probabilities."""
        order = np.argsort(-probs, kind="stable")[:top]
        return [(self._tokenizer.token(int(i)), float(probs[i])) for i in order]

    def probabilities(
        self, params: Any, a: list[int], b: list[int] | None
    ) -> tuple[np.ndarray, float | None]:
        """Returns the model's predictions for token ids without [CLS] and [SEP].

        Returns:
          float32 [masks, vocabulary] for the [MASK]s of `a` and `b` in order; the probability that
          `b` follows `a`, None without `b`.
        """
        if self._model.direction != "both":
            raise InputError(
                "model.direction=left_to_right: a model of data.objective=causal cannot fill a "
                "[MASK]: it reads only the text to the left; use a model that was trained with "
                "mlm_nsp, mlm_sop or mlm"
            )
        tok = self._tokenizer
        ids, second_start = add_special_tokens(tok, a, b)
        # All ids, unless the tokenizer gives the second text a segment of its own.
        first_length = first_segment_length(tok, ids, second_start)
        row, input_mask = pad_row(ids, tok.pad_id, self._model)
        positions = np.flatnonzero(ids == tok.mask_id)
        # At least one, and a multiple of 8 so that texts share compiled programs.
        padded_count = -(-max(len(positions), 1) // 8) * 8
        batch = {
            "input_ids": row,
            "segment_ids": input_mask & (np.arange(input_mask.shape[1]) >= first_length),
            "input_mask": input_mask,
            "masked_lm_positions": np.pad(positions, (0, padded_count - len(positions)))[None],
        }
        batch = {name: jnp.asarray(value, jnp.int32) for name, value in batch.items()}
        masked_lm, next_sentence = self._logits(params, batch)
        probs = np.asarray(jax.nn.softmax(masked_lm[0, : len(positions), : self._model.vocab_size]))
        return probs, None if b is None else float(jax.nn.softmax(next_sentence[0])[0])

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text; "[MASK]" in it becomes the mask token."""
        *before, last = text.split(MASK)
        ids: list[int] = []
        for part in before:  # the space before [MASK] is a part of the predicted token
            ids += [*self._tokenizer.encode(part.rstrip()), self._tokenizer.mask_id]
        return ids + self._tokenizer.encode(last)


@dataclasses.dataclass(repr=False)
class LoadedModel(Base):
    """A run's model or a base, with its weights on one device, and methods for texts.

    `vectors` are settings, for a run those of the base that it started from; its `source` is "".
    """

    name: str = ""  # of the run; for a base, the name of its folder
    step: int = 0  # of the checkpoint; 0 for a base
    experiment: Experiment | None = None  # of the run; None for a base
    manifest: dict[str, Any] | None = None  # of the run's corpus; None for a base
    evaluation: dict[str, Any] | None = None  # the line of metrics.jsonl of this step, if any
    idle: tuple[str, ...] = ()  # parts of the weights that no phase has trained up to this step

    @classmethod
    def of(
        cls, workdir: Workdir, with_moments: bool = False, checkpoint: str = "newest"
    ) -> "LoadedModel":
        """Reads a base, or a checkpoint of a run.

        Args:
          workdir: of a run, or made of a base's folder. `workdir.root` is the folder on this
            machine, `workdir.address` the one that the user named, perhaps in a bucket.
          with_moments: whether to read a run's moments, too.
          checkpoint: for a run `newest`, `best`, or a step.
        """
        if base_lib.is_base(workdir.root):
            _reject_checkpoint_choice(workdir.address, checkpoint)
            return cls.load_base(base_lib.read(workdir.root), workdir.address.name)
        experiment = load_experiment(workdir)
        workdir = workdir.with_corpus(experiment.run.corpus_dir)
        prepared = PreparedCorpus.open(workdir.corpus)
        parts, moments = ("params",), None
        if with_moments:  # asked for by `bert-jax import RUN --with-optimizer`
            parts = "params", "optimizer"
            if experiment.optimizer.name != "bert_adam":
                raise InputError(
                    f"{workdir.address}: optimizer.name={experiment.optimizer.name}; only "
                    "bert_adam's moments can be imported; remove --with-optimizer"
                )
        mesh = mesh_lib.one_device()
        restored = _read_checkpoint(experiment, workdir, prepared, mesh, parts, checkpoint)
        state, done = restored.state, restored.step
        if with_moments:
            adam = jax.device_get(optimizer_lib.moments(state["optimizer"]))
            moments = Moments(done, adam.mu, adam.nu)
        params, fresh = heads.add_missing_heads(experiment.model, state["params"])
        phase_index, _ = experiment.phase_at(max(done - 1, 0))  # of the last finished step
        objectives = (objective.make_objective(experiment, i) for i in range(phase_index + 1))
        idle = set.intersection(*(set(getattr(each, "idle", ())) for each in objectives))
        return cls(
            experiment.latest_model(done),  # phases may differ in direction and global_rotary_base
            params,
            prepared.tokenizer,
            fresh=fresh,
            moments=moments,
            vectors=base_lib.read_vectors(restored.metadata.get("notes", {})),  # see `Job.notes`
            name=experiment.name,
            step=done,
            experiment=experiment,
            manifest=prepared.manifest,
            evaluation=metrics_line(workdir, "evaluation", done),
            idle=tuple(idle),
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
        return [self.tokenizer.token(i) for i in self._predictor.encode(text)]

    @typing.overload
    def fill(self, text: str, next_text: str | None = None, top: int = 5) -> Prediction: ...

    @typing.overload
    def fill(
        self, text: Iterable[str], next_text: Iterable[str] | None = None, top: int = 5
    ) -> list[Prediction]: ...

    def fill(
        self, text: Texts, next_text: Texts | None = None, top: int = 5
    ) -> Prediction | list[Prediction]:
        """Predicts the most likely tokens of every [MASK].

        Args:
          text: a text with any number of [MASK]s, or a list of such texts.
          next_text: a second text, to predict whether it follows the first; or a list of these.
          top: the number of tokens for each [MASK].

        Returns:
          A `Prediction`, or for a list of texts a list of them: `masks`, a list of (token,
          probability) for each [MASK], and `is_next`, the probability that `next_text` follows.
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
          layers: 0 is the embeddings, 1 the first layer, -1 the last layer, -2 the one before it.

        Returns:
          For each text float32 [layers, S, D].
        """
        numbers = list(embed_lib.layer_numbers(tuple(layers), self.model))
        results = []
        for text in list_texts(texts):
            ids, hidden = self._run_layers(text)
            results.append(np.asarray(hidden)[numbers, : len(ids)])
        return results

    def embed(
        self,
        texts: Texts,
        pooling: Literal["mean", "cls", "last"] | None = None,
        layers: Sequence[int] = (-1,),
        normalize: bool | None = None,
        role: TextRole = "document",
    ) -> Floats:
        """Returns the vector of each text, float32 [texts, W].

        A model of sparse vectors returns a `csr_array` [texts, V] instead; a multi-vector model
        returns `TokenVectors`, see `embeddings.forms`. All other models return an array.
        Texts are truncated to the maximum length of the run or the base.

        Args:
          texts: one or several.
          pooling: the mean of the hidden states of all tokens, or the state of [CLS] or of the last
            token; None: the run's or base's own, else the mean.
          layers: 0 is the embeddings, 1 the first layer, -1 the last layer, -2 the one before it.
            The vectors of several layers are concatenated.
          normalize: whether vectors are scaled to length 1; None: as the run or base has it.
          role: selects the prompt, for a model with a prompt for each role.
        """
        require_choice("pooling", pooling, (None, "mean", "cls", "last"))
        require_choice("role", role, typing.get_args(TextRole))
        options = VectorOptions(pooling=pooling, layers=tuple(layers), normalize=normalize)
        embedder = Embedder(self, options, mesh_lib.make_mesh(Parallelism()))  # on all devices
        parts = [part.vectors for part in embedder.embed(list_texts(texts), role)]
        if not parts:
            return np.empty((0, embedder.width), np.float32)
        return embedder.form.concatenate(parts)  # by the form: dense, sparse or multi-vector

    def attention(self, text: str) -> tuple[list[str], Floats]:
        """Returns a text's tokens, with [CLS] and [SEP], and the attention between them.

        Returns:
          The S tokens, and float32 [L, H, S, S]: for each layer and head, the probabilities with
          which a token (third dimension) attends to each token (last dimension).
        """
        _require_text(text, "text")
        ids, hidden = self._run_layers(text)
        encoder = heads.merge(self.model, self.params).encoder  # the module with these parameters
        layer_inputs = hidden[:-1, : len(ids)]  # each output is the next layer's input
        maps = attention_probabilities(encoder, self.model, layer_inputs)
        return [self.tokenizer.token(i) for i in ids], np.asarray(maps)

    def apply(self, params: heads.Params, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        """Computes the logits of both heads for a batch. Can be differentiated.

        Args:
          params: nested dicts of float32 arrays: `self.params`, or others of the same shapes.
          batch: as `bert_jax.batches` returns it.

        Returns:
          float32 [B, P, V] for masked tokens, where V is rounded up to a multiple of 1,024, and
          [B, 2] for the second text of a row: that it follows the first, and that it does not.
        """
        return logits_fn(self.model)(params, batch)

    @functools.cached_property
    def _predictor(self) -> Predictor:
        return Predictor(self.model, self.tokenizer)

    @functools.cached_property
    def _layers_program(self) -> Callable[..., jax.Array]:
        def run(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
            encoder = heads.merge(self.model, params).encoder
            inputs = ids, jnp.zeros_like(ids), mask  # all tokens are of the first segment
            hidden = encode(encoder, self.model, *inputs, noise=None, loop=Loop(), outputs="all")
            return hidden[:, 0].astype(jnp.float32)  # of the only row

        return jax.jit(run)

    def _run_layers(self, text: str) -> tuple[list[int], jax.Array]:
        """Returns the token ids of a text, and the outputs of the embeddings and all layers.

        The outputs are float32 [L + 1, S + padding, D]; no token attends to padding.
        """
        tok = self.tokenizer
        ids = [tok.cls_id, *self._predictor.encode(text), tok.sep_id]
        return ids, self._layers_program(self.params, *pad_row(ids, tok.pad_id, self.model))


def list_texts(texts: Texts, name: str = "texts") -> list[str]:
    """Returns one or several texts as a list; `name` is the argument's name for errors."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        _require_text(texts, name)  # accepts a str; raises InputError for others
        return [texts]
    for position, text in enumerate(texts := list(texts)):
        _require_text(text, f"{name}[{position}]")
    return texts


def list_inputs(inputs: Iterable[str | Sequence[str]]) -> list[str | Sequence[str]]:
    """Returns inputs, each a text or a sequence of texts, as a list; a single text is one input."""
    if isinstance(inputs, str) or not isinstance(inputs, Iterable):
        return [*list_texts(inputs)]
    return list(inputs)


def _require_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        raise InputError(f"{name}: {reprlib.repr(value)} is a {type(value).__name__}, not a text")


def load_params(
    experiment: Experiment,
    workdir: Workdir,
    prepared: PreparedCorpus,
    mesh: jax.sharding.Mesh,
    checkpoint: str = "newest",
) -> tuple[Any, int]:
    """Returns the parameters of a run or base, replicated over the mesh, and the step (base: 0)."""
    if base_lib.is_base(workdir.root):
        _reject_checkpoint_choice(workdir.root, checkpoint)
        base = base_lib.read(workdir.root)
        base_lib.require_same_model(base, experiment.model, str(workdir.root))
        base_lib.require_same_tokenizer(base, prepared.tokenizer, str(workdir.root))
        names = base.params.keys() - base_lib.VECTOR_PARTS
        params = {name: base.params[name] for name in sorted(names)}
        return jax.device_put(params, mesh_lib.replicated(mesh)), 0
    restored = _read_checkpoint(experiment, workdir, prepared, mesh, ("params",), checkpoint)
    return restored.state["params"], restored.step


def _reject_checkpoint_choice(folder: epath.Path, checkpoint: str) -> None:
    """Raises InputError if the user has chosen a checkpoint of a base, which has none."""
    if checkpoint != "newest":
        raise InputError(f"--checkpoint {checkpoint}: {folder} is a base; remove --checkpoint")


def _read_checkpoint(
    experiment: Experiment,
    workdir: Workdir,
    prepared: PreparedCorpus,
    mesh: jax.sharding.Mesh,
    parts: tuple[str, ...],
    checkpoint: str,
) -> Restored:
    """Returns parts of a checkpoint (`newest`, `best` or a step), replicated over the mesh."""
    checkpoints = Checkpoints(workdir.checkpoints)
    # Only the newest checkpoint surely has the present settings: `extend` may have changed them.
    saved_experiment = checkpoints.experiment(checkpoints.find_step("newest"))
    if changed := config.differences(saved_experiment, experiment, role="identity"):
        raise InputError(
            f"{workdir.address}: was trained with other settings ({'; '.join(changed)})"
        )
    # The objectives of all phases have the same parameters.
    pretraining = objective.pretraining_objective(experiment.model, experiment.data)
    abstract = step.abstract_state(pretraining, experiment.optimizer, Parallelism(), mesh)
    restored = checkpoints.restore_chosen(checkpoint, {name: abstract[name] for name in parts})
    prepared.require_same(restored.metadata)
    return restored


def metrics_line(workdir: Workdir, kind: str, step: int) -> dict[str, Any] | None:
    """Returns the newest line of metrics.jsonl of a kind and a step; None if there is none."""
    lines = JsonLines(workdir.metrics).read()
    matches = [line for line in lines if line.get("kind") == kind and line["step"] == step]
    return matches[-1] if matches else None
