"""Chooses an experiment for a text, this machine and a number of hours.

The choice depends on a sample of the text and on the speed of this machine. A first size of the
encoder is guessed from the peak FLOP/s of the devices: that of a CPU is measured, that of others is
in a table. A few of its steps are timed. The FLOP/s that they reach determine the final size, by a
rule that comes from the runs in docs/results/learning.md.
"""

import collections
import dataclasses
import itertools
import math
import os
import time
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
from etils import epath

from bert_jax import config, hardware, system
from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Phase
from bert_jax.config.files import SHIPPED
from bert_jax.data import corpus
from bert_jax.distributed import rendezvous
from bert_jax.errors import InputError, duration, pluralize, prefix_errors
from bert_jax.model import flops
from bert_jax.running.progress import LineConsole, Progress
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir
from bert_jax.text import documents
from bert_jax.text.sources import source_from_path
from bert_jax.tools.compare import budget

# The language that is assumed for a script. The key is the first word of the Unicode names of the
# script's letters.
_LANGUAGES = {"LATIN": "en", "CYRILLIC": "ru", "GREEK": "el", "ARABIC": "ar", "HEBREW": "he"}
_LANGUAGES |= {"DEVANAGARI": "hi", "BENGALI": "bn", "TAMIL": "ta", "THAI": "th", "HANGUL": "ko"}
_LANGUAGES |= {"CJK": "zh", "HIRAGANA": "ja", "ARMENIAN": "hy", "GEORGIAN": "ka"}
# Fields of `Corpus` that determine how the sample is read, and the language of the text.
_SAMPLE_FIELDS = ("text_field", "encoding", "language")
# Maximum size of the sample in characters, and maximum number of files that give equal parts of it.
_SAMPLE_CHARACTERS, _SAMPLED_FILES = 200_000, 20
# The share of the peak FLOP/s that steps are assumed to reach, for the first guess. It was measured
# on CPUs.
_UTILISATION = 0.38
# A shorter run is refused.
_FEWEST_STEPS = 20


class Size(NamedTuple):
    """The size of an encoder and its batch."""

    min_operations: float  # for runs of at least this many FLOPs, this size or a later one is best
    layers: int
    width: int
    rows: int
    vocab_size: int


# The limits up to 2e14 are interpolated between measured runs on one to five texts. Near them, the
# best size depends on the text, and 3 layers are a compromise. The other limits are extrapolated
# (docs/results/learning.md).
SIZES = (
    Size(0.0, 2, 128, 32, 8_000),
    Size(7e13, 3, 128, 32, 8_000),
    Size(1e14, 4, 128, 32, 8_000),
    Size(2e14, 4, 128, 64, 8_000),
    Size(7e14, 4, 192, 64, 8_000),
    Size(2e15, 4, 256, 64, 16_000),
    Size(1e16, 6, 384, 64, 16_000),
    Size(7e16, 8, 512, 64, 30_000),
    Size(4e18, 12, 768, 128, 30_000),
)
_HEAD_WIDTH = 64  # width of an attention head
_BYTES_PER_ENTRY = 100  # fewest bytes of text for each entry of the vocabulary
# A text of fewer files than this is cut into about this many documents, or more if it is long.
_MIN_DOCUMENTS = 50
_BYTES_PER_SENTENCE = 100  # assumed, to choose the number of sentences of these documents
# Tokens of a row, and the shares that are predicted in training and in held-out rows.
_LENGTH, _MASKED, _EVAL_MASKED = 128, 0.3, 0.15
# Held-out rows, number of evaluations, and the time of a forward pass as a share of a step.
_EVAL_ROWS, _EVALUATIONS, _FORWARD_COST = 1_000, 8, 1 / 3
# Steps that are timed, after as many untimed ones that warm the caches.
_TIMED = 5
# If --hours is at least this, a CPU's steps are also timed in bfloat16. Compiling and timing them
# takes up to half a minute. bfloat16 is chosen if its step takes less than this share of the time
# of a float32 step: after as many steps, both types reach about the same loss
# (docs/results/performance.md).
_BFLOAT16_HOURS, _BFLOAT16_SHARE = 0.15, 0.95
_SAVED_EVERY = 60.0  # seconds between checkpoints


