"""An experiment as frozen dataclasses, checked where they are built, and their files.

An experiment file returns an `Experiment` or a `Finetuning`; it is saved with the run as JSON.
"""

from bert_jax.config.code import own
from bert_jax.config.comparison import Row, Table
from bert_jax.config.data import Data
from bert_jax.config.fields import Section
from bert_jax.config.files import (
    FORMAT_VERSION,
    build_section,
    differences,
    finetuning_of,
    flatten,
    from_json,
    is_shipped,
    load,
    load_suite,
    load_table,
    load_with_origin,
    name_of,
    notes_on_settings,
    origin_of,
    override,
    source_of,
    to_json,
)
from bert_jax.config.finetuning import (
    LORA_TARGETS,
    Adapt,
    Features,
    Finetuning,
    Task,
)
from bert_jax.config.model import Model
from bert_jax.config.pretraining import (
    MAX_SKIPPED_STEPS,
    Experiment,
    Optimizer,
    Parallelism,
    Phase,
    Run,
)
from bert_jax.config.suite import (
    PredictionFile,
    Rules,
    Suite,
    SuiteScore,
    SuiteTask,
    locate_files,
    locate_source,
)
from bert_jax.config.task_kinds import KINDS, Kind
from bert_jax.config.text_corpus import Corpus, source_name
from bert_jax.config.vectors import MultiVectors, RetrieverLoss, SparseVectors, Vectors
