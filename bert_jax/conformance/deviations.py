"""Where an experiment's settings leave Devlin et al. 2018 and google-research/bert, and how."""

from collections.abc import Iterator
from typing import NamedTuple

from bert_jax import config
from bert_jax.config import Experiment


class Deviation(NamedTuple):
    """A setting, and what it makes otherwise than the paper and its code."""

    setting: str
    why: str


# (hidden size, layers, heads, feed-forward) of the paper's models, and the TPU cores they were
# trained on: two a chip, of 16 and 64 chips.
_CORES = {(768, 12, 12, 3_072): 32, (1_024, 24, 16, 4_096): 128}

_STEPS, _BATCH = 1_000_000, 256
# Sequence length: share of the steps, and predictions at most (15 % of it, rounded up to 20).
_LENGTHS = {128: (0.9, 20), 512: (0.1, 77)}

# Field: the paper's value, and what another one means.
_FIELDS: dict[str, tuple[object, str]] = {
    "init_from": ("", "it goes on from weights trained before; the paper's are drawn at random"),
    "model.kind": (
        "bert",
        "another encoder, ModernBERT's (rotary positions, layer norms before each part, gated "
        "feed-forward parts, windows, no biases and no segments) or ELMo's (LSTMs)",
    ),
    "model.code": ("", "an encoder of the experiment's own"),
    "model.vocab_size": (30_522, "the released uncased vocabulary has 30,522 pieces"),
    "model.direction": ("both", "the paper's encoder attends to both sides"),
    "model.max_position_embeddings": (512, "the paper's table has 512 positions"),
    "model.type_vocab_size": (2, "the released models have two segments"),
    "model.hidden_act": (
        "gelu",
        "GELU by tanh, as the reference's code since 2019-02-07; the released models had erf",
    ),
    "model.hidden_dropout_prob": (0.1, "the paper drops 0.1 of every sublayer's output"),
    "model.attention_probs_dropout_prob": (0.1, "the paper drops 0.1 of attention"),
    "model.initializer_range": (0.02, "the reference starts from a normal of 0.02, cut at two"),
    "model.initialization": (
        "reference",
        "layers start from a normal of 1/sqrt(width), and what they add from zero",
    ),
    "model.compute_dtype": ("float32", "products are rounded to bfloat16; the reference's are not"),
    "corpus.mixture": ((), "sources have shares of the rows; the reference takes what there is"),
    "corpus.document_starts": (
        "",
        "documents are parts of files; the reference is given them apart",
    ),
    "corpus.cut_documents": (
        0,
        "texts are cut into documents; the reference takes them as they are",
    ),
    "corpus.encoding_errors": ("stop", "wrong bytes are replaced; the reference drops them"),
    "corpus.unknown_word": ("", "a word of the text is [UNK]; the reference spells it"),
    "corpus.repeated_documents": ("keep", "the reference keeps documents that repeat"),
    "data.code": ("", "something else is learned: an objective of the experiment's own"),
    "data.attention": ("whole_row", "documents of a row do not see each other; a pair is a row"),
    "data.short_seq_prob": (0.1, "the reference cuts 0.1 of all documents short"),
    "data.masked_lm_prob": (0.15, "the paper predicts 15 % of all pieces"),
    "data.final_masked_lm_prob": (0.0, "the share that is predicted changes; the paper's stays"),
    "data.mask_share": (0.8, "the paper masks 80 % of what it predicts"),
    "data.random_share": (0.1, "the paper replaces 10 % of what it predicts by any piece"),
    "data.packing": (
        "none",
        "examples share rows, each as it is by itself, and a step holds as many as fit into "
        "batch_size rows; the reference pads each to a row of its own",
    ),
    "optimizer.peak_learning_rate": (1e-4, "the paper's peak is 1e-4"),
    "optimizer.warmup_steps": (10_000, "the paper warms up over 10,000 steps"),
    "optimizer.b1": (0.9, "the paper's is 0.9"),
    "optimizer.b2": (0.999, "the paper's is 0.999"),
    "optimizer.eps": (1e-6, "the reference adds 1e-6"),
    "optimizer.weight_decay": (0.01, "the paper's is 0.01"),
    "optimizer.clip_norm": (1.0, "the reference clips at 1.0"),
    "optimizer.gradient_reduction": (
        "float32",
        "gradients are rounded to bfloat16 before cores add them; the reference adds float32",
    ),
    "optimizer.layer_decay": (1.0, "lower layers learn slower; the reference's learn alike"),
}