class Text(NamedTuple):
    """Facts about a text."""

    source: str  # as in corpus.sources
    bytes: int  # size of its files on disk, compressed or not
    files: int
    language: str  # a code of `corpus.language`
    case: Literal["cased", "uncased"]  # as in `corpus.case`


class Request(NamedTuple):
    """The arguments of a choice."""

    text: str  # file or folder of text, or a source as in `corpus.sources`
    hours: float  # time on this machine, from now to the end of the run
    # A folder written by `bert-jax import`, whose encoder is trained further; None: a fresh one.
    base: str | None
    settings: Sequence[str]  # `--set` strings, which override the choice


class Choice(NamedTuple):
    """The experiment for a request, and lines that explain it."""

    experiment: Experiment
    reasons: list[str]


def choose_experiment(request: Request, workdir: Workdir, progress: Progress) -> Choice:
    """Makes the corpus and times steps in a workdir; returns the experiment that fits the hours.

    The run is named after the last component of the workdir's path.
    """
    deadline = time.monotonic() + 3600 * request.hours
    _, hours, base, settings = request
    given = _parse_settings(settings)
    # `jax.process_count()` is 1 as long as jax.distributed is not initialized.
    if rendezvous.read_process_info():
        raise InputError("auto: chooses for a single process only; use `bert-jax pretrain`")
    if "phases.0.steps" in given:
        raise InputError("--set phases.0.steps: --hours sets the steps; remove this --set")
    text = examine_text(request.text, settings)
    name = config.name_of(os.fspath(workdir.address)) or "text"
    if base:
        experiment = _continued_experiment(name, text, base)
    else:
        peak = hardware.peak_flops(_default_dtype())  # of all devices, per second
        if peak is None:
            kind = jax.devices()[0].device_kind
            raise InputError(f"auto: the speed of a {kind} is not known; use `bert-jax pretrain`")
        experiment = _fresh_experiment(name, text, _UTILISATION * peak * 3600 * hours)
    experiment = config.override(experiment, settings)
    # As training opens it: `run.corpus_dir` holds, and a workdir in a bucket gets a local copy.
    workdir = mirror.open_workdir(workdir.address, experiment.run.corpus_dir, to_write=True)
    cores, vocab_size = system.cores(), experiment.model.vocab_size
    manifest = corpus.prepare(experiment.corpus, vocab_size, workdir.corpus, progress.report, cores)
    corpus.require_enough_text(workdir.corpus, experiment)
    try_bfloat16 = hours >= _BFLOAT16_HOURS and "model.compute_dtype" not in given
    experiment, seconds, dtype_reasons = _choose_dtype(experiment, try_bfloat16, workdir, progress)
    size_reason = "that of the base"
    if not base:
        steps = _count_steps(experiment, seconds, deadline - time.monotonic())
        step_operations = flops.phase_step_flops(experiment.model, experiment.phases[0])
        operations = step_operations * max(steps, 0)
        size_reason = f"for a budget of {operations:.1e} operations"
        # The corpus is made with this vocabulary.
        kept = {"vocab_size": vocab_size, "compute_dtype": experiment.model.compute_dtype}
        final = _with_model(_fresh_experiment(name, text, operations), **kept)
        final = config.override(final, settings)
        if final != experiment:  # another size than the first guess
            experiment, seconds = final, _step_seconds(final, workdir, progress)
    left = deadline - time.monotonic()
    experiment = _with_steps(experiment, seconds, left, f"--hours {hours:g}")
    experiment = config.override(experiment, settings)  # they also override `_with_steps`
    tokens = manifest["splits"]["train"]["tokens"]
    assumed = " (assumed from the script; set it with --language)"
    language = text.language + ("" if "corpus.language" in given else assumed)
    reasons = [
        f"text: {text.bytes / 1e6:,.1f} MB in {pluralize(text.files, 'file')}, language "
        f"{language}, {experiment.corpus.case}; {tokens:,} tokens to train on",
        f"model: {_describe_model(experiment.model)}, {size_reason}",
        *dtype_reasons,
        *_describe_steps(experiment, tokens, seconds, left),
    ]
    return Choice(experiment, reasons)


