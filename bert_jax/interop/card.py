"""The model card next to an exported model: what it was trained on, how, and how good it is."""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import bert_jax
from bert_jax import config
from bert_jax.config import Finetuning, Model, Section
from bert_jax.errors import printable
from bert_jax.interop.names import PARTS
from bert_jax.loaded import Loaded
from bert_jax.training import evaluators

_USE = {
    "BertForPreTraining": "both heads of pre-training",
    "BertForMaskedLM": "the masked LM head",
    "BertModel": "the encoder without heads, for fine-tuning or sentence-transformers",
    "ModernBertForMaskedLM": "the masked LM head",
    "ModernBertModel": "the encoder without heads, for fine-tuning or sentence-transformers",
    "BertLMHeadModel": "which reads from left to right, and its head",
    "ModernBertDecoderForCausalLM": "which reads from left to right, and its head",
}
# The library that a hub shows a class under, and its task there.
_HUB = {
    "BertForPreTraining": ("transformers", "fill-mask"),
    "BertForMaskedLM": ("transformers", "fill-mask"),
    "BertModel": ("sentence-transformers", "feature-extraction"),
    "ModernBertForMaskedLM": ("transformers", "fill-mask"),
    "ModernBertModel": ("sentence-transformers", "feature-extraction"),
    "BertLMHeadModel": ("transformers", "text-generation"),
    "ModernBertDecoderForCausalLM": ("transformers", "text-generation"),
    **{
        f"{family}For{end}": ("transformers", task)
        for family in ("Bert", "ModernBert")
        for end, task in (
            ("SequenceClassification", "text-classification"),
            ("TokenClassification", "token-classification"),
            ("QuestionAnswering", "question-answering"),
            ("MultipleChoice", "multiple-choice"),
        )
    },
}
_FAMILIES = {"bert": "BERT", "modern": "ModernBERT"}
# Sources beyond these are counted, not named.
_NAMED = 50
_PATHS = ("corpus.sources", "corpus.tokenizer", "init_from", "task.train", "task.validation")
_PARTS = {"pooler": "pooler", "masked_lm": "masked LM head", "next_sentence": "NSP head"}