_OBJECTIVES = {
    "mlm": "rows of full sentences, and no next sentences to tell apart",
    "mlm_sop": "B follows A always, and is swapped with it in half of the pairs (ALBERT); the "
    "paper's is random in half of them",
    "causal": "rows of full sentences, of which the next piece is predicted, from left to right",
    "bidirectional_lm": "rows of full sentences, of which each piece is predicted from what is "
    "left of it and from what is right of it",
}

_OPTIMIZERS = {
    "adamw": "moments are corrected for their bias; the reference's are not, so that its first "
    "update is 3.16 times as large",
    "stable_adamw": "moments are corrected for their bias, and a tensor whose gradients outgrow "
    "them learns slower (Wortsman et al. 2023); the reference does neither",
    "lamb": "moments are corrected for their bias and each tensor's update is scaled to the "
    "tensor (You et al. 2019); the reference does neither",
}

_MASKINGS = {
    "whole_word": "whole words are masked, as in the models released in May 2019",
    "span": "spans of words are masked and replaced at once (SpanBERT); the paper masks pieces",
}

_FROM_THE_PEAK = (
    "decay counts from the end of warm-up; the reference counts it from step 0, and its rate falls "
    "by the share of warm-up where that ends"
)

_SCHEDULES = {
    "linear": _FROM_THE_PEAK,
    "cosine": _FROM_THE_PEAK,
    "wsd": "the rate stays at its peak and falls in the last decay_steps alone; the reference's "
    "falls from the first step on",
}

_CLIPS = {
    "global": "global clip after the mean: the reference clips on each core before the sum",
    "none": "no clip: the reference clips on each core before the sum",
}


def find(experiment: Experiment) -> list[Deviation]:
    """Returns all deviations that the settings make, and those of every run."""
    deviations: list[Deviation] = []
    for look in (_shape, _fields, _noise, _text, _masks, _passes, _optimizer, _phases):
        deviations += look(experiment)
    return [*deviations, *_EVERY_RUN]


def _setting(experiment: Experiment, path: str) -> str:
    return f"{path}={dict(config.flatten(experiment))[path]!r}"


def _shape(experiment: Experiment) -> Iterator[Deviation]:
    shape = _shape_of(experiment)
    if shape not in _CORES:
        yield Deviation(
            f"model: {shape[1]} layers, {shape[0]} wide, {shape[2]} heads, {shape[3]} within",
            "neither BASE (12, 768, 12, 3072) nor LARGE (24, 1024, 16, 4096)",
        )


def _shape_of(experiment: Experiment) -> tuple[int, int, int, int]:
    model = experiment.model
    return (
        model.hidden_size,
        model.num_hidden_layers,
        model.num_attention_heads,
        model.intermediate_size,
    )


def _fields(experiment: Experiment) -> Iterator[Deviation]:
    values = dict(config.flatten(experiment))
    for path, (paper, why) in _FIELDS.items():
        if values[path] != paper:
            yield Deviation(_setting(experiment, path), why)


def _noise(experiment: Experiment) -> Iterator[Deviation]:
    model = experiment.model
    steps = 256 if model.dropout_rng == "threefry8" else 65_536
    rates = {model.hidden_dropout_prob, model.attention_probs_dropout_prob}
    drawn = [(rate, round(rate * steps)) for rate in sorted(rates) if rate]
    shares = ", ".join(f"{n}/{steps} = {n / steps:.6f} for {r}" for r, n in drawn if n / steps != r)
    if shares:
        yield Deviation(
            _setting(experiment, "model.dropout_rng"),
            f"dropout draws in steps of 1/{steps}: {shares}; what is kept is scaled by the share "
            "really kept",
        )


def _text(experiment: Experiment) -> Iterator[Deviation]:
    corpus = experiment.corpus
    yield Deviation(
        _setting(experiment, "corpus.sources"),
        "the paper read English Wikipedia of 2018 and BooksCorpus, which is not public",
    )
    if corpus.layout != "sentences_by_line":
        yield Deviation(
            _setting(experiment, "corpus.layout"),
            "sentences are found by rules of the language; the reference is given one a line",
        )
    if corpus.tokenizer == "train":
        kind = {"wordpiece": "WordPiece", "unigram": "unigram", "bpe": "BPE"}[corpus.tokenizer_kind]
        yield Deviation(
            _setting(experiment, "corpus.tokenizer"),
            f"a {kind} vocabulary is trained on this text; the paper's is the released vocab.txt, "
            "made from other text by a trainer that was not released",
        )
    elif corpus.tokenizer.endswith(".model"):
        yield Deviation(
            _setting(experiment, "corpus.tokenizer"), "SentencePiece; the paper's is WordPiece"
        )
    yield Deviation(
        _setting(experiment, "corpus.validation_share"),
        "this share of the documents is held out to evaluate on, on the same rows and masks every "
        "time; the reference trains on all, and evaluates on whatever instances it is given",
    )