def examine_text(path: str, settings: Sequence[str] = ()) -> Text:
    """Returns facts about a text, from a sample; a `corpus.language` in the settings is kept."""
    with prefix_errors(f"TEXT {path}"):
        text_corpus = Corpus(sources=(source_from_path(path),), encoding_errors="replace")
    given = _parse_settings(settings)
    fields = {name: given.get(f"corpus.{name}") for name in _SAMPLE_FIELDS}
    sample_settings = [f"{name}={value}" for name, value in fields.items() if value is not None]
    text_corpus = config.override(text_corpus, sample_settings)
    files = list(documents.extents(text_corpus))  # one for each file
    sampled_files = files[:: math.ceil(len(files) / _SAMPLED_FILES)]
    sample = ""
    for file in sampled_files:
        end = len(sample) + _SAMPLE_CHARACTERS // len(sampled_files)
        chunks = (document.chunks for document in documents.read_extent(file, text_corpus))
        for chunk in itertools.chain.from_iterable(chunks):
            sample += chunk[: end - len(sample)]
            if len(sample) >= end:
                break
    size, script = sum(file.bytes for file in files), find_script(sample)
    language = text_corpus.language if fields["language"] else _LANGUAGES.get(script, "en")
    # Lower-casing also strips accents, which turns й into и and drops the vowel signs of Hindi.
    case = "uncased" if (language, script) == ("en", "LATIN") else "cased"
    return Text(text_corpus.sources[0], size, len(files), language, case)


def _parse_settings(settings: Sequence[str]) -> dict[str, str]:
    parts = (setting.partition("=") for setting in settings)
    return {name.strip(): value for name, _, value in parts}


def find_script(sample: str) -> str:
    """Returns the commonest first word of the Unicode names of letters: the script of a text."""
    letters = collections.Counter(filter(str.isalpha, sample))
    scripts: collections.Counter[str] = collections.Counter()
    for letter, count in letters.items():
        scripts[unicodedata.name(letter, "LATIN").split()[0]] += count
    # Japanese also uses Chinese characters; a text without kana is Chinese.
    kana = scripts["HIRAGANA"] + scripts["KATAKANA"]
    if kana > 0.05 * scripts.total():
        return "HIRAGANA"
    return max(scripts, key=scripts.__getitem__, default="LATIN")


def _default_dtype() -> Literal["float32", "bfloat16"]:
    return "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"


