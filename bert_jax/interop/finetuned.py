"""Export of fine-tuned runs for transformers: a whole model, or an adapter for PEFT.

A run with low-rank matrices (`adapt.how=lora`) is exported either as a whole model, with the
products of the matrices added to kernels, or as an adapter: adapter_config.json,
adapter_model.safetensors, and the base model in the folder `base`. The base's head is zero; the
adapter has the trained head.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from bert_jax.config import Adapt
from bert_jax.errors import InputError
from bert_jax.interop import card, configs, names, vocabularies, weights
from bert_jax.interop.huggingface import INPUTS, write_tensors
from bert_jax.interop.sentence_transformers import RANKING_ACTIVATIONS
from bert_jax.interop.vocabularies import write_json
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.copies import new_folder
from bert_jax.tasks.finetuned_model import FinetunedModel, TaskModel
from bert_jax.tasks.task_objective import merged_params

# Classes of transformers by `names.family` and by kind of task.
ARCHITECTURES = {
    family: {kind: group.class_prefix + end for end, kinds in names.TASKS.items() for kind in kinds}
    for family, group in names.FAMILIES.items()
}
# PEFT's names of tasks. It has no name for `choice`, and the class of PEFT 0.21 for `span` drops
# token_type_ids: adapters of these kinds name the class of their base instead.
_TASK_TYPES = {
    "classify": "SEQ_CLS",
    "pair": "SEQ_CLS",
    "regress": "SEQ_CLS",
    "rank": "SEQ_CLS",
    "tag": "TOKEN_CLS",
}
Form = Literal["task", "adapter"]


def export(
    loaded: FinetunedModel,
    form: Form,
    dtype: Literal["float32", "bfloat16"],
    target: epath.Path,
    address: str = "",
) -> str:
    """Writes a folder for transformers or PEFT, which appears at `target` when it is complete.

    `adapter` exports the trained parameters next to their base; bfloat16 rounds the weights.
    `target` must not exist. The card loads the model from `address` (default: the name of the
    folder). Returns the class that reads the folder.
    """
    model = loaded.task_model
    architecture, adapt = architecture_of(model), model.experiment.adapt
    if form == "adapter" and adapt.how != "lora":
        raise InputError(
            f"--as adapter: {model.experiment.name} learned with adapt.how={adapt.how}, and only "
            "lora makes adapters; remove --as adapter to export the whole model"
        )
    with new_folder(target) as folder:
        if form == "task":
            params = merged_params(adapt, model.params, model.frozen)
            _write_model(model, loaded, params, architecture, dtype, folder)
        else:
            trained = {name: tree for name, tree in model.params.items() if name != "lora"}
            head = jax.tree.map(np.zeros_like, trained["head"])
            params = trained | (model.frozen or {}) | {"head": head}
            (folder / "base").mkdir()
            _write_model(model, loaded, params, architecture, dtype, folder / "base")
            _write_adapter(model, architecture, dtype, target, folder)
        # Texts are truncated as in training.
        max_length = model.experiment.task.max_sequence_length
        vocabularies.write(model.tokenizer, max_length, INPUTS[names.family(model.model)], folder)
        text = card.render(
            *(loaded, architecture, dtype, address or target.name),
            form="adapter" if form == "adapter" else "model",
            finetuning=model.experiment,
            labels=model.labels,
        )
        (folder / "README.md").write_text(text, encoding="utf-8")
    return architecture


def architecture_of(model: TaskModel) -> str:
    """Returns the class of transformers for a fine-tuned run; raises InputError without one."""
    task, layers = model.experiment.task.kind, model.experiment.adapt.features
    kinds = ARCHITECTURES[names.family(model.model)]
    reasons = {
        f"has BiLSTM layers on its encoder (adapt.features={layers})": layers,
        f"has learned task.kind={task}": task not in kinds,
        f"adapts a base with custom code (model.code={model.model.code})": model.model.code,
        "adapts a base with model.direction=left_to_right, so its head reads the last [SEP], not "
        "[CLS]": model.model.direction == "left_to_right",
        "reads the mean of all tokens (adapt.pooling=mean), which only ModernBERT supports": (
            model.pooling == "mean" and model.model.kind != "modern"
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise InputError(
                f"--as task: {model.experiment.name} {reason}; transformers has no class for it: "
                "use `bert-jax predict`"
            )
    return kinds[task]


def _write_model(
    model: TaskModel,
    loaded: LoadedModel,
    params: dict[str, Any],
    architecture: str,
    dtype: str,
    folder: epath.Path,
) -> None:
    task, adapt = model.experiment.task, model.experiment.adapt
    fields = configs.fields_of(loaded, architecture, dtype)
    fields |= configs.task_fields(
        task.kind, model.labels, task.label_column, adapt.head_dropout_prob
    )
    if task.kind == "rank":
        fields["sentence_transformers"] = {"activation_fn": RANKING_ACTIVATIONS[task.ranking_loss]}
    if model.pooling == "mean":
        fields["classifier_pooling"] = "mean"
    if names.family(model.model) == "distilbert":
        fields |= dict.fromkeys(("seq_classif_dropout", "qa_dropout"), adapt.head_dropout_prob)
    write_json(folder / "config.json", fields)
    first_row = model.tokenizer.pad_id + 1
    tensors = weights.export_tensors(jax.device_get(params), model.model, architecture, first_row)
    write_tensors(folder / "model.safetensors", tensors, dtype)


# --- adapters -------------------------------------------------------------------------------------


def saved_modules(architecture: str, family: str, trained: Collection[str]) -> list[str]:
    """Returns the modules that an adapter saves: the head, and the part below if in `trained`."""
    parts, head = names.HEADS[architecture]
    if "." in head:  # RoBERTa's head, of which the pooler is a part
        return [head.partition(".")[0]]
    group = names.FAMILIES[family]
    # PEFT also saves a module whose name ends with the head's name, like pre_classifier.
    is_suffix = group.part_below_head in parts and group.module.endswith(head)
    return [head, group.module] if is_suffix or group.part_below_head in trained else [head]


def rank_patterns(lora: Mapping[str, np.ndarray], adapt: Adapt) -> dict[str, Mapping[str, float]]:
    """Returns the ranks and alphas of tensors that concatenate several kernels.

    `lora` has lora_A, float32 [rank, inputs], and lora_B by their names; `adapt` has the rank and
    the alpha of one kernel.
    """
    ranks = {  # names begin with `model.layers.N.`: only ModernBERT concatenates kernels
        name.split(".", 3)[-1].removesuffix(".lora_A.weight"): len(value)
        for name, value in lora.items()
        if name.endswith("lora_A.weight") and len(value) != adapt.lora_rank
    }
    scale = adapt.lora_alpha / adapt.lora_rank
    alphas = {name: rank * scale for name, rank in ranks.items()}
    return {"rank_pattern": ranks, "alpha_pattern": alphas}


def _write_adapter(
    model: TaskModel, architecture: str, dtype: str, target: epath.Path, folder: epath.Path
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors.

    PEFT's kernels are [out, in] and ours [in, out]; both add alpha / rank times the product of the
    low-rank matrices (Hu et al. 2021).
    """
    task, adapt = model.experiment.task, model.experiment.adapt
    params = jax.device_get(model.params)
    lora = weights.export_lora(params["lora"], model.model)
    merged = jax.device_get(merged_params(adapt, model.params, model.frozen))
    all_tensors = weights.export_tensors(merged, model.model, architecture)
    saved = saved_modules(architecture, names.family(model.model), set(params))
    tensors = lora | {
        name: value
        for name, value in all_tensors.items()
        if any(f".{module}." in f".{name}" for module in saved)
    }
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": _TASK_TYPES.get(task.kind),
            "auto_mapping": {
                "base_model_class": architecture,
                "parent_library": "transformers",
            },
            "base_model_name_or_path": str(target / "base"),
            "r": adapt.lora_rank,
            "lora_alpha": adapt.lora_alpha,
            **rank_patterns(lora, adapt),
            "lora_dropout": 0.0,
            "target_modules": sorted({name.rsplit(".", 2)[0] for name in lora}),
            "modules_to_save": saved,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "inference_mode": True,
        },
    )
    prefixed = {f"base_model.model.{name}": value for name, value in tensors.items()}
    write_tensors(folder / "adapter_model.safetensors", prefixed, dtype)