def _masks(experiment: Experiment) -> Iterator[Deviation]:
    objective = experiment.data.objective
    if objective in _OBJECTIVES:
        yield Deviation(_setting(experiment, "data.objective"), _OBJECTIVES[objective])
    masking = experiment.data.masking
    if masking in _MASKINGS:
        yield Deviation(_setting(experiment, "data.masking"), _MASKINGS[masking])


def _passes(experiment: Experiment) -> Iterator[Deviation]:
    count, setting = experiment.data.dupe_factor, _setting(experiment, "data.dupe_factor")
    if count == 0:
        yield Deviation(
            setting,
            "masks are dynamic: pairs and masks are drawn again in every epoch; the reference's "
            "are static, those of the passes in its files (10 by default; the paper gives no "
            "number) again and again",
        )
    elif count != 10:
        yield Deviation(
            setting,
            f"{count} static passes over the text; the reference's default is 10, the paper gives "
            "no number",
        )
    if count:
        yield Deviation(
            setting,
            "masks are static, as the reference's, whose default is 10 passes (the paper gives no "
            "number); here passes follow one another, each in an order of its own, there the "
            "instances of all passes are shuffled together",
        )


def _optimizer(experiment: Experiment) -> Iterator[Deviation]:
    cfg = experiment.optimizer
    if cfg.name in _OPTIMIZERS:
        yield Deviation(_setting(experiment, "optimizer.name"), _OPTIMIZERS[cfg.name])
    if cfg.schedule in _SCHEDULES:
        yield Deviation(_setting(experiment, "optimizer.schedule"), _SCHEDULES[cfg.schedule])
    if cfg.clip in _CLIPS:
        yield Deviation(_setting(experiment, "optimizer.clip"), _CLIPS[cfg.clip])
        return
    cores = _CORES.get(_shape_of(experiment))
    if cores is not None and cfg.reference_replicas != cores:
        yield Deviation(
            _setting(experiment, "optimizer.reference_replicas"),
            f"the paper trained this size on {cores} cores, each of which clips its own gradient",
        )


def _phases(experiment: Experiment) -> Iterator[Deviation]:
    phases, total = experiment.phases, experiment.total_steps
    if total != _STEPS:
        yield Deviation(f"phases: {total:,} steps", "the paper trained for 1,000,000 steps")
    shares = [(phase.sequence_length, phase.steps / total) for phase in phases]
    if shares != [(length, share) for length, (share, _) in _LENGTHS.items()]:
        shown = ", ".join(f"{share:.1%} of {length}" for length, share in shares)
        yield Deviation(
            f"phases: {shown}", "the paper trained for 90 % of the steps on 128, then on 512"
        )
    for number, phase in enumerate(phases):
        where = f"phases.{number}"
        if phase.batch_size != _BATCH:
            yield Deviation(f"{where}.batch_size={phase.batch_size}", "the paper's is 256")
        most = _LENGTHS.get(phase.sequence_length, (0.0, phase.max_predictions_per_seq))[1]
        if phase.max_predictions_per_seq != most:
            yield Deviation(
                f"{where}.max_predictions_per_seq={phase.max_predictions_per_seq}",
                f"15 % of {phase.sequence_length} asks for {most}",
            )
    if len(phases) > 1:
        yield Deviation(
            f"phases: {len(phases)} in one run",
            "one schedule and the moments of Adam run through all phases; in the reference the "
            "next length is another job, which starts its schedule again and its moments at 0",
        )


# What no setting changes.
_EVERY_RUN = (
    Deviation(
        "random choices",
        "each is a function of seed, phase, row and purpose; the reference takes them from one "
        "generator in turn: the same laws, other examples",
    ),
    Deviation(
        "rows an epoch",
        "every epoch takes as many rows as the first one's plan has: of a longer plan some are "
        "left out, of a shorter one some come twice; the reference's files hold each once",
    ),
)
