"""The sections of a pre-training: what is computed, and where and how.

A section has one of two roles. *Identity*: `Model`, `Corpus`, `Data`, `Phase` and `Optimizer` say
what is computed; they may not change when a run is resumed. *Placement*: `Parallelism` and `Run`
say where and how; they may. Each module of the library is given its own section and sees no other.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

from bert_jax.config.fields import (
    Code,
    Count,
    FolderName,
    Positive,
    PositiveCount,
    PositiveShare,
    RowLength,
    Rule,
    Section,
    Seed,
    Share,
    Side,
    WholeShare,
    Wrong,
    at_least,
)

# Words of sources whose text lies in files.
TEXT_FILES = ("text", "jsonl", "csv", "tsv", "parquet")
# Codes of `corpus.language`: ISO 639-1, and of languages that have none there those of ISO 639-3
# that sentencex has rules for, or knows whose rules to take.
_LANGUAGES = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da
de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz
ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln
lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi
pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti
tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu ace als arc arz ast awa
bar bcl bjn bpy bug bxr cdo ceb ckb crh csb diq dsb dty eml ext fon frp frr fur gag gan gcr glk
gom gor hak haw hif hsb hyw ilo inh jam kaa kab kbd kbp koi krc krl ksh lad lbe lez lij liv lld
lmo lrc ltg lzh mad mag mai mdf mhr min mnw mrj mwl myv mzn nah nan nap nds new nia nso olo pag
pam pap pcd pfl pms pnb pnt rmy rue rup sah sat scn sco sgs shi shn skr smn srn stq szl tay tcy
tet tpi trv tum tyv udm vec vep vls vro war wuu xal xmf yue zea zgh
"""
# Words of `run.trackers`: modules, and extras of the same name.
TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow")
# How many steps of a run may be left out.
SKIPPED_STEPS = 64
# Of a row's tokens, those that are predicted (Devlin et al. 2018, section 3.1).
_PAPERS_SHARE = 0.15
# How many are traced at most: a trace is kept in memory.
_TRACED_STEPS = 100


def _works(function: Callable[[str], object], text: str) -> bool:
    try:
        function(text)
    except (LookupError, ValueError, re.error):
        return False
    return True


def _is_stretch(steps: tuple[int, ...]) -> bool:
    return len(steps) == 2 and 0 <= steps[0] < steps[1] <= steps[0] + _TRACED_STEPS


_Base = Annotated[float, Rule(lambda base: base > 1, "must be over 1")]
_OwnBase = Annotated[float, Rule(lambda base: base == 0 or base > 1, "must be over 1, or 0")]
_Scaling = Annotated[
    str,
    Rule(
        lambda text: re.fullmatch(r"((linear|yarn:[1-9]\d*):[1-9]\d*(\.\d+)?)?", text),
        "must be linear:FACTOR or yarn:POSITIONS:FACTOR, or empty",
    ),
]
_PartOf = Annotated[float, Rule(lambda share: 0 < share < 1, "must be in (0, 1)")]
_Encoding = Annotated[str, Rule(lambda name: _works("".encode, name), "not known to Python")]
_Starts = Annotated[str, Rule(lambda text: _works(re.compile, text), "no regular expression")]
_Parts = Annotated[tuple[int, ...], Rule(lambda x: min(x, default=0) > 0, "must be at least 1")]
_FewSteps = Annotated[PositiveCount, Rule(lambda n: n < SKIPPED_STEPS, f"below {SKIPPED_STEPS}")]
_Stretch = Annotated[
    tuple[int, ...],
    Rule(lambda steps: not steps or _is_stretch(steps), f"10,20, {_TRACED_STEPS} steps at most"),
]
_Trackers = Annotated[
    tuple[str, ...],
    Rule(lambda names: {*names} <= {*TRACKERS}, f"choose from {', '.join(TRACKERS)}"),
]


class _Objective(NamedTuple):
    """What goes with a word of `data.objective`."""

    units: Literal["pairs", "swapped_pairs", "sentences"]  # what a row is made of
    unpredicted: int  # places of a row that are never predicted; 0: a share of them is masked
    direction: Literal["both", "left_to_right"]  # what they attend to
    cuts: bool  # whether tokens may attend to their own documents alone


