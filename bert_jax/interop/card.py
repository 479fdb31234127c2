"""The model card of an exported model: its configuration, corpus, recipe and scores."""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Literal

import bert_jax
from bert_jax import config
from bert_jax.config import Experiment, Finetuning
from bert_jax.errors import printable
from bert_jax.interop.names import FAMILIES, PARTS, family
from bert_jax.pretraining.loaded_model import LoadedModel

# The hub's name of a task by the suffix of a class.
_TASKS = {
    "ForPreTraining": "fill-mask",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "Model": "feature-extraction",
}
# Maximum number of sources that are listed; further sources are counted.
_MAX_SOURCES = 50
_PATHS = ("corpus.sources", "corpus.tokenizer", "init_from", "task.train", "task.validation")
_PATHS += ("vectors.teacher",)


def render(
    trained: LoadedModel,
    architecture: str,
    dtype: str,
    folder: str,
    form: Literal["model", "adapter"] = "model",
    finetuning: Finetuning | None = None,
    labels: Sequence[str] = (),
) -> str:
    """Returns README.md, with names of files and runs in code spans, where they are no markup.

    `architecture` is the class that reads the model from `folder`, a path or a name on the hub; the
    form `adapter` is PEFT's, with a base in the folder; `finetuning` is the experiment that made
    the model, with its labels.
    """
    task = next(task for end, task in _TASKS.items() if architecture.endswith(end))
    vector_class = _vector_class(trained, architecture)
    if vector_class:
        task = "feature-extraction"
    if finetuning and finetuning.task.kind == "rank":
        task = "text-ranking"
    name = FAMILIES[family(trained.model)].label
    # A model with a `source` is a base, which bert_jax did not necessarily pre-train.
    made = "written" if trained.source else "fine-tuned" if finetuning else "pre-trained"
    use = f", for texts of task.kind={finetuning.task.kind}" if finetuning else ""
    is_for_texts = task in ("feature-extraction", "text-ranking")
    library = "sentence-transformers" if is_for_texts else "transformers"
    fresh = [part.partition("/")[0] for part in trained.fresh]
    untrained = [part for part in fresh if part in PARTS.get(architecture, ())]
    lines = [
        # Metadata for model hubs, without text of users.
        *("---", f"library_name: {library}", f"pipeline_tag: {task}"),
        *("tags:", f"- {name.lower()}", "---", ""),
        *(f"# {code_span(trained.name)}", ""),
        f"A {name} {made} with bert_jax {bert_jax.__version__}: `{architecture}`{use}.",
        f"Weights are {dtype}" + ("." if dtype == "float32" else ", rounded from float32."),
        *([f"Labels: {', '.join(map(code_span, labels))}."] if labels else []),
        *([f"Never trained, freshly initialised: {', '.join(untrained)}."] if untrained else []),
        *(
            "",
            "```python",
            *_usage_example(vector_class or architecture, folder, form, task),
            "```",
        ),
        *("", "## Model", ""),
        *(f"- {path}: {code_span(str(value))}" for path, value in config.flatten(trained.model)),
        f"- text: {trained.tokenizer.case} {trained.tokenizer.kind}",
        *([f"- imported from: {code_span(trained.source)}"] if trained.source else []),
    ]
    if trained.evaluation is not None:
        numbers = [(k, v) for k, v in trained.evaluation.items() if isinstance(v, float)]
        lines += ["", f"## Held-out scores at step {trained.step}", ""]
        lines += [f"- {name}: {value:.6g}" for name, value in numbers]
    if trained.manifest is not None:
        lines += ["", "## Text", "", *_corpus(trained)]
    recipe = finetuning or trained.experiment
    if recipe is not None and not trained.source:
        lines += ["", "## Recipe", "", f"- step: {trained.step}", *_identity_fields(recipe)]
    return "\n".join(lines) + "\n"


def code_span(text: str) -> str:
    """Returns any text as an inline code span."""
    return f"`{printable(text).replace('`', chr(39)) or ' '}`"


def _vector_class(trained: LoadedModel, architecture: str) -> str | None:
    """Returns the class of sentence-transformers for sparse vectors or vectors of tokens."""
    form = trained.vectors.form if trained.vectors else "dense"
    if form == "sparse" and architecture.endswith("ForMaskedLM"):
        return "SparseEncoder"
    return "MultiVectorEncoder" if form == "multi_vector" and architecture[-5:] == "Model" else None


def _usage_example(
    architecture: str, folder: str, form: Literal["model", "adapter"], task: str
) -> list[str]:
    paths = (folder, f"{folder}/base")
    target, base = (json.dumps(printable(path).replace("`", "'")) for path in paths)
    if task == "text-ranking" and form == "model":
        load = f"model = CrossEncoder({target})"
        rank = 'ranking = model.rank("a query", ["a text", "another text"])'
        return ["from sentence_transformers import CrossEncoder", "", load, rank]
    if architecture in ("SparseEncoder", "MultiVectorEncoder"):
        encode = ['queries = model.encode_query(["a query"])']
        encode += ['texts = model.encode_document(["a text", "another text"])']
        encode += ["scores = model.similarity(queries, texts)"]
        load = f"model = {architecture}({target})"
        return [f"from sentence_transformers import {architecture}", "", load, *encode]
    lines = [f"from transformers import AutoTokenizer, {architecture}"]
    load = f"{architecture}.from_pretrained({base if form == 'adapter' else target})"
    if form == "adapter":
        lines.insert(0, "from peft import PeftModel")
        load = f"PeftModel.from_pretrained({load}, {target})"
    tokenizer = f"tokenizer = AutoTokenizer.from_pretrained({target})"
    return [*lines, "", tokenizer, f"model = {load}"]


def _corpus(trained: LoadedModel) -> Iterator[str]:
    assert trained.manifest is not None
    for split, counts in trained.manifest["splits"].items():
        shown = ", ".join(f"{n} {noun}" for noun, n in counts.items() if isinstance(n, int))
        yield f"- {code_span(split)}: {shown}"
    yield f"- vocabulary: sha256 {code_span(trained.tokenizer.sha256)}"
    sources = trained.manifest["sources"]
    yield f"- files: {len(sources)}"
    for source in sources[:_MAX_SOURCES]:
        name, sha256 = pathlib.PurePath(source["file"]).name, str(source.get("sha256"))
        yield f"  - {code_span(name)}, sha256 {code_span(sha256)}"
    if len(sources) > _MAX_SOURCES:
        yield f"  - and {len(sources) - _MAX_SOURCES} more"


def _identity_fields(experiment: Experiment | Finetuning) -> Iterator[str]:
    """Yields lines of the fields with the role `identity`, which change what is computed."""
    for path, value in config.flatten(experiment, "identity"):
        if path in _PATHS:
            # Cards are published; the paths of the author's files are private.
            values = value if isinstance(value, tuple) else (value,)
            value = ", ".join(pathlib.PurePath(str(item)).name for item in values)
        if not path.startswith("model.") and value not in ("", ()):
            yield f"- {path}: {code_span(str(value))}"