def _fresh_experiment(name: str, text: Text, operations: float) -> Experiment:
    """Returns the experiment of a fresh encoder, by the recipe of tiny.py; steps are placeholders.

    `peak_learning_rate` falls with the width. Matrices have another one, since Muon trains them.
    """
    size = next(size for size in reversed(SIZES) if operations >= size.min_operations)
    vocab_size = min(size.vocab_size, max(1_000, text.bytes // _BYTES_PER_ENTRY // 1_000 * 1_000))
    recipe = config.load(os.fspath(SHIPPED / "tiny.py"))
    model = dataclasses.replace(
        recipe.model,
        vocab_size=vocab_size,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // _HEAD_WIDTH,
        intermediate_size=round(size.width * 8 / 3 / 8) * 8,
        max_position_embeddings=512,
        compute_dtype=_default_dtype(),
    )
    text_corpus = _corpus(text, case=text.case)
    if text.language in ("ja", "th"):  # no spaces between words
        text_corpus = dataclasses.replace(text_corpus, tokenizer_kind="unigram")
    rate = recipe.optimizer.peak_learning_rate * recipe.model.hidden_size / size.width
    optimizer = dataclasses.replace(recipe.optimizer, peak_learning_rate=rate, warmup_steps=1)
    return _experiment(name, "", model, text_corpus, size.rows, optimizer)


def _continued_experiment(name: str, text: Text, base: str) -> Experiment:
    """Returns the experiment that trains the encoder of a base further; steps are placeholders."""
    start = base_lib.read(epath.Path(base))
    model = dataclasses.replace(start.model, compute_dtype=_default_dtype())
    text_corpus = _corpus(
        text, tokenizer=os.fspath(epath.Path(base) / "tokenizer"), case=start.tokenizer.case
    )
    optimizer = Optimizer(
        name="adamw",
        peak_learning_rate=2e-4 * 768 / model.hidden_size,
        warmup_steps=1,
        schedule="wsd",
        decay_steps=1,
    )
    return _experiment(name, base, model, text_corpus, 32, optimizer)


def _corpus(text: Text, **fields: Any) -> Corpus:
    """Returns the corpus of a text. Few files are cut into documents, so that some are held out."""
    sentences_per_document = min(max(text.bytes // _BYTES_PER_SENTENCE // _MIN_DOCUMENTS, 5), 200)
    is_cut = text.files < _MIN_DOCUMENTS and text.source.startswith("text:")
    return Corpus(
        sources=(text.source,),
        language=text.language,
        cut_documents=sentences_per_document if is_cut else 0,
        validation_share=0.1 if text.bytes < 100e6 else 0.01,
        **fields,
    )


def _experiment(
    name: str, base: str, model: Model, text_corpus: Corpus, rows: int, optimizer: Optimizer
) -> Experiment:
    length = min(_LENGTH, model.max_position_embeddings)
    return Experiment(
        name=name,
        init_from=base,
        model=model,
        corpus=text_corpus,
        data=Data(
            objective="mlm",
            masked_lm_prob=_MASKED,
            eval_rows=_EVAL_ROWS,
            eval_sequence_length=length,
            eval_max_predictions_per_seq=round(_EVAL_MASKED * length),
        ),
        phases=(
            Phase(
                steps=100_000,  # replaced when the time of a step is known
                sequence_length=length,
                max_predictions_per_seq=math.ceil(_MASKED * length),
                batch_size=-(-rows // jax.device_count()) * jax.device_count(),
            ),
        ),
        optimizer=optimizer,
    )


def _choose_dtype(
    experiment: Experiment, try_bfloat16: bool, workdir: Workdir, progress: Progress
) -> tuple[Experiment, float, list[str]]:
    """Times steps; returns the experiment, the seconds of a step, and lines that explain the dtype.

    With `try_bfloat16`, steps on a CPU are timed in float32 and bfloat16, and the experiment gets
    the faster dtype. Accelerators always compute in bfloat16.
    """
    seconds = _step_seconds(experiment, workdir, progress)
    if not try_bfloat16 or jax.devices()[0].platform != "cpu":
        return experiment, seconds, []
    in_bfloat16 = _with_model(experiment, compute_dtype="bfloat16")
    bfloat16_seconds = _step_seconds(in_bfloat16, workdir, progress)
    line = f"a step takes {seconds:.3g} s in float32, {bfloat16_seconds:.3g} s in bfloat16"
    if bfloat16_seconds < _BFLOAT16_SHARE * seconds:
        return in_bfloat16, bfloat16_seconds, [f"compute type: bfloat16; {line}"]
    return experiment, seconds, [f"compute type: float32; {line}"]


def _with_model(experiment: Experiment, **fields: Any) -> Experiment:
    model = dataclasses.replace(experiment.model, **fields)
    return dataclasses.replace(experiment, model=model)


def _step_seconds(experiment: Experiment, workdir: Workdir, progress: Progress) -> float:
    """Returns the seconds that a step takes, without evaluations, saves and compiling."""
    run = dataclasses.replace(experiment.run, corpus_dir=os.fspath(workdir.corpus))
    progress.report(
        f"auto: timing {_TIMED} steps of {_describe_model(experiment.model)}"
        f", in {experiment.model.compute_dtype}"
    )
    timed = dataclasses.replace(experiment, run=run)
    quiet = Progress(LineConsole(quiet=True))
    (timing,) = budget.time_phases(timed, workdir.root / "timing", quiet, _TIMED)
    return 1 / timing["steps_per_second"]


def _count_steps(experiment: Experiment, seconds: float, left: float) -> int:
    """Counts the steps of `seconds` each that fit, with the evaluations, into `left` seconds.

    The number is negative if the evaluations do not fit.
    """
    evaluation_cost = experiment.data.eval_rows / experiment.phases[0].batch_size * _FORWARD_COST
    return int(left / seconds - evaluation_cost * (_EVALUATIONS + 1))  # one more, as a margin


def _with_steps(
    experiment: Experiment, seconds: float, left: float, error_prefix: str
) -> Experiment:
    """Sets as many steps, of `seconds` each, as fit with the evaluations into `left` seconds."""
    phase, run = experiment.phases[0], experiment.run
    steps = _count_steps(experiment, seconds, left)
    if steps < _FEWEST_STEPS:
        missing = 1.1 * (_FEWEST_STEPS - steps) * seconds / 3600  # 10% more, since it is rounded
        raise InputError(
            f"{error_prefix}: only {pluralize(max(steps, 0), 'step')} of {seconds:.3g} s fit into "
            f"the time left, without the evaluations; give at least {missing:.2g} hours more"
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


def describe_expected_loss(experiment: Experiment, seen: int) -> str:
    """Describes the loss after `seen` tokens, relative to the unigram baseline.

    Runs on novels ended so many nats below the baseline:

      2 layers of 128: 2.17 after 2.7M tokens, 2.59 after 6.3M, 3.07 after 25M, 3.29 after 59M
      4 layers of 128: 2.96 after 9.9M, 3.36 after 35M, and 3.40 after 37M with 64 rows a step
      4 layers of 192: 2.27 after 2.2M, 3.32 after 22M, 3.40 after 28M
    """
    if experiment.init_from:
        return "a loss that is not predicted, since the run starts from a base"
    # Two lines over the logarithm of `seen` that meet at 6.3 million.
    nats_per_decade = 0.8 if seen > 6.3e6 else 1.14
    below = 2.59 + nats_per_decade * math.log10(max(seen, 1e6) / 6.3e6)
    # 4 layers were 0.25 better.
    below += 0.125 * min(max(experiment.model.num_hidden_layers - 2, 0), 2)
    nats = f"{'under' if seen < 1e6 else 'about'} {below:.1f} nat" if seen < 4e7 else "over 3 nat"
    return f"held-out masked LM {nats} below the unigram baseline (measured on novels)"


def _describe_model(model: Model) -> str:
    layers = pluralize(model.num_hidden_layers, "layer")
    return f"{layers} of {model.hidden_size}, vocabulary of {model.vocab_size:,} tokens"


def _describe_steps(
    experiment: Experiment, tokens: int, seconds: float, left: float
) -> Iterator[str]:
    """Yields lines about the steps of a run on a corpus of `tokens`, and about its end."""
    phase = experiment.phases[0]
    seen = phase.steps * phase.batch_size * phase.sequence_length
    yield (
        f"steps: {phase.steps:,} of {phase.batch_size} x {phase.sequence_length} tokens, "
        f"{seconds:.3g} s each: {seen / tokens:.1f} epochs"
    )
    end = time.strftime("%H:%M", time.localtime(time.time() + left))
    yield (
        f"expect: {describe_expected_loss(experiment, seen)}, at {end}, in "
        f"{duration(left)}; if it is stopped, run the same command again to resume"
    )
