"""What a fine-tuned run says of examples, and how well it says it."""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bert_jax.config import Finetuning, Parallelism
from bert_jax.errors import InputError
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import rows
from bert_jax.tasks import shape as shape_lib
from bert_jax.tasks.adapted import Adapted
from bert_jax.tasks.examples import Example, Question, Sentence
from bert_jax.tasks.forward import Forward
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.checkpoint import Checkpoints, Restored

# Examples whose rows are in memory at once.
WINDOW = 2048


class TaskModel:
    """A checkpoint of a fine-tuned run over its base, on all devices of this process.

    Args:
      folder: of the run.
      base: where the run's base lies now; None: where it lay then.
      which: of the run's checkpoints: `newest`, `best` (by held-out loss), or a step.

    Attributes:
      claim: of the run.
      labels: in the order of the head's outputs; empty of regressions and spans.
      step: of the checkpoint.

    Raises:
      InputError: no fine-tuned run here, no such checkpoint, a base that is not there or is not the
        one that this run adapted.
    """

    def __init__(self, folder: str, base: str | None = None, which: str = "newest"):
        workdir, parallelism = (
            mirror.opened(folder),
            Parallelism(),
        )  # the run's own is for the devices it had
        mesh = mesh_lib.make_mesh(parallelism)
        with _opened(workdir) as saved:
            number = saved.newest_step() if which == "newest" else saved.named(which)
            if number is None:
                raise InputError(f"{workdir.checkpoints}: no checkpoint yet")
            metadata = saved.metadata(number)
            place = base or load_experiment(workdir, Finetuning).init_from
            claim = saved.claim(number, Finetuning)
            self.claim = dataclasses.replace(claim, init_from=place)
            adapted = _base_of(self.claim, workdir, metadata["init_sha256"])
            self.labels = tuple(metadata["notes"]["labels"])
            shape = shape_lib.of(self.claim.task, self.labels, adapted.tokenizer)
            self._together = len(self.labels) if self.claim.task.kind == "choice" else 1
            objective = adapted.objective(self.claim, shape, self._together)
            abstract = step.abstract_state(objective, self.claim.optimizer, parallelism, mesh)
            restored = _restored(saved, which, {"params": abstract["params"]})
        self.step, self._params = restored.step, restored.state["params"]
        self._shape = shape_lib.of(
            self.claim.task, self.labels, adapted.tokenizer, _threshold(restored, self.claim)
        )
        self._fixed: Any = None
        if self.claim.adapt.how != "full":
            self._fixed = feed.put(adapted.read_by(shape), mesh_lib.replicated(mesh))
        self._forward = Forward(objective, parallelism, mesh)
        self._pad_id = adapted.tokenizer.pad_id
        self._shards, self._size = mesh_lib.data_shards(mesh), 0

    def predict(self, examples: Iterable[Example]) -> Iterator[dict[str, Any]]:
        """Answers to examples in their order, with what was asked; `WINDOW` of them in memory.

        Yields:
          JSON: what the shape's `answers` are, with the `text` or `texts` of a sentence and the
          `question` of a span.
        """
        examples = iter(examples)
        while window := list(itertools.islice(examples, WINDOW)):
            outputs, _, found = self._outputs(window)
            yield from _with_questions(window, self._shape.answers(outputs, found, window))

    def score(self, examples: Sequence[Example]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
        """The scores of labelled examples, all in memory, and the answers to them.

        Returns:
          As metrics.jsonl keeps them: `step`, `loss`, `score`, `examples` and all scores by name,
          those of spans that may have no answer by the run's threshold; and what `predict` yields

        Raises:
          InputError: a label that the run did not learn.
        """
        examples_lib.require_known(self.labels, examples)
        outputs, loss, found = self._outputs(examples)
        scores = self._shape.scores(outputs, found, examples)
        line = {"step": self.step, "loss": loss, "score": scores[self.claim.task.main_score]}
        answers = self._shape.answers(outputs, found, examples)
        return line | {"examples": len(examples)} | scores, _with_questions(examples, answers)

    def _outputs(self, examples: Sequence[Example]) -> tuple[list[Any], float, rows.Rows]:
        found = self._shape.rows(examples)
        if not self._size:  # of the first window: few texts make a small batch
            most = min(self.claim.run.eval_batch_size, len(found.ids) // self._together)
            self._size = -(-most // self._shards) * self._shards * self._together
        batches = rows.eval_batches(found, self._pad_id, self._size)
        return *self._forward.outputs(self._params, self._fixed, batches, found), found


def _with_questions(
    examples: Sequence[Example], answers: Iterable[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for example, answer in zip(examples, answers, strict=True):
        asked: dict[str, Any] = {}
        if isinstance(example, Sentence):
            texts = example.texts
            asked = {"text": texts[0]} if len(texts) == 1 else {"texts": list(texts)}
        elif isinstance(example, Question):
            asked = {"id": example.id, "question": example.question}
        yield asked | answer


def _opened(workdir: Workdir) -> Checkpoints:
    claim = load_experiment(workdir, Finetuning)
    if not mirror.names(workdir.checkpoints):
        raise InputError(f"{workdir.checkpoints}: no checkpoint yet")
    return Checkpoints(workdir.checkpoints, claim.run, "read")


def _base_of(claim: Finetuning, workdir: Workdir, sha256: str) -> Adapted:
    try:
        adapted = Adapted.of(claim)
    except InputError as error:
        raise InputError(
            f"{error}; {workdir.named} adapts {claim.init_from}: say with --from where that is now"
        ) from error
    if adapted.sha256 != sha256:
        raise InputError(
            f"{claim.init_from}: holds other weights ({adapted.sha256[:12]}) than those that "
            f"{workdir.named} adapts ({sha256[:12]}); say with --from where those lie now"
        )
    return adapted


def _restored(saved: Checkpoints, which: str, abstract: Any) -> Restored:
    if which != "newest":
        return saved.restore(saved.named(which), abstract)
    restored = saved.newest(abstract)
    assert restored is not None  # its metadata were read
    for why in restored.damaged.values():
        print(f"{why}; step {restored.step} is used instead", file=sys.stderr)
    return restored


def _threshold(restored: Restored, claim: Finetuning) -> float | None:
    """From where on no answer is given; None where there always is one."""
    if claim.task.kind != "span" or claim.task.no_answer == "never":
        return None
    found = restored.metadata["notes"]["no_answer_threshold"]
    if found is None:
        print(
            f"step {restored.step} was not evaluated; no answer is given where that is better at "
            "all, not by the best threshold",
            file=sys.stderr,
        )
        return 0.0
    return found