_OBJECTIVES = {
    "mlm_nsp": _Objective("pairs", 0, "both", False),
    "mlm_sop": _Objective("swapped_pairs", 0, "both", False),
    "mlm": _Objective("sentences", 0, "both", True),
    "causal": _Objective("sentences", 1, "left_to_right", True),
}


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """The encoder and its two heads (Devlin et al. 2018, section 3 and appendix A.2).

    `modern` is ModernBERT's encoder (Warner et al. 2024): rotary positions, layer norms before
    each part and not after it, gated feed-forward parts, no biases, windows.
    """

    role = "identity"
    label = "model"

    # bert: Devlin et al. 2018; modern: ModernBERT.
    kind: Literal["bert", "modern"] = "bert"

    # An encoder of the experiment file's own instead of the kind's, FILE:FUNCTION:SHA256, which
    # bert_jax.config.own(FUNCTION) gives; empty: the kind's.
    code: Code = ""
    # Pieces of the tokenizer, specials included; one that is trained on too little text has some
    # [unused]. The embedding table is padded to a multiple of 1,024 rows.
    vocab_size: Annotated[Side, at_least(6)] = 30_522
    # Width of the encoder, a multiple of the heads.
    hidden_size: Side = 768
    # Layers of the encoder.
    num_hidden_layers: PositiveCount = 12
    # Attention heads of each layer.
    num_attention_heads: PositiveCount = 12
    # Width of each layer's feed-forward part.
    intermediate_size: Side = 3_072
    # What a token attends to: the text on both sides, or up to itself (data.objective=causal).
    direction: Literal["both", "left_to_right"] = "both"
    # Tokens in the longest row; kind=bert has a position embedding for each of them.
    max_position_embeddings: Annotated[Side, at_least(8)] = 512
    # Number of segments, A and B; RoBERTa's is 1, DistilBERT's 0, which has no segment embeddings,
    # and so has none kind=modern.
    type_vocab_size: Count = 2
    # For kind=bert: rows of the position table before that of the first position; RoBERTa's is 2.
    position_offset: Count = 0
    # For kind=bert: what layer norms add to the variance; RoBERTa's is 1e-5.
    layer_norm_eps: Positive = 1e-12
    # For kind=modern: the first layer and then every so many attend to whole rows; the others to a
    # window around each token.
    global_every: PositiveCount = 3
    # For kind=modern: width of that window in tokens, half on each side of the token (of an odd
    # one the token itself is the rest).
    local_window: int = 128
    # Base of the rotary positions of layers that attend to whole rows.
    global_rotary_base: _Base = 160_000.0
    # Base of the rotary positions of layers with a window.
    local_rotary_base: _Base = 10_000.0
    # How the rotary positions of layers that attend to whole rows are stretched for rows longer
    # than those they were learned on: linear:FACTOR, or yarn:POSITIONS:FACTOR, the first being the
    # length of those (Peng et al. 2023); empty: not at all.
    global_rotary_scaling: _Scaling = ""
    # The same of layers with a window.
    local_rotary_scaling: _Scaling = ""
    # For kind=modern: whether the output's weights are the word embeddings, or a table of its own.
    output_table: Literal["tied", "own"] = "tied"
    # Activation of the feed-forward part; gelu_tanh is the approximation by tanh.
    hidden_act: Literal["gelu", "gelu_tanh"] = "gelu"
    # Dropout of embeddings and of what each layer adds.
    hidden_dropout_prob: Share = 0.1
    # Dropout of attention probabilities.
    attention_probs_dropout_prob: Share = 0.1
    # Standard deviation of fresh weights, a normal distribution cut off at twice it.
    initializer_range: Positive = 0.02
    # Fresh layers as the kind's reference draws them, or scaled: by 1/sqrt(hidden_size), and what a
    # layer adds begins as zero.
    initialization: Literal["reference", "scaled"] = "reference"
    # Type of activations and matrix products; parameters, sums and losses stay float32.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # threefry8: noise is a function of the row alone, the same on any mesh; rbg16: fast on TPU,
    # a function of the mesh; in_kernel: on TPUs within kernels, which is fastest there, a function
    # of the mesh and of the kind of TPU; elsewhere it is rbg16.
    dropout_rng: Literal["threefry8", "rbg16", "in_kernel"] = "threefry8"

    def _wrong(self) -> Iterator[Wrong]:
        if self.hidden_size % self.num_attention_heads:
            yield "num_attention_heads", f"must divide model.hidden_size={self.hidden_size}"
        steps = 256 if self.dropout_rng == "threefry8" else 65_536
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            share = getattr(self, name)
            if share > 0 and not 0 < round(share * steps) < steps:
                yield name, f"model.dropout_rng={self.dropout_rng} draws in steps of 1/{steps}"
        for name in _WITHOUT_MEANING[self.kind]:
            if not self._is_default(name):
                yield name, f"has no meaning with model.kind={self.kind}; leave it out"
        if self.kind == "modern":
            yield from self._wrong_of_modern()

    def _wrong_of_modern(self) -> Iterator[Wrong]:
        every, window, most = self.global_every, self.local_window, self.max_position_embeddings
        width = self.hidden_size // self.num_attention_heads
        if width % 2:
            yield "num_attention_heads", f"heads are {width} wide, and must be even"
        if every == 1:
            for name in ("local_window", "local_rotary_base", "local_rotary_scaling"):
                if not self._is_default(name):
                    yield name, "has no meaning with model.global_every=1"
        elif window < 2:
            yield "local_window", "must be at least 2, half of it on each side"
        elif window > most:
            yield "local_window", f"is over model.max_position_embeddings={most}"


