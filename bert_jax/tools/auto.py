"""Auto: an experiment for a text, a machine and so many hours.

What is chosen and by which rule stands in docs/learning.md, with the runs that the rule was fitted
on. It looks at a sample of the text, at the speed of a large product, and at a few steps.
"""

import collections
import dataclasses
import itertools
import math
import os
import re
import time
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
from etils import epath

from bert_jax import config, hardware, system
from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase
from bert_jax.config.files import SHIPPED
from bert_jax.data import corpus
from bert_jax.distributed import rendezvous
from bert_jax.errors import InputError, duration, pluralize, prefix_errors
from bert_jax.running.progress import LineConsole, Progress
from bert_jax.storage.workdir import Workdir
from bert_jax.text import documents
from bert_jax.tools.compare import budget

# Languages of scripts other than Latin, by the first word of a letter's Unicode name.
_SCRIPTS = {"CYRILLIC": "ru", "GREEK": "el", "ARABIC": "ar", "HEBREW": "he", "DEVANAGARI": "hi"}
_SCRIPTS |= {"HANGUL": "ko", "HIRAGANA": "ja", "KATAKANA": "ja", "CJK": "zh", "THAI": "th"}
_SCRIPTS |= {"ARMENIAN": "hy", "GEORGIAN": "ka", "BENGALI": "bn", "TAMIL": "ta"}
# Common words of languages in it that are rare in the others.
_WORDS = {
    "en": "the and of to is that it was for with",
    "fr": "les des est une dans et du qui pour au",
    "de": "der die und das ist nicht den von mit ein",
    "es": "los las el una por del y es con para",
    "it": "il di che non della per è una gli con",
    "pt": "os as não uma do da em para com ao",
    "nl": "het een van en dat niet zijn op voor met",
    "sv": "och att det som en är på av för inte",
    "da": "og at det er en af til ikke på der",
    "pl": "i w na się nie z do że jest to",
    "cs": "a se na je že v to s jako by",
    "ro": "și de în la cu nu pe este din mai",
    "hu": "a az és hogy nem egy is volt meg de",
    "fi": "ja on ei se että oli hän mutta kun myös",
    "tr": "ve bir bu da için ile de çok ne gibi",
    "vi": "của và là có không được cho một người các",
    "id": "yang dan di untuk dengan itu dari ini pada tidak",
}
# Settings without which a text cannot be looked at.
_READ_BY = ("corpus.text_field", "corpus.encoding")
# Characters of a text that are looked at, from so many of its parts.
_SAMPLE, _PARTS = 200_000, 20


class Size(NamedTuple):
    """An encoder and its batch, and from how many operations on it is the best that was found."""

    operations: float
    layers: int
    width: int
    rows: int
    pieces: int


# At 2.1e14 operations the second is 0.12 nat ahead of the first on one text, and 0.03 and 0.07
# behind on two; at 5e13 0.3 and more behind. At 6.5e14 it is 0.07 ahead of the first and 0.05 of
# the third. Where that and the others begin is not measured (see docs/learning.md).
SIZES = (
    Size(0.0, 2, 128, 32, 8_000),
    Size(2e14, 4, 128, 32, 8_000),
    Size(8e14, 4, 192, 32, 8_000),
    Size(5e15, 4, 256, 48, 16_000),
    Size(3e16, 6, 384, 64, 16_000),
    Size(2e17, 8, 512, 64, 30_000),
    Size(1e19, 12, 768, 128, 30_000),
)
# Heads are so wide; bytes of text that a piece of a vocabulary wants at least, and in a sentence;
# documents that are wanted.
_HEAD, _BYTES_A_PIECE, _BYTES_A_SENTENCE, _FILES = 64, 100, 100, 50
# Rows of so many tokens are learned from and scored, and such a share of them is predicted; of
# held-out rows half of it.
_LENGTH, _MASKED = 128, 0.3
# Held-out rows, how often they are scored, and a forward pass as a share of a step.
_EVAL_ROWS, _EVALUATIONS, _FORWARD = 1_000, 8, 1 / 3
# Steps whose time is taken, after as many that warm caches.
_TIMED = 5
# A checkpoint is saved so often, in seconds.
_SAVED_EVERY = 60.0


