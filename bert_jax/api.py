"""The functions of `import bert_jax`: each does what the command of the same name does.

Paths are strings or `pathlib` paths, of this machine or of a bucket. A model is a path, or the
result of `load`. Shape letters: B rows, S positions, P predictions, W width of a vector.
"""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from etils import epath

from bert_jax import config
from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Experiment, Finetuning, Parallelism
from bert_jax.config.code import allow_code_file
from bert_jax.data import corpus
from bert_jax.data.batches import Batch
from bert_jax.embeddings import nearest, whitening
from bert_jax.embeddings import search as search_lib
from bert_jax.embeddings.embed import Embedder, TextRole, VectorOptions
from bert_jax.embeddings.search import SearchHit
from bert_jax.errors import InputError, require_choice
from bert_jax.interop import exporting, hub, huggingface, importing
from bert_jax.pretraining.evaluators import score_held_out
from bert_jax.pretraining.loaded_model import Floats, LoadedModel, Texts, list_inputs, list_texts
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.pretraining.pretraining_job import PretrainingJob
from bert_jax.process import logger
from bert_jax.running import session
from bert_jax.running.progress import BarProgress, LoggedProgress
from bert_jax.storage import copies, mirror
from bert_jax.storage.workdir import Workdir, holds_finetuning, holds_task, load_experiment
from bert_jax.tasks import finetuning_job, probes
from bert_jax.tasks.finetuned_model import FinetunedModel
from bert_jax.training import mesh as mesh_lib

Path = str | os.PathLike[str]
T = TypeVar("T", Experiment, Finetuning)

# --- train ----------------------------------------------------------------------------------------


def pretrain(
    experiment: Experiment | Path,
    workdir: Path | None = None,
    settings: Sequence[str] = (),
    progress: bool = False,
) -> LoadedModel:
    """Starts or resumes a pre-training run, trains it to its last step, and loads the result.

    The logger `bert_jax` receives the lines that the command prints (level INFO).

    Args:
      experiment: an `Experiment`, the path of an experiment file, or of a resolved config in JSON.
      workdir: the run's folder; None: runs/NAME.
      settings: fields to override, such as "phases.0.steps=100".
      progress: whether to show a bar on standard error, which is updated in place.

    Raises:
      RuntimeError: the run ended before its last step.
    """
    experiment, run = _open_run(experiment, workdir, settings)
    display = _make_progress(progress)
    outcome = session.run(PretrainingJob(experiment, run, display.report), display)
    _require_finished(outcome, run.address)
    return load(run.address)


def finetune(
    task: Finetuning | Path,
    base: Path | None = None,
    workdir: Path | None = None,
    settings: Sequence[str] = (),
    progress: bool = False,
) -> FinetunedModel:
    """Starts or resumes the fine-tuning of a base or a run on a task, and loads the result.

    Args:
      task: a `Finetuning`, the path of a task file, or of a resolved config in JSON.
      base: the base, run or model of the hub whose encoder is fine-tuned; None: the one that
        `task` names.
      workdir: the folder of the new run; None: runs/NAME.
      settings: fields to override, such as "task.train=tsv:train.tsv".
      progress: whether to show a bar on standard error, which is updated in place.

    Raises:
      RuntimeError: the run ended before its last step.
    """
    if not isinstance(task, Finetuning):
        task = config.load(os.fspath(task), kind=Finetuning)
    task = _override(task, settings)
    root = f"runs/{task.name}" if workdir is None else os.fspath(workdir)
    base_path = None if base is None else hub.fetch_base(os.fspath(base))
    outcome = finetuning_job.finetune(task, base_path, root, _make_progress(progress))
    _require_finished(outcome, root)
    return FinetunedModel.load(mirror.open_workdir(root), base_path)