# What is left as it is, by `model.kind`.
_OF_BERT = ("type_vocab_size", "position_offset", "layer_norm_eps")
_WITHOUT_MEANING = {
    "bert": ("output_table",),
    "modern": _OF_BERT,
}

# What stands before a path that an experiment's file gave as relative to its own folder.
_FOLDER = re.compile(r"(?:(?<=\w:)|^)/(?!/).*/\./")


def named(source: str) -> str:
    """Returns what a source, or a file of one, is called wherever it lies.

    `text:/home/me/experiments/./shelf`, which a file in that folder spells `text:./shelf`, is that
    again.
    """
    return _FOLDER.sub("./", source, count=1)


# Rows of which each source of a mixture has its share exactly.
MIXED_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Corpus(Section):
    """The text and how it becomes ids.

    A source is WORD:PLACE: a word of `TEXT_FILES`, tfds or tfds_dir, and a file, folder, pattern or
    dataset; see `named`. `tokenizer` is "train", or a `vocab.txt`, a `.model`, a `tokenizer.json`,
    or a tokenizer folder of an earlier run.
    """

    role = "identity"
    label = "corpus"

    # text:, jsonl:, csv:, tsv: or parquet:FOLDER_OR_GLOB, relative to the current directory or at
    # an address that fsspec knows (gs://, hf://); tfds:NAME or tfds_dir:PATH. What begins with ./
    # or ../ in an experiment's .py file lies where that file does.
    sources: tuple[str, ...]
    # Weights of the sources, one each: the shares of rows that they have in training, whatever
    # their sizes, 3,1 for three of four. Held-out rows are of all documents alike. None: every
    # document is taken once an epoch.
    mixture: tuple[float, ...] = ()
    # How a file falls into documents and paragraphs; per_file decides by its longest line.
    layout: Literal["sentences_by_line", "wrapped", "paragraphs_by_line", "per_file"] = "per_file"
    # Lines that begin a document of a file that holds several: a regular expression that such a
    # line begins with, as CHAPTER; headings: those of wikis, of Markdown and of books.
    document_starts: _Starts = ""
    # A document of more sentences than this is cut into several of about so many; 0: none is cut.
    cut_documents: Count = 0
    # The field of a JSON line or of a TFDS example that holds its text, or a column of a table; of
    # several sources that differ one each, in their order: text,body.
    text_field: str = "text"
    # Encoding of text files, by its name in Python, such as latin-1.
    encoding: _Encoding = "utf-8"
    # What is done at bytes that are not of this encoding; replace: they become U+FFFD, which
    # tokenizers drop, and are counted.
    encoding_errors: Literal["stop", "replace"] = "stop"
    # What the text has in place of words that its makers left out, as <unk>: it becomes [UNK].
    unknown_word: str = ""
    # Language of the text, by whose rules it is split into sentences: an ISO 639 code such as en,
    # de or pt-br.
    language: str = "en"
    # What is done with a document that was there before, word for word.
    repeated_documents: Literal["keep", "drop"] = "keep"
    # train, on the text; or a vocab.txt, a .model, a tokenizer.json with what names its specials
    # next to it, or an earlier run's tokenizer folder.
    tokenizer: str = "train"
    # Which is trained: one as BERT's, as ModernBERT's, as XLM-R's; or SentencePiece's BPE.
    tokenizer_kind: Literal["wordpiece", "byte_bpe", "unigram", "bpe"] = "wordpiece"
    # Pieces of a trained vocabulary, its last, that are left [unused], for what is to come.
    unused_pieces: Count = 0
    # uncased: lower-cased, accents stripped.
    case: Literal["uncased", "cased"] = "uncased"
    # Share of all documents that is held out for evaluation; at least 8 documents.
    validation_share: _PartOf = 0.005

    def _wrong(self) -> Iterator[Wrong]:
        # A path alone is a folder of text.
        sources = (source if ":" in source else f"text:{source}" for source in self.sources)
        object.__setattr__(self, "sources", tuple(sources))
        if not self.sources:
            yield "sources", "name at least one source of text"
        for source in self.sources:
            word, _, rest = source.partition(":")
            if not rest or word not in (*TEXT_FILES, "tfds", "tfds_dir"):
                words = " ".join(f"{word}:" for word in TEXT_FILES)
                why = f"{words} go before FOLDER_OR_GLOB, tfds: before NAME, tfds_dir: before PATH"
                yield "sources", f"{source!r} is no source; {why}"
        yield from self._wrong_mixture()
        fields, sources = len(self._fields()), len(self.sources)
        if fields not in (1, sources):
            why = f"{fields} fields for {sources} of corpus.sources; give one for all, or one each"
            yield "text_field", why
        codes, near = _LANGUAGES.split(), self.language[:2].lower()
        if self.language.partition("-")[0] not in codes:
            hint = f"did you mean {near}? T" if near in codes else "t"
            yield "language", f"no code of a language; {hint}here are {' '.join(codes)}"
        if self.document_starts and self.layout == "sentences_by_line":
            why = "in corpus.layout=sentences_by_line a blank line ends a document; leave it out"
            yield "document_starts", why

    def _fields(self) -> list[str]:
        # A column of a single source may be called anything.
        return self.text_field.split(",") if len(self.sources) > 1 else [self.text_field]

    def alone(self) -> "tuple[Corpus, ...]":
        """Returns a corpus of each source by itself, with its field."""
        fields = itertools.cycle(self._fields())
        return tuple(
            replace(self, sources=(source,), text_field=field, mixture=())
            for source, field in zip(self.sources, fields, strict=False)
        )

    def _wrong_mixture(self) -> Iterator[Wrong]:
        if len(self.mixture) not in (0, len(self.sources)):
            yield "mixture", f"give {len(self.sources)} weights, one for each source"
        largest = max(self.mixture, default=0)
        whole = sum(weight / largest for weight in self.mixture if largest)
        for weight, source in zip(self.mixture, self.sources, strict=False):
            if weight <= 0.0 or weight / largest * MIXED_ROWS < whole:
                why = f"{source} has less than one row in {MIXED_ROWS:,}; give it a larger weight"
                yield "mixture", f"{why}, or leave it out of corpus.sources"


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """The way from ids to examples (Devlin et al. 2018, section 3.1 and appendix A.1)."""

    role = "identity"
    label = "data"

    # What is learned. mlm_nsp: masked pieces of pairs, and whether B follows A; mlm_sop: masked
    # pieces of pairs that follow each other, and whether they were swapped (ALBERT); mlm: masked
    # pieces alone, of rows of full sentences that go on from one document to the next (RoBERTa);
    # causal: of such rows the next piece at every place, from what is left of it (GPT).
    objective: Literal["mlm_nsp", "mlm_sop", "mlm", "causal"] = "mlm_nsp"
    # Something else that is learned of the same rows: an objective of the experiment file's own,
    # FILE:FUNCTION:SHA256, which bert_jax.config.own(FUNCTION) gives; empty: nothing else.
    code: Code = ""
    # Of rows of full sentences: whether a token attends to all documents of its row, or to its own
    # alone, in which positions begin at 0 again, as they do for a text by itself.
    attention: Literal["whole_row", "per_document"] = "whole_row"
    # Share of examples that are made of a random, shorter length; only of objectives with pairs.
    short_seq_prob: Share = 0.1
    # Share of an example's tokens that are to be predicted.
    masked_lm_prob: Share = 0.15
    # data.masked_lm_prob moves in even steps to this share at the last step; 0: it stays. Held-out
    # rows are masked alike whatever is set here: 15 % of the pieces, of which 80 % become [MASK].
    final_masked_lm_prob: Share = 0.0
    # Of the tokens to be predicted, the share that becomes [MASK].
    mask_share: WholeShare = 0.8
    # Of the tokens to be predicted, the share that becomes a random piece; the rest stays as it is.
    random_share: WholeShare = 0.1
    # What is masked at once: single pieces, all pieces of a word, or up to ten words (SpanBERT's
    # spans: geometric with p 0.2, each replaced as a whole).
    masking: Literal["piece", "whole_word", "span"] = "piece"
    # 0: new pairs and masks in every epoch; n: those of the first n epochs again and again.
    dupe_factor: Count = 0
    # pairs: as many examples as fit share a row, without attending to each other; next to no
    # padding.
    packing: Literal["none", "pairs"] = "none"
    # Length of the held-out rows.
    eval_sequence_length: RowLength = 128
    # The most masked tokens that a held-out row may have.
    eval_max_predictions_per_seq: PositiveCount = 20
    # Held-out rows that are scored, the same at every evaluation; fewer if there are fewer.
    eval_rows: PositiveCount = 10_000
    # Seed that draws held-out rows and their masks, whatever the run's own, so that runs of several
    # seeds are scored on the same.
    eval_seed: Count = 0

    def _wrong(self) -> Iterator[Wrong]:
        objective, whole = self.objective, self.eval_sequence_length - self.unpredicted
        if self.mask_share + self.random_share > 1.0:
            yield "random_share", f"is over 1 together with data.mask_share={self.mask_share}"
        if self.units == "sentences" and self.packing != "none":
            yield "packing", f"data.objective={objective} has no pairs, and fills its rows already"
        if self.attention != "whole_row" and not _OBJECTIVES[objective].cuts:
            yield "attention", f"rows of data.objective={objective} are read whole; leave it out"
        if self.unpredicted and self.eval_max_predictions_per_seq != whole:
            why = f"data.objective={objective} predicts all pieces; set it to {whole}"
            yield "eval_max_predictions_per_seq", why
        if self.dupe_factor and self.final_masked_lm_prob:
            why = "cannot change masks that are repeated; set data.dupe_factor=0"
            yield "final_masked_lm_prob", why

    @property
    def units(self) -> Literal["pairs", "swapped_pairs", "sentences"]:
        """Returns what a row is made of."""
        return _OBJECTIVES[self.objective].units

    @property
    def unpredicted(self) -> int:
        """Returns how many places of a row are never predicted; 0: a share of them is masked."""
        return _OBJECTIVES[self.objective].unpredicted

    @property
    def largest_masked_share(self) -> float:
        """Returns the largest share of a row's tokens that any step predicts."""
        return max(self.masked_lm_prob, self.final_masked_lm_prob)