class Text(NamedTuple):
    """A text, as it was looked at."""

    source: str  # as corpus.sources has it
    bytes: int  # of its files, compressed as they are
    files: int
    language: str  # a code of `corpus.language`


def choose_experiment(
    path: str,
    hours: float,
    base: str | None,
    settings: Sequence[str],
    workdir: Workdir,
    progress: Progress,
) -> tuple[Experiment, dict[str, Any]]:
    """Returns the experiment for a text and so many hours, and where it comes from.

    The corpus is made, in the workdir; steps are timed there. Four lines say what is chosen, why,
    and what to expect.

    Args:
      path: file or folder of text, or a source as `corpus.sources` has it.
      hours: of this machine, from now to the run's end.
      base: a folder that `import` made, whose encoder goes on; None: a fresh one.
      settings: `--set` strings, which hold whatever is chosen.
      workdir: of the run, which is named by its last part.
      progress: is given the lines.
    """
    begun = time.monotonic()
    if rendezvous.read_process_info():  # jax knows of one process before they are connected
        raise InputError("auto: times the steps of one process; run `bert-jax pretrain`")
    if any(setting.partition("=")[0].strip() == "phases.0.steps" for setting in settings):
        raise InputError("--set phases.0.steps: --hours decides how many; remove it")
    text = look(path, settings)
    speed = hardware.peak_flops(_compute_type())
    if speed is None:
        kind = jax.devices()[0].device_kind
        raise InputError(f"auto: the speed of a {kind} is not known; run `bert-jax pretrain`")
    operations = speed * hours * 3600
    name = config.name_of(os.fspath(workdir.named)) or "text"
    experiment = (
        _base_experiment(name, text, base) if base else _fresh_experiment(name, text, operations)
    )
    experiment = config.override(experiment, settings)
    workdir = workdir.with_corpus(experiment.run.corpus_dir)
    folder, size = workdir.corpus, experiment.model.vocab_size
    manifest = corpus.prepare(experiment.corpus, size, folder, progress.report, system.cores())
    corpus.require_rows(workdir.corpus, experiment)
    seconds = _seconds_a_step(experiment, workdir, progress)
    left = hours * 3600 - (time.monotonic() - begun)
    experiment = _with_steps(experiment, seconds, left, f"--hours {hours:g}")
    experiment = config.override(experiment, settings)
    for line in _lines(experiment, text, manifest, operations, seconds, left):
        progress.report(line)
    return experiment, config.origin_of("the command line", settings, experiment)


