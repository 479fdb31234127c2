"""An experiment as frozen dataclasses, checked where they are built, and their files.

An experiment file returns an `Experiment` or a `Finetuning`; it is saved with the run as JSON.
"""

from bert_jax.config.code import own
from bert_jax.config.comparison import Row, Table
from bert_jax.config.fields import Section
from bert_jax.config.files import (
    FORMAT_VERSION,
    differences,
    finetuning_of,
    flatten,
    from_json,
    is_shipped,
    load,
    load_table,
    load_with_origin,
    notes,
    override,
    section,
    source_of,
    to_json,
)
from bert_jax.config.finetuning import (
    LORA_TARGETS,
    SCORES,
    SOURCES,
    Adapt,
    Features,
    Finetuning,
    Kind,
    Task,
)
from bert_jax.config.pretraining import (
    SKIPPED_STEPS,
    Corpus,
    Data,
    Experiment,
    Model,
    Optimizer,
    Parallelism,
    Phase,
    Run,
    named,
)

__all__ = [
    "FORMAT_VERSION",
    "LORA_TARGETS",
    "SCORES",
    "SKIPPED_STEPS",
    "SOURCES",
    "Adapt",
    "Corpus",
    "Data",
    "Experiment",
    "Features",
    "Finetuning",
    "Kind",
    "Model",
    "Optimizer",
    "Parallelism",
    "Phase",
    "Row",
    "Run",
    "Section",
    "Table",
    "Task",
    "differences",
    "finetuning_of",
    "flatten",
    "from_json",
    "is_shipped",
    "load",
    "load_table",
    "load_with_origin",
    "named",
    "notes",
    "override",
    "own",
    "section",
    "source_of",
    "to_json",
]
