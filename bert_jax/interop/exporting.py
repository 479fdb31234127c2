"""Exports a loaded model of any kind as a folder for other libraries."""

from typing import Literal, cast

from etils import epath

from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop import finetuned, huggingface
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.tasks.finetuned_model import FinetunedModel

# The form of an export determines the class that reads it. A model that is not fine-tuned has
# one of the first four. A fine-tuned model has the form `masked_lm` if it makes sparse vectors,
# `encoder` if it makes other vectors, else one of `task`, `adapter` and `encoder`.
Form = Literal["pretraining", "masked_lm", "encoder", "causal_lm", "task", "adapter"]
Dtype = Literal["float32", "bfloat16"]


def export(
    model: LoadedModel, target: epath.Path, form: Form | None, dtype: Dtype, address: str = ""
) -> str:
    """Writes a model to the folder `target`, which must not exist.

    Args:
      target: the folder, which appears when it is complete.
      form: the form; None: the default of a fine-tuned model; other models require one.
      dtype: the type of the weights; bfloat16 rounds them.
      address: what the card's example loads, a path or a hub name; "": the folder's name.

    Returns:
      The name of the class that reads the folder.
    """
    if not isinstance(model, FinetunedModel):
        pretrained_form = _pretrained_form(model.model, form, model.name)
        return huggingface.write_folder(model, pretrained_form, dtype, target, address)
    task_kind = model.task_model.kind
    supported = ("task", "adapter", "encoder")
    if task_kind.task.spec.makes_vectors:
        # Vectors that read the outputs of masked LM are sparse; SparseEncoder loads its class.
        supported = ("masked_lm",) if task_kind.reads == "masked_lm" else ("encoder",)
    chosen = form or supported[0]
    if chosen not in supported:
        raise InputError(
            f"--as {form}: {model.name} was trained with task.kind={task_kind.task.kind}; choose "
            f"{' or '.join(supported)}"
        )
    if chosen in ("encoder", "masked_lm"):
        finetuning = model.task_model.experiment
        return huggingface.write_folder(model, chosen, dtype, target, address, finetuning)
    return finetuned.export(model, cast(finetuned.Form, chosen), dtype, target, address)


def _pretrained_form(model: Model, form: Form | None, name: str) -> huggingface.Form:
    """Returns the form; raises InputError if it is missing or applies only to fine-tuned models."""
    supported = huggingface.forms_of(model)
    if not supported:
        return "encoder"  # `write_folder` raises InputError: no class supports the model
    if form in (None, "task", "adapter"):
        given = "--as" if form is None else f"--as {form}: {name} is not fine-tuned"
        raise InputError(f"{given}: choose {' or '.join(supported)}")
    return cast(huggingface.Form, form)