def write(trained: Loaded, architecture: str, dtype: str, folder: str) -> str:
    """Returns the text of README.md, with names of files and runs as code: no markup is read there.

    Args:
      trained: what is exported.
      architecture: the class that reads it.
      dtype: of the weights.
      folder: what the folder is called.
    """
    family = _FAMILIES[trained.model.kind]
    parts = [
        *_front(trained.model, *_HUB[architecture]),
        f"# {code(trained.name)}",
        "",
        # What was imported was trained by others, or by a run that its source names.
        f"A {family} {'written' if trained.source else 'pre-trained'} with bert_jax "
        f"{bert_jax.__version__}: `{architecture}`, {_USE[architecture]}.",
        f"Weights are {dtype}" + ("." if dtype == "float32" else ", rounded from float32."),
        "",
        *_how_to(architecture, folder),
        *_fresh(trained, architecture),
        *_model(trained),
        *_scores(trained),
        *_corpus(trained),
        *_recipe(trained),
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


def write_task(
    trained: Loaded,
    experiment: Finetuning,
    labels: Sequence[str],
    architecture: str,
    dtype: str,
    how_to: Sequence[str],
) -> str:
    """Returns the text of README.md of a fine-tuned model.

    Args:
      trained: what is exported; its `evaluation` is the line of scores of its step.
      experiment: the fine-tuning.
      labels: their names, by number.
      architecture: the class that reads it.
      dtype: of the weights.
      how_to: Python that loads it.
    """
    parts = [
        *_front(trained.model, *_HUB[architecture]),
        f"# {code(trained.name)}",
        "",
        f"A {_FAMILIES[trained.model.kind]} fine-tuned with bert_jax {bert_jax.__version__}: "
        f"`{architecture}`, for texts as task.kind={experiment.task.kind} has them.",
        f"Weights are {dtype}" + ("." if dtype == "float32" else ", rounded from float32."),
        *(["", f"Labels: {', '.join(map(code, labels))}."] if labels else []),
        "",
        "```python",
        *how_to,
        "```",
        "",
        *_model(trained),
    ]
    if trained.evaluation is not None:
        parts += [f"## Held-out scores at step {trained.step}", ""]
        parts += [
            f"- {name}: {value:.6g}"
            for name, value in trained.evaluation.items()
            if isinstance(value, float)
        ]
        parts.append("")
    parts += ["## Recipe", "", f"- step: {trained.step}", *_fields(experiment)]
    return "\n".join(parts).rstrip("\n") + "\n"


def code(text: str) -> str:
    """Returns text as an inline code span, whatever it holds."""
    return f"`{printable(text).replace('`', chr(39)) or ' '}`"


def _front(model: Model, library: str, task: str) -> list[str]:
    """Returns what model hubs read; fixed words alone."""
    return [
        "---",
        f"library_name: {library}",
        f"pipeline_tag: {task}",
        "tags:",
        f"- {_FAMILIES[model.kind].lower()}",
        "---",
        "",
    ]


def _how_to(architecture: str, folder: str) -> Iterator[str]:
    name = json.dumps(printable(folder).replace("`", "'"))
    yield "```python"
    yield f"from transformers import AutoTokenizer, {architecture}"
    yield ""
    yield f"tokenizer = AutoTokenizer.from_pretrained({name})"
    yield f"model = {architecture}.from_pretrained({name})"
    yield "```"
    yield ""


def _fresh(trained: Loaded, architecture: str) -> Iterator[str]:
    unlearned = [_PARTS[part] for part in trained.fresh if part in PARTS[architecture]]
    if unlearned:
        yield f"Never trained, freshly initialised: {', '.join(unlearned)}."
        yield ""


def _model(trained: Loaded) -> Iterator[str]:
    yield "## Model"
    yield ""
    for path, value in config.flatten(trained.model):
        yield f"- {path}: {code(str(value))}"
    yield f"- text: {trained.tokenizer.case} {trained.tokenizer.kind}"
    if trained.source:
        yield f"- imported from: {code(trained.source)}"
    yield ""


def _scores(trained: Loaded) -> Iterator[str]:
    if trained.evaluation is None:
        return
    yield f"## Held-out scores at step {trained.step}"
    yield ""
    yield evaluators.summary(trained.evaluation)
    yield ""
    for name, value in trained.evaluation.items():
        if isinstance(value, float):
            yield f"- {name}: {value:.6g}"
    yield ""


def _corpus(trained: Loaded) -> Iterator[str]:
    if trained.manifest is None:
        return
    sources: list[dict[str, Any]] = trained.manifest["sources"]
    yield "## Text"
    yield ""
    for split, counts in trained.manifest["splits"].items():
        shown = ", ".join(f"{n} {what}" for what, n in counts.items() if isinstance(n, int))
        yield f"- {code(split)}: {shown}"
    yield f"- vocabulary: sha256 {code(trained.tokenizer.sha256)}"
    yield f"- files: {len(sources)}"
    for source in sources[:_NAMED]:
        name, sha256 = pathlib.PurePath(source["file"]).name, str(source.get("sha256"))
        yield f"  - {code(name)}, sha256 {code(sha256)}"
    if len(sources) > _NAMED:
        yield f"  - and {len(sources) - _NAMED} more"
    yield ""


def _recipe(trained: Loaded) -> Iterator[str]:
    if trained.experiment is None:
        return
    yield "## Recipe"
    yield ""
    yield f"- step: {trained.step} of {trained.experiment.total_steps}"
    yield from _fields(trained.experiment)
    yield ""


def _fields(experiment: Section) -> Iterator[str]:
    for path, value in config.flatten(experiment, "identity"):
        if path in _PATHS:
            # A card is made public, and where its author's files lie is nobody's concern.
            values = value if isinstance(value, tuple) else (value,)
            value = ", ".join(pathlib.PurePath(str(one)).name for one in values)
        if not path.startswith("model.") and value not in ("", ()):
            yield f"- {path}: {code(str(value))}"