def look(path: str, settings: Sequence[str] = ()) -> Text:
    """Looks at a text: how much it is, and in which language, by a sample of it."""
    with prefix_errors(f"TEXT {path}"):
        read = Corpus(sources=(config.source_of_text(path),), encoding_errors="replace")
    how = [one.strip() for one in settings if one.partition("=")[0].strip() in _READ_BY]
    read = config.override(read, [one.removeprefix("corpus.") for one in how])
    extents = list(documents.extents(read))
    sample = ""
    for extent in extents[:: max(1, len(extents) // _PARTS)]:
        most = len(sample) + _SAMPLE // _PARTS
        of_documents = (document.pieces for document in documents.read_extent(extent, read))
        for piece in itertools.chain.from_iterable(of_documents):
            sample += piece[: most - len(sample)]
            if len(sample) >= most:
                break
    size = sum(extent.bytes for extent in extents)
    return Text(read.sources[0], size, len(extents), language_of(sample))


def language_of(sample: str) -> str:
    """Returns the code of a text's language, by its letters or its commonest words; else en."""
    sample = unicodedata.normalize("NFC", sample)  # a mark by itself would end a word
    letters = collections.Counter(filter(str.isalpha, sample))
    scripts: collections.Counter[str] = collections.Counter()
    for letter, count in letters.items():
        scripts[unicodedata.name(letter, "LATIN").split()[0]] += count
    # Japanese is written with characters of Chinese, too, and these alone are Chinese.
    kana = scripts["HIRAGANA"] + scripts["KATAKANA"]
    if kana > 0.05 * scripts.total():
        return "ja"
    commonest = max(scripts, key=scripts.__getitem__, default="LATIN")
    if commonest != "LATIN":
        return _SCRIPTS.get(commonest, "en")
    words = collections.Counter(re.findall(r"[^\W\d_]+", sample.lower()))
    shares = {code: sum(words[word] for word in of.split()) for code, of in _WORDS.items()}
    return max(shares, key=shares.__getitem__)


def _compute_type() -> Literal["float32", "bfloat16"]:
    return "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"


def _fresh_experiment(name: str, text: Text, operations: float) -> Experiment:
    """Returns the experiment of a fresh encoder, by the recipe of tiny.py.

    Its rate, of all but matrices, falls with the width; its steps are still to be set.
    """
    size = next(size for size in reversed(SIZES) if operations >= size.operations)
    pieces = min(size.pieces, max(1_000, text.bytes // _BYTES_A_PIECE // 1_000 * 1_000))
    latin = text.language in _WORDS
    recipe = config.load(os.fspath(SHIPPED / "tiny.py"))
    model = dataclasses.replace(
        recipe.model,
        vocab_size=pieces,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // _HEAD,
        intermediate_size=round(size.width * 8 / 3 / 8) * 8,
        max_position_embeddings=512,
        compute_dtype=_compute_type(),
    )
    read = _corpus(text, case="uncased" if text.language == "en" or not latin else "cased")
    if text.language in ("ja", "th"):  # no blanks between words
        read = dataclasses.replace(read, tokenizer_kind="unigram", case="cased")
    rate = recipe.optimizer.peak_learning_rate * recipe.model.hidden_size / size.width
    optimizer = dataclasses.replace(recipe.optimizer, peak_learning_rate=rate, warmup_steps=1)
    return _experiment(name, "", model, read, size.rows, optimizer)


def _base_experiment(name: str, text: Text, base: str) -> Experiment:
    """Returns the experiment of a base that goes on; its steps are still to be set."""
    given = base_lib.read(epath.Path(base))
    model = dataclasses.replace(given.model, compute_dtype=_compute_type())
    read = _corpus(
        text, tokenizer=os.fspath(epath.Path(base) / "tokenizer"), case=given.tokenizer.case
    )
    optimizer = Optimizer(
        name="adamw",
        peak_learning_rate=2e-4 * 768 / model.hidden_size,
        warmup_steps=1,
        schedule="wsd",
        decay_steps=1,
    )
    return _experiment(name, base, model, read, 32, optimizer)


def _corpus(text: Text, **fields: Any) -> Corpus:
    """Returns the corpus of a text; few files are cut, so that some documents can be held out."""
    cut = min(max(text.bytes // _BYTES_A_SENTENCE // _FILES, 5), 200)
    return Corpus(
        sources=(text.source,),
        language=text.language,
        cut_documents=cut if text.files < _FILES and text.source.startswith("text:") else 0,
        validation_share=0.1 if text.bytes < 100e6 else 0.01,
        **fields,
    )


def _experiment(
    name: str, base: str, model: Model, read: Corpus, rows: int, optimizer: Optimizer
) -> Experiment:
    on_cpu = jax.devices()[0].platform == "cpu"
    length = min(_LENGTH, model.max_position_embeddings)
    return Experiment(
        name=name,
        init_from=base,
        model=model,
        corpus=read,
        data=Data(
            objective="mlm",
            masked_lm_prob=_MASKED,
            eval_rows=_EVAL_ROWS,
            eval_sequence_length=length,
            eval_max_predictions_per_seq=round(_MASKED / 2 * length),
        ),
        phases=(
            Phase(
                steps=100_000,  # until it is known how many fit
                sequence_length=length,
                max_predictions_per_seq=math.ceil(_MASKED * length),
                batch_size=-(-rows // jax.device_count()) * jax.device_count(),
            ),
        ),
        optimizer=optimizer,
        parallelism=Parallelism(layer_loop="unroll" if on_cpu else "scan"),
    )


def _seconds_a_step(experiment: Experiment, workdir: Workdir, progress: Progress) -> float:
    """Returns the seconds that a step takes, evaluations, saves and compiling left out."""
    run = dataclasses.replace(experiment.run, corpus_dir=os.fspath(workdir.corpus))
    progress.report(f"--hours: timing {_TIMED} steps of {_shape(experiment.model)}")
    short = dataclasses.replace(experiment, run=run)
    quiet = Progress(LineConsole(quiet=True))
    (lap,) = budget.laps(short, workdir.root / "timing", quiet, _TIMED)
    return 1 / lap["steps_per_second"]


def _with_steps(experiment: Experiment, seconds: float, left: float, flag: str) -> Experiment:
    """Returns the experiment with as many steps as fit, evaluations among them."""
    phase, run = experiment.phases[0], experiment.run
    scored = experiment.data.eval_rows / phase.batch_size * _FORWARD
    steps = int(left / seconds - scored * (_EVALUATIONS + 1))
    if steps < 20:
        raise InputError(
            f"{flag}: {pluralize(max(steps, 0), 'step')} of {seconds:.3g} s fit after what was "
            "spent on the corpus; give it more"
        )
    optimizer = dataclasses.replace(
        experiment.optimizer,
        warmup_steps=steps // 10,
        decay_steps=steps // 10 if experiment.optimizer.schedule == "wsd" else 0,
    )
    run = dataclasses.replace(
        run,
        log_every=max(1, min(50, steps // 20)),
        eval_every=math.ceil(steps / _EVALUATIONS),
        checkpoint_every=max(1, min(steps, round(_SAVED_EVERY / seconds))),
    )
    phases = (dataclasses.replace(phase, steps=steps),)
    return dataclasses.replace(experiment, phases=phases, optimizer=optimizer, run=run)


def expected(experiment: Experiment, seen: int) -> str:
    """Returns in words how far below the unigram line a run of so many tokens ends.

    On novels the first of SIZES is 2.17 nat below after 2.7 million, 2.59 after 6.3, 3.07 after
    25, 3.29 after 59; the second 2.96 after 9.9 and 3.36 after 35; the third 2.27 after 2.2, 3.32
    after 22 and 3.40 after 28.
    """
    if experiment.init_from:
        return "what the base makes of it"
    decade = 0.8 if seen > 6.3e6 else 1.14
    below = 2.59 + decade * math.log10(max(seen, 1e6) / 6.3e6)
    below += 0.25 * (experiment.model.num_hidden_layers > SIZES[0].layers)
    words = f"{'under' if seen < 1e6 else 'about'} {below:.1f} nat" if seen < 4e7 else "over 3 nat"
    return f"{words} below the unigram line, if it is as novels are"


def _shape(model: Model) -> str:
    layers = pluralize(model.num_hidden_layers, "layer")
    return f"{layers} of {model.hidden_size}, {model.vocab_size:,} pieces"


def _lines(
    experiment: Experiment,
    text: Text,
    manifest: dict[str, Any],
    operations: float,
    seconds: float,
    left: float,
) -> list[str]:
    """Returns what a person is to know of the choice."""
    phase, tokens = experiment.phases[0], manifest["splits"]["train"]["tokens"]
    seen = phase.steps * phase.batch_size * phase.sequence_length
    loss = expected(experiment, seen)
    why = "the base's" if experiment.init_from else f"as {operations:.1e} operations are left to it"
    ends = time.strftime("%H:%M", time.localtime(time.time() + left))
    return [
        f"text: {text.bytes / 1e6:,.1f} MB in {pluralize(text.files, 'file')}, language "
        f"{text.language}; {tokens:,} tokens to train on",
        f"model: {_shape(experiment.model)}, {why}",
        f"steps: {phase.steps:,} of {phase.batch_size} x {phase.sequence_length} tokens, "
        f"{seconds:.3g} s each: the text {seen / tokens:.1f} times",
        f"expect: held-out masked LM {loss}, at {ends}, in {duration(left)}; run again, it goes on "
        "where it stopped",
    ]