def _open_run(
    experiment: Experiment | Path, workdir: Path | None, settings: Sequence[str] = ()
) -> tuple[Experiment, Workdir]:
    if not isinstance(experiment, Experiment):
        experiment = config.load(os.fspath(experiment))
    experiment = _override(experiment, settings)
    root = f"runs/{experiment.name}" if workdir is None else workdir
    return experiment, mirror.open_workdir(root, experiment.run.corpus_dir, to_write=True)


def _override(experiment: T, settings: Sequence[str]) -> T:
    if isinstance(settings, str):
        raise InputError(f"settings: {settings!r} is one text; give a list of texts")
    return config.override(experiment, settings)


def _make_progress(shows_bar: bool) -> LoggedProgress:
    return BarProgress() if shows_bar else LoggedProgress()


def _require_finished(outcome: str, address: Path) -> None:
    if outcome != "finished":
        raise RuntimeError(f"{address}: the run has {outcome}; call again to resume it")


# --- load and use ---------------------------------------------------------------------------------


def load(
    path: Path, checkpoint: str = "newest", code: Path | None = None, base: Path | None = None
) -> LoadedModel:
    """Loads a model from a run, a fine-tuned run, a base, or a folder that transformers wrote.

    Args:
      path: the folder; a run or a base may also be in a bucket. OWNER/NAME is a model of the
        Hugging Face Hub if there is no such folder.
      checkpoint: a run's checkpoint: `newest`, `best` (by held-out loss), or a step.
      code: the Python file of a run's custom objective or encoder; it is executed only if its
        hash is the one that the run has saved.
      base: for a fine-tuned run, where its base is now; None: where it was during training.

    Returns:
      For a fine-tuned run, or a model with the head of a task, a `FinetunedModel`, which also
      predicts labels, tags or answers.
    """
    if code is not None:
        allow_code_file(os.fspath(code))
    folder = epath.Path(hub.fetch_base(os.fspath(path)))
    run = mirror.open_workdir(folder)
    if base is not None and not holds_finetuning(run):
        raise InputError(f"base: {folder} is not a fine-tuned run; remove base")
    if holds_task(run):
        return FinetunedModel.load(run, None if base is None else os.fspath(base), checkpoint)
    has_config = (run.root / "config.json").exists()
    if base_lib.is_base(run.root) or run.experiment.exists() or not has_config:
        return LoadedModel.of(run, checkpoint=checkpoint)
    loaded = LoadedModel.load_base(huggingface.read_folder(run.root, logger.info), folder.name)
    return loaded if loaded.head is None else FinetunedModel.load(loaded)


def _load(model: LoadedModel | Path) -> LoadedModel:
    return model if isinstance(model, LoadedModel) else load(model)


def predict(
    model: LoadedModel | Path, texts: Iterable[str | Sequence[str]]
) -> list[dict[str, Any]]:
    """Fills [MASK] and scores whether B follows A, or predicts with a fine-tuned model.

    Args:
      model: a model, or the path of one.
      texts: for each example its text, or a sequence of its texts: (A, B) for a pair, (question,
        context) for an answer.

    Returns:
      A dict for each example. A fine-tuned model gives what `bert-jax predict` writes as JSON, such
      as `label` and `probabilities`. Other models give `masks`, the most likely tokens of each
      [MASK] with their probabilities, and `is_next`, the probability that B follows A, or None.
    """
    loaded = _load(model)
    if isinstance(loaded, FinetunedModel):
        return loaded.predict(texts)
    answers = []
    for position, example in enumerate(list_inputs(texts)):
        parts = list_texts(example, f"texts[{position}]")
        if not 1 <= len(parts) <= 2:
            raise InputError(f"texts[{position}]: has {len(parts)} texts; give one or two")
        second = parts[1] if len(parts) == 2 else None
        answers.append(dataclasses.asdict(loaded.fill(parts[0], second)))
    return answers


