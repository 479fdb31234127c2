"""A fine-tuned model as a Python object: its encoder, its predictions and its scores."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from bert_jax.errors import InputError, pluralize
from bert_jax.pretraining.loaded_model import LoadedModel, list_examples, list_texts
from bert_jax.storage.workdir import Workdir
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.examples import Tally
from bert_jax.tasks.predict import TaskModel


@dataclasses.dataclass(repr=False)
class FinetunedModel(LoadedModel):
    """A fine-tuned model: its encoder, with the methods of `LoadedModel`, and its task.

    `fill` raises InputError, since the heads of pre-training are not fine-tuned.
    """

    task_model: TaskModel = dataclasses.field(kw_only=True)

    @classmethod
    def load(
        cls, run: Workdir, base: str | None = None, checkpoint: str = "newest"
    ) -> "FinetunedModel":
        """Reads a checkpoint of a fine-tuned run.

        `base` is where the base of the run is now; None: where it was during training.
        """
        task_model = TaskModel(run, base, checkpoint)
        loaded = task_model.encoder()
        fields = {f.name: getattr(loaded, f.name) for f in dataclasses.fields(LoadedModel)}
        return cls(**fields, task_model=task_model)

    @property
    def labels(self) -> tuple[str, ...]:
        """The label names in the order of the head's outputs; () for a task without labels."""
        return self.task_model.labels

    def predict(self, texts: Iterable[str | Sequence[str]]) -> list[dict[str, Any]]:
        """Returns the prediction for each example, as `bert-jax predict` writes it.

        Args:
          texts: for each example its text, or a sequence of its texts.
        """
        task, flat = self.task_model.task, list[str]()
        count = len(task.text_columns)
        for position, example in enumerate(list_examples(texts)):
            parts = list_texts(example, f"texts[{position}]")
            if len(parts) != count:
                raise InputError(
                    f"texts[{position}]: has {pluralize(len(parts), 'text')}; "
                    f"task.kind={task.kind} takes {count}"
                )
            flat += parts
        return list(self.task_model.predict(examples_lib.parse_arguments(task, flat)))

    def score(self, sources: str | Sequence[str] = ()) -> dict[str, Any]:
        """Returns `step`, `loss`, `score` (the main metric of the task) and all metrics by name.

        Args:
          sources: one or several, as in `task.validation`, such as "tsv:FILE"; none: the validation
            examples of the run.
        """
        listed = [sources] if isinstance(sources, str) else sources
        metrics, _ = self.task_model.score_sources(listed, Tally())
        return metrics
