"""The model card next to an exported model: what it was trained on, how, and how good it is."""

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import bert_jax
from bert_jax import config
from bert_jax.config import Finetuning, Section
from bert_jax.errors import printable
from bert_jax.interop.names import PARTS, family
from bert_jax.loaded import Loaded
from bert_jax.running import evaluators


class _Class(NamedTuple):
    """A class of theirs: how a hub shows it, and what it is for."""

    task: str  # of the hub
    use: str = ""
    library: str = "transformers"


# By the end of its name.
_CLASSES = {
    "ForPreTraining": _Class("fill-mask", "both heads of pre-training"),
    "ForMaskedLM": _Class("fill-mask", "the masked LM head"),
    "ForCausalLM": _Class("text-generation", "which reads from left to right, and its head"),
    "LMHeadModel": _Class("text-generation", "which reads from left to right, and its head"),
    "ForSequenceClassification": _Class("text-classification"),
    "ForTokenClassification": _Class("token-classification"),
    "ForQuestionAnswering": _Class("question-answering"),
    "ForMultipleChoice": _Class("multiple-choice"),
    "Model": _Class(
        "feature-extraction",
        "the encoder without heads, for fine-tuning or sentence-transformers",
        "sentence-transformers",
    ),
}
_FAMILIES = {
    "bert": "BERT",
    "roberta": "RoBERTa",
    "distilbert": "DistilBERT",
    "modern": "ModernBERT",
}
# Sources beyond these are counted, not named.
_NAMED = 50
_PATHS = ("corpus.sources", "corpus.tokenizer", "init_from", "task.train", "task.validation")
_PARTS = {"pooler": "pooler", "masked_lm": "masked LM head", "next_sentence": "NSP head"}


def write(trained: Loaded, architecture: str, dtype: str, folder: str) -> str:
    """Returns the text of README.md; names of files and runs are code: no markup is read there."""
    # What was imported was trained by others, or by a run that its source names.
    made = "written" if trained.source else "pre-trained"
    place = quoted(folder)
    how_to = [
        f"from transformers import AutoTokenizer, {architecture}",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({place})",
        f"model = {architecture}.from_pretrained({place})",
    ]
    unlearned = [_PARTS[part] for part in trained.fresh if part in PARTS[architecture]]
    fresh = [f"Never trained, freshly initialised: {', '.join(unlearned)}.", ""]
    recipe: list[str] = []
    if (experiment := trained.experiment) is not None:
        done = f"- step: {trained.step} of {experiment.total_steps}"
        recipe = _section("Recipe", done, *_fields(experiment))
    return _text(
        *_top(trained, made, f"`{architecture}`, {_class(architecture).use}", architecture, dtype),
        *_python(how_to),
        *(fresh if unlearned else []),
        *_model(trained),
        *_scores(trained, evaluators.summary),
        *_corpus(trained),
        *recipe,
    )


def write_task(
    trained: Loaded,
    experiment: Finetuning,
    labels: Sequence[str],
    architecture: str,
    dtype: str,
    how_to: Sequence[str],
) -> str:
    """Returns the text of README.md of a fine-tuned model."""
    use = f"`{architecture}`, for texts as task.kind={experiment.task.kind} has them"
    return _text(
        *_top(trained, "fine-tuned", use, architecture, dtype)[:-1],
        *(["", f"Labels: {', '.join(map(code, labels))}."] if labels else []),
        "",
        *_python(how_to),
        *_model(trained),
        *_scores(trained),
        *_section("Recipe", f"- step: {trained.step}", *_fields(experiment)),
    )


def code(text: str) -> str:
    """Returns text as an inline code span, whatever it holds."""
    return f"`{printable(text).replace('`', chr(39)) or ' '}`"


def quoted(name: str) -> str:
    """Returns a name as Python writes it, within a block of code."""
    return json.dumps(printable(name).replace("`", "'"))


def _class(architecture: str) -> _Class:
    return next(one for end, one in _CLASSES.items() if architecture.endswith(end))


def _text(*lines: str) -> str:
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(title: str, *lines: str) -> list[str]:
    return [f"## {title}", "", *lines, ""]


def _python(lines: Sequence[str]) -> list[str]:
    return ["```python", *lines, "```", ""]


def _top(trained: Loaded, made: str, use: str, architecture: str, dtype: str) -> list[str]:
    """Returns what model hubs read, fixed words alone, and what this is."""
    name, of = _FAMILIES[family(trained.model)], _class(architecture)
    return [
        *("---", f"library_name: {of.library}", f"pipeline_tag: {of.task}"),
        *("tags:", f"- {name.lower()}", "---", ""),
        f"# {code(trained.name)}",
        "",
        f"A {name} {made} with bert_jax {bert_jax.__version__}: {use}.",
        f"Weights are {dtype}" + ("." if dtype == "float32" else ", rounded from float32."),
        "",
    ]


def _model(trained: Loaded) -> list[str]:
    fields = [f"- {path}: {code(str(value))}" for path, value in config.flatten(trained.model)]
    source = [f"- imported from: {code(trained.source)}"] if trained.source else []
    text = f"- text: {trained.tokenizer.case} {trained.tokenizer.kind}"
    return _section("Model", *fields, text, *source)


def _scores(trained: Loaded, summary: Callable[[Any], str] | None = None) -> list[str]:
    if trained.evaluation is None:
        return []
    numbers = [f"- {k}: {v:.6g}" for k, v in trained.evaluation.items() if isinstance(v, float)]
    above = [] if summary is None else [summary(trained.evaluation), ""]
    return _section(f"Held-out scores at step {trained.step}", *above, *numbers)


def _corpus(trained: Loaded) -> list[str]:
    if trained.manifest is None:
        return []
    sources: list[dict[str, Any]] = trained.manifest["sources"]
    lines = []
    for split, counts in trained.manifest["splits"].items():
        shown = ", ".join(f"{n} {what}" for what, n in counts.items() if isinstance(n, int))
        lines.append(f"- {code(split)}: {shown}")
    lines.append(f"- vocabulary: sha256 {code(trained.tokenizer.sha256)}")
    lines.append(f"- files: {len(sources)}")
    for source in sources[:_NAMED]:
        name, sha256 = pathlib.PurePath(source["file"]).name, str(source.get("sha256"))
        lines.append(f"  - {code(name)}, sha256 {code(sha256)}")
    if len(sources) > _NAMED:
        lines.append(f"  - and {len(sources) - _NAMED} more")
    return _section("Text", *lines)


def _fields(experiment: Section) -> Iterator[str]:
    for path, value in config.flatten(experiment, "identity"):
        if path in _PATHS:
            # A card is made public, and where its author's files lie is nobody's concern.
            values = value if isinstance(value, tuple) else (value,)
            value = ", ".join(pathlib.PurePath(str(one)).name for one in values)
        if not path.startswith("model.") and value not in ("", ()):
            yield f"- {path}: {code(str(value))}"