def evaluate(path: Path, checkpoint: str = "newest", tasks: Sequence[Path] = ()) -> dict[str, Any]:
    """Scores a checkpoint: on held-out rows, on the validation examples of its task, or on tasks.

    Args:
      path: a run or a fine-tuned run; with `tasks` also a base.
      checkpoint: `newest`, `best`, or a step.
      tasks: task files; they are scored without fine-tuning, by probes of the frozen encoder.

    Returns:
      `step` and the metrics by name, as `bert-jax evaluate` prints them as JSON.
    """
    if tasks:
        loaded = load(path, checkpoint)
        names = [os.fspath(task) for task in tasks]
        scores = probes.score_probes(probes.Probes(names, max_pairs=None, where="tasks"), loaded)
        return {"step": loaded.step, **scores}
    run = mirror.open_workdir(path)
    if holds_finetuning(run):
        return FinetunedModel.load(run, None, checkpoint).score()
    experiment = load_experiment(run)
    step, metrics = score_held_out(
        experiment, run.with_corpus(experiment.run.corpus_dir), checkpoint
    )
    return {"step": step, **metrics}


def embed(
    model: LoadedModel | Path,
    texts: Texts,
    role: TextRole = "document",
    pooling: Literal["mean", "cls", "last"] | None = None,
    layers: Sequence[int] = (-1,),
    normalize: bool | None = None,
) -> Floats:
    """Returns the vector of each text, float32 [texts, W]; see `LoadedModel.embed`."""
    return _load(model).embed(texts, pooling, layers, normalize, role)


def whiten(
    model: LoadedModel | Path, texts: Texts, workdir: Path, dimensions: int = 0
) -> LoadedModel:
    """Makes a base whose vectors are whitened (Su et al. 2021), and returns the loaded base.

    Args:
      model: a run or base with dense vectors and without a Dense layer, or the path of one.
      texts: thousands of texts of the kind that will be compared, without labels.
      workdir: the folder of the new base, which must not exist.
      dimensions: how many numbers a new vector has; 0: as many as the model's vectors have.
    """
    target = epath.Path(workdir)
    copies.require_new_folder(target)
    lines = ((f"texts[{number}]", text) for number, text in enumerate(list_texts(texts)))
    loaded = _load(model)
    name = f"{loaded.name}, step {loaded.step}"
    whitening.whiten(loaded, name, lines, target, logger.info, dimensions)
    return load(target)


def search(
    model: LoadedModel | Path,
    texts: Path | Iterable[str],
    queries: Texts,
    top: int = 10,
    vectors: Path | None = None,
) -> list[list[SearchHit]]:
    """Finds the texts that are nearest to queries, by the scores of their vectors.

    The score is the cosine or, for a model of another form of vectors, as in `embeddings.forms`.

    Args:
      model: a model, or the path of one.
      texts: the path of a file with a text on each line, or the texts themselves.
      queries: one or several.
      top: the number of texts to find for each query.
      vectors: for a file, the folder that keeps its vectors; None: FILE.vectors.

    Returns:
      For each query its hits, best first: `line` (from 1), `score` and `text`.
    """
    if top < 1:
        raise InputError(f"top: {top} must be at least 1")
    loaded, query_list = _load(model), list_texts(queries, "queries")
    embedder = Embedder(loaded, VectorOptions(normalize=True), mesh_lib.make_mesh(Parallelism()))
    if isinstance(texts, str | os.PathLike):
        folder = epath.Path(vectors if vectors is not None else f"{os.fspath(texts)}.vectors")
        index = search_lib.Index(os.fspath(texts), folder, loaded, embedder, logger.info)
        return index.nearest(query_list, top) if query_list else []
    text_list = list_texts(texts)
    if vectors is not None:
        raise InputError("vectors: applies only if texts is the path of a file; remove vectors")
    if not text_list or not query_list:
        return [[] for _ in query_list]
    blocks = (part.vectors for part in embedder.embed(text_list))
    parts = [part.vectors for part in embedder.embed(query_list, "query")]
    form = embedder.form
    indices, scores = nearest.nearest(blocks, form.concatenate(parts), top, form.score)
    return [
        [
            SearchHit(i + 1, float(score), text_list[i])
            for i, score in zip(row.tolist(), row_scores, strict=True)
        ]
        for row, row_scores in zip(indices, scores, strict=True)
    ]