@dataclass(frozen=True, kw_only=True)
class Phase(Section):
    """A stretch of training at one sequence length, with a data plan of its own."""

    role = "identity"
    label = "phases"

    # Updates in this phase.
    steps: PositiveCount
    # Length of a row, in tokens.
    sequence_length: RowLength
    # The most masked tokens that an example may have.
    max_predictions_per_seq: PositiveCount
    # Rows a step, over all devices.
    batch_size: PositiveCount = 256
    # With data.packing=pairs: the most examples that may share a row.
    examples_per_row: PositiveCount = 8
    # With data.packing=pairs: the most masked tokens in a row; 0: max_predictions_per_seq plus
    # examples_per_row.
    predictions_per_row: int = 0
    # Of kind=modern: in this phase, the base of the rotary positions of layers that attend to whole
    # rows; 0: model.global_rotary_base.
    global_rotary_base: _OwnBase = 0.0
    # Added to the numbers of the phase's rows. `pretrain --fork` sets it, so that another batch
    # size goes on at the first row that was not seen.
    row_offset: int = 0

    @property
    def row_predictions(self) -> int:
        """Masked tokens of a packed row at most."""
        return self.predictions_per_row or self.max_predictions_per_seq + self.examples_per_row

    def _wrong(self) -> Iterator[Wrong]:
        most = self.max_predictions_per_seq
        if 0 != self.predictions_per_row < most:
            why = f"must be 0, or at least phases.max_predictions_per_seq={most}"
            yield "predictions_per_row", why
        if most >= self.sequence_length:
            yield "max_predictions_per_seq", f"must be below sequence_length={self.sequence_length}"


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """The update (Devlin et al. 2018, appendix A.2; You et al. 2019 for LAMB).

    `bert_adam` is the reference's Adam: no bias correction, decay added to the update.
    `clip="per_replica"` cuts the batch into `reference_replicas` groups, clips each group's own
    gradient and sums them, as the reference does on that many TPU cores.
    """

    role = "identity"
    label = "optimizer"

    # The rule of the update; bert_adam keeps its moments' bias (a first update 3.16 times adamw's);
    # stable_adamw lowers the rate of a tensor whose gradients outgrow what their means remember.
    name: Literal["bert_adam", "adamw", "lamb", "stable_adamw"] = "bert_adam"
    # The highest learning rate, at the end of the warm-up.
    peak_learning_rate: Positive = 1e-4
    # Steps in which the learning rate rises.
    warmup_steps: Count = 10_000
    # paper: linear decay from step 0, replaced by a linear warm-up that leaves a jump at its end;
    # wsd: warm-up, a stable stretch at the peak, and a decay in the last decay_steps.
    schedule: Literal["paper", "linear", "cosine", "wsd"] = "paper"
    # Of schedule=wsd, the last steps, in which the rate falls to 0; 0: it never does.
    decay_steps: Count = 0
    # Of schedule=wsd, how it falls: in even steps, or as 1 - sqrt of the share of them done.
    decay_shape: Literal["one_minus_sqrt", "linear"] = "one_minus_sqrt"
    # Adam's beta 1: decay of the running mean of gradients.
    b1: Share = 0.9
    # Adam's beta 2: decay of the running mean of squared gradients.
    b2: Share = 0.999
    # Adam's epsilon: added to the root of the mean of squared gradients.
    eps: Positive = 1e-6
    # Decay of kernels and embeddings; biases and layer norms have none.
    weight_decay: Annotated[float, at_least(0)] = 0.01
    # Which norm is limited: the whole gradient's after the mean, that of each of reference_replicas
    # groups of rows before the sum (as the reference), or none.
    clip: Literal["global", "per_replica", "none"] = "global"
    # A gradient with a larger norm is scaled down to this one.
    clip_norm: Positive = 1.0
    # With clip=per_replica: groups of rows in a batch, each of whose gradients is clipped by
    # itself.
    reference_replicas: PositiveCount = 1
    # Type in which devices add up their gradients.
    gradient_reduction: Literal["float32", "bfloat16"] = "float32"
    # Each layer learns by so much slower than the one above it, the embeddings slowest of all.
    layer_decay: PositiveShare = 1.0
    # A step whose loss or gradient is not finite changes nothing. After so many in a row the run
    # goes back to the checkpoint before them and leaves them out, or ends.
    bad_steps_in_a_row: _FewSteps = 10
    # What the run does after bad_steps_in_a_row: goes back to the checkpoint before them, or ends.
    after_bad_steps: Literal["roll_back", "stop"] = "roll_back"


@dataclass(frozen=True, kw_only=True)
class Parallelism(Section):
    """The layout of the step over devices. May change on resume."""

    role = "placement"
    label = "parallelism"

    # The state whole on every device, or cut over them: zero1 gathers the parameters once a step,
    # zero3 each layer's where it is used.
    state: Literal["replicated", "zero1", "zero3"] = "replicated"
    # Devices that share a row: heads, feed-forward and vocabulary are cut over them.
    tensor: PositiveCount = 1
    # Micro-batches a step: one number for all phases, or one a phase.
    accumulation: _Parts = (1,)
    # What is kept of each layer for the backward pass: everything (none), the results of matrix
    # products but no attention scores (dots), or nothing (full); the rest is computed again.
    remat: Literal["none", "dots", "full"] = "none"
    # Layers as one compiled loop (compiles fast), or one after the other (runs faster on a CPU).
    layer_loop: Literal["scan", "unroll"] = "scan"

    def accumulation_of(self, phase: int) -> int:
        """Returns the micro-batches of a step of this phase."""
        return self.accumulation[phase if len(self.accumulation) > 1 else 0]


@dataclass(frozen=True, kw_only=True)
class Run(Section):
    """Everything that happens next to the steps, every so many of them. May change on resume."""

    role = "placement"
    label = "run"

    # Steps between lines of metrics.jsonl.
    log_every: PositiveCount = 100
    # Steps between evaluations on held-out text.
    eval_every: PositiveCount = 10_000
    # Rows scored at a time.
    eval_batch_size: PositiveCount = 256
    # Steps between checkpoints.
    checkpoint_every: PositiveCount = 1_000
    # How many of the newest checkpoints are kept.
    keep_checkpoints: Annotated[int, at_least(2)] = 3  # the newest may be damaged
    # How many checkpoints of the lowest held-out loss are kept, too.
    keep_best: Count = 1
    # Checkpoints of steps divisible by this are kept, too; 0: none.
    keep_every: Count = 0
    # A checkpoint that does not fit on the disk ends the run, or is left out and tried again.
    when_disk_is_full: Literal["stop", "go_on"] = "stop"
    # The process prints its stacks and ends when no step was done for so many seconds; 0: never. An
    # evaluation counts as a step; what compiles may take twice as long.
    hang_after_seconds: Count = 1_800
    # Steps between those that TPU chips compute several times to check their arithmetic; 0: none.
    # On TPUs only. A chip that fails its check ends the run; run it again on another machine.
    check_every: Count = 0
    # Batches made ahead of the step that needs them.
    prefetch_batches: PositiveCount = 4
    # Processes that make batches; 0: a thread.
    data_workers: Count = 0
    # 10,20 traces the steps after the 10th up to the 20th, for a profiler; empty: no trace.
    profile_steps: _Stretch = ()
    # Texts whose [MASK] is filled in at every evaluation; empty: sentences of held-out documents.
    watch: tuple[str, ...] = ()
    # Task files to score the encoder on during the run: a linear layer is trained on its vectors,
    # or of minimal pairs the likelier text is chosen; before the first step, after the last, and at
    # evaluations as often as run.probe_share allows.
    probes: tuple[str, ...] = ()
    # Share of the run's operations that run.probes may take.
    probe_share: PositiveShare = 0.05
    # Where metrics are sent while the run goes on: tensorboard, trackio, wandb, mlflow, each an
    # extra to install; they stay in the workdir unless the tracker's own variables name a server.
    trackers: _Trackers = ()
    # Where the prepared corpus lies; empty: in the workdir. Runs that share text may share it.
    corpus_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class Experiment(Section):
    """One pre-training: all a run needs to know."""

    role = "identity"
    label = "experiment"

    # Names the run, and its folder runs/NAME.
    name: FolderName
    # Seed of every random draw in training: weights, order, pairs, masks and dropout.
    seed: Seed = 0
    # A folder that `bert-jax import` made, whose weights the run begins with; empty: fresh ones.
    init_from: str = ""
    model: Model = field(default_factory=Model)
    corpus: Corpus
    data: Data = field(default_factory=Data)
    phases: tuple[Phase, ...]
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallelism: Parallelism = field(default_factory=Parallelism)
    run: Run = field(default_factory=Run)

    @property
    def total_steps(self) -> int:
        """Steps of all phases together; the learning-rate schedule runs over their sum."""
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, done: int) -> tuple[int, int]:
        """Returns the number of the phase of the step after `done` steps, and its first step."""
        first = 0
        for number, phase in enumerate(self.phases):
            if done < first + phase.steps:
                return number, first
            first += phase.steps
        raise ValueError(f"{done} steps are all of them")

    def rows_after(self, done: int) -> list[int]:
        """Returns of each phase the first row that `done` steps have not come to."""
        rows = []
        for phase in self.phases:
            rows.append(phase.row_offset + min(done, phase.steps) * phase.batch_size)
            done -= min(done, phase.steps)
        return rows

    def model_of(self, phase: int) -> Model:
        """Returns the model as a phase trains it, with the phase's own base of rotary positions."""
        base = self.phases[phase].global_rotary_base or self.model.global_rotary_base
        return replace(self.model, global_rotary_base=base)

    def model_after(self, done: int) -> Model:
        """Returns the model as the last of `done` steps computed it; of none: as the first will."""
        return self.model_of(self.phase_at(max(done - 1, 0))[0])

    def _wrong(self) -> Iterator[Wrong]:
        if not self.phases:
            yield "phases", "name at least one phase"
        yield from self._wrong_objective()
        yield from self._wrong_parallelism()
        yield from self._wrong_schedule()
        if self.data.packing != "none" and self.corpus.mixture:
            yield "data.packing", "corpus.mixture has rows of one source each; leave one out"
        lengths = {"data.eval_sequence_length": self.data.eval_sequence_length}
        lengths |= {
            f"phases.{i}.sequence_length": x.sequence_length for i, x in enumerate(self.phases)
        }
        most = self.model.max_position_embeddings
        for name, length in lengths.items():
            if length > most:
                why = f"longer than the position table, model.max_position_embeddings={most}"
                yield name, why
        for number, phase in enumerate(self.phases):
            for name, why in self._wrong_phase(number, phase):
                yield f"phases.{number}.{name}", why
        longest = max(phase.sequence_length for phase in self.phases)
        windowed = self.model.kind == "modern" and self.model.global_every > 1
        # Weights that were there before bring their window along.
        if windowed and self.model.local_window > longest and not self.init_from:
            why = f"is over the longest row, of {longest}; set it lower, or model.global_every=1"
            yield "model.local_window", why

    def _wrong_phase(self, number: int, phase: Phase) -> Iterator[Wrong]:
        data, length, most = self.data, phase.sequence_length, phase.max_predictions_per_seq
        share, whole = data.largest_masked_share, length - data.unpredicted
        # The paper's share is cut off by a narrow table, as in the reference.
        if share > _PAPERS_SHARE and round(share * length) > most:
            why = f"data.masked_lm_prob and data.final_masked_lm_prob ask for {share:g} of {length}"
            yield "max_predictions_per_seq", f"{why}; set it to {round(share * length)}"
        if data.unpredicted and most != whole:
            why = f"data.objective={data.objective} predicts all pieces; set it to {whole}"
            yield "max_predictions_per_seq", why
        parts = {"parallelism.accumulation": self.parallelism.accumulation_of(number)}
        if self.optimizer.clip == "per_replica":
            parts["optimizer.reference_replicas"] = self.optimizer.reference_replicas
        for name, divisor in parts.items():
            if phase.batch_size % divisor:
                yield "batch_size", f"not a multiple of {name}={divisor}"
        rows = phase.steps * phase.batch_size
        if rows + phase.row_offset >= 2**32:
            yield "steps", "over 2**32 rows in one phase"
        if data.packing != "none" and rows * phase.examples_per_row >= 2**32:
            yield "examples_per_row", "over 2**32 examples in one phase"

    def _wrong_objective(self) -> Iterator[Wrong]:
        objective, model, run = self.data.objective, self.model, self.run
        wanted, given = _OBJECTIVES[objective], f"data.objective={objective}"
        if model.direction != wanted.direction:
            yield "model.direction", f"{given}: set model.direction={wanted.direction}"
        if wanted.units != "sentences" and model.type_vocab_size < 2:
            yield "model.type_vocab_size", f"{given} has pairs, of two segments; set it to 2"
        if objective == "causal" and model.code:
            yield "model.code", f"attends as it likes, which {given} cannot use"
        if wanted.unpredicted and run.watch:
            yield "run.watch", f"{given} fills no [MASK]; leave it out, --set run.watch="
        if self.data.code and run.probes:
            why = "know no objective of data.code; ask later with `bert-jax evaluate --task`"
            yield "run.probes", why

    def _wrong_parallelism(self) -> Iterator[Wrong]:
        given, heads = self.parallelism, self.model.num_attention_heads
        if len(given.accumulation) not in (1, len(self.phases)):
            why = f"give one number, or one for each of the {len(self.phases)} phases"
            yield "parallelism.accumulation", why
        if heads % given.tensor:
            yield "parallelism.tensor", f"does not divide model.num_attention_heads={heads}"
        if self.optimizer.clip == "per_replica":
            if max(given.accumulation) != 1:
                why = "optimizer.clip=per_replica takes the batch in parts already; set it to 1"
                yield "parallelism.accumulation", why
            if given.state == "zero3":
                why = "sums gradients, so that optimizer.clip=per_replica has none to clip"
                yield "parallelism.state", why

    def _wrong_schedule(self) -> Iterator[Wrong]:
        total, update = self.total_steps, self.optimizer
        steps = {"optimizer.warmup_steps": update.warmup_steps}
        if update.schedule == "wsd":
            steps["optimizer.decay_steps"] = update.decay_steps
        if update.warmup_steps >= total or sum(steps.values()) > total:
            short = " ".join(f"--set {name}={total // 10}" for name in steps)
            why = f"too many for the {total} steps of all phases; for a short trial {short}"
            yield max(steps, key=steps.__getitem__), why