def batches(experiment: Experiment | Path, step: int, workdir: Path | None = None) -> Batch:
    """Returns the batch of any step, without the steps before; prepares the corpus if needed.

    Args:
      experiment: an `Experiment`, the path of an experiment file, or of a resolved config in JSON.
      step: the index of the step, from 0, counted over all phases.
      workdir: the run's folder; None: runs/NAME.

    Returns:
      NumPy arrays: input_ids, segment_ids, input_mask int32 [B, S]; masked_lm_positions,
      masked_lm_ids int32 and masked_lm_weights float32 [B, P]; next_sentence_labels int32 [B], 1
      if the second sentence is random; rows uint32 [B]; row_weights float32 [B].
    """
    experiment, run = _open_run(experiment, workdir)
    if not 0 <= step < experiment.total_steps:
        raise InputError(f"step {step}: the run has steps 0 to {experiment.total_steps - 1}")
    corpus.prepare(experiment.corpus, experiment.model.vocab_size, run.corpus, logger.info)
    phase, first = experiment.phase_at(step)
    train = PreparedCorpus.open(run.corpus).train_batches(experiment, phase)
    return train.batch(step - first, np.arange(experiment.phases[phase].batch_size))


# --- exchange -------------------------------------------------------------------------------------


def import_weights(
    source: Path,
    workdir: Path,
    tokenizer: Path | None = None,
    vocabulary: Path | None = None,
    keep: int = 0,
    add: Path | None = None,
    kind: str | None = None,
    settings: Sequence[str] = (),
) -> LoadedModel:
    """Turns another library's checkpoint, or a run, into a base, and loads the base.

    Args:
      source: a folder of `save_pretrained`, a model of the Hugging Face Hub (OWNER/NAME or
        OWNER/NAME@REVISION), a TensorFlow 1 checkpoint, or a run.
      workdir: the folder of the base, which must not exist.
      tokenizer: a WordPiece vocabulary or a tokenizer folder to use instead of the source's.
      vocabulary: a file or folder of text; tokens that this text does not use are removed.
      keep: with `vocabulary`, the number of most frequent tokens to keep; 0: all that are used.
      add: a file of words, one on each line, that become tokens.
      kind: if the source has the head of a task, its `task.kind`; None: the one that is likely.
      settings: settings of this task, such as "task.max_sequence_length=256".
    """
    if keep and vocabulary is None:
        raise InputError("keep: requires vocabulary, the text whose tokens are counted")
    target = epath.Path(workdir)
    copies.require_new_folder(target)
    importing.import_weights(
        hub.fetch_files(os.fspath(source)),
        target,
        None if tokenizer is None else os.fspath(tokenizer),
        logger.info,
        text="" if vocabulary is None else os.fspath(vocabulary),
        limit=keep,
        words="" if add is None else os.fspath(add),
        kind=kind,
        settings=settings,
    )
    return load(target)


def export(
    model: LoadedModel | Path,
    folder: Path,
    form: exporting.Form | None = None,
    dtype: exporting.Dtype = "float32",
) -> str:
    """Writes a model for transformers, PEFT or sentence-transformers.

    Args:
      model: a model, or the path of one.
      folder: the folder to write, which must not exist.
      form: as the flag --as of `bert-jax export`; None: `task` for a fine-tuned model, or `encoder`
        if its task is to make vectors. Other models require it.
      dtype: the type of the weights that are written.

    Returns:
      The name of the class that reads the folder, such as `BertForMaskedLM`.
    """
    require_choice("form", form, (None, *get_args(exporting.Form)))
    require_choice("dtype", dtype, get_args(exporting.Dtype))
    target = epath.Path(folder)
    copies.require_new_folder(target)
    return exporting.export(_load(model), target, form, dtype)
