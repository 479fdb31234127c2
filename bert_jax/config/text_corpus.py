"""The section `corpus` of a pre-training: which text is read, and how it becomes token ids."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from bert_jax.config.fields import Count, FieldRule, Problem, Section, WholeShare

# Kinds of sources that are files, with the endings of the files that they read in a folder, in
# upper or lower case. All files but Parquet may be compressed.
FILE_ENDINGS = {"text": (".txt", ".text")}
FILE_ENDINGS |= {kind: (f".{kind}",) for kind in ("jsonl", "csv", "tsv", "parquet")}
COMPRESSED = re.compile(r"\.(gz|zst|bz2|xz)$", re.IGNORECASE)
# Codes of `corpus.language`: ISO 639-1, and the ISO 639-3 codes of other languages for which
# sentencex has rules or a fallback.
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


def _accepts(function: Callable[[str], object], text: str) -> bool:
    try:
        function(text)
    except (LookupError, ValueError, re.error):
        return False
    return True


_OpenShare = Annotated[float, FieldRule(lambda share: 0 < share < 1, "must be in (0, 1)")]
_Encoding = Annotated[str, FieldRule(lambda name: _accepts("".encode, name), "not known to Python")]
_Pattern = Annotated[
    str, FieldRule(lambda s: _accepts(re.compile, s), "not a valid regular expression")
]

# In text:FOLDER/./PATH the part FOLDER/./, where FOLDER is that of the experiment file.
_FOLDER = re.compile(r"(?:(?<=\w:)|^)/(?!/).*/\./")


def source_name(source: str) -> str:
    """Returns a source, or one of its files, without the folder of the experiment file.

    Loading an experiment makes `text:/home/me/experiments/./shelf` of `text:./shelf`. This undoes
    it, so that the name is the same on every machine.
    """
    return _FOLDER.sub("./", source, count=1)


def kind_of_file(path: str) -> str:
    """Returns the kind of source that reads files of this name in a folder; "" if none does."""
    name = path.lower()
    uncompressed = COMPRESSED.sub("", name)
    for kind, endings in FILE_ENDINGS.items():
        if (name if kind == "parquet" else uncompressed).endswith(endings):
            return kind
    return ""


def parse_quality(quality: str) -> tuple[str, float, float]:
    """Returns FIELD, MIN and BELOW of `Corpus.quality` of one source; BELOW may be infinity.

    Raises:
      ValueError: it is neither FIELD:MIN nor FIELD:MIN:BELOW, or MIN is not below BELOW.
    """
    field, minimum, *rest = quality.split(":")
    (below,) = rest or ("inf",)
    if not (field and float(minimum) < float(below)):
        raise ValueError
    return field, float(minimum), float(below)


# In each block of this many rows every source of a mixture has exactly its share.
MIXED_ROWS = 4096
LEAST_SHARE = f"less than one row in {MIXED_ROWS:,}"


@dataclass(frozen=True, kw_only=True)
class Corpus(Section, role="identity", label="corpus"):
    """The text, and how it becomes token ids."""

    # Sources of text: text:, jsonl:, csv:, tsv: or parquet:FOLDER_OR_GLOB, a path relative to the
    # current directory or an address that fsspec knows (gs://, hf://); tfds:NAME or tfds_dir:PATH.
    # Without a prefix the kind follows from the ending of the name; a folder is text:. In an
    # experiment's .py file, ./ and ../ are relative to the folder of the file.
    sources: tuple[str, ...]
    # One weight for each source: its share of the training rows, whatever its size; 3,1 gives the
    # first source three of four rows; 0: only phases with another phases.N.mixture use it. Held-out
    # rows are drawn from all documents alike. Empty: every document is read once an epoch.
    mixture: tuple[float, ...] = ()
    # Exponent of the size of a source, in tokens: its share is proportional to its weight in
    # corpus.mixture (or 1) times tokens^temperature. 1: by size; lower: small sources, such as
    # languages with little text, give more rows than by size; 0: by corpus.mixture alone.
    temperature: WholeShare = 0.0
    # How a file is divided. wrapped: it is a document, a blank line ends a paragraph;
    # paragraphs_by_line: it is a document, each line is a paragraph; sentences_by_line: each line
    # is a sentence, a blank line ends a document. per_file: wrapped if its longest line has at most
    # 200 characters, else paragraphs_by_line.
    layout: Literal["sentences_by_line", "wrapped", "paragraphs_by_line", "per_file"] = "per_file"
    # A regular expression for the first line of each document in a file with several, such as
    # CHAPTER, matched at the beginning of a line; or the word headings: the headings of wikis,
    # Markdown and books.
    document_starts: _Pattern = ""
    # Documents with more sentences than this are cut into parts of about this many; 0: none is cut.
    cut_documents: Count = 0
    # The field of a JSON line or a TFDS example that holds the text (data.text: the field text
    # within data), or the column of a table. Several sources may have one each, in their order:
    # text,body.
    text_field: str = "text"
    # Which documents are read, by a number in their records, such as a score of quality. FIELD:MIN:
    # those whose number in FIELD is at least MIN; FIELD:MIN:BELOW: those that are also below BELOW;
    # empty: all. Several sources may have one each, in their order and separated by commas; any of
    # them may be empty.
    quality: str = ""
    # Encoding of text files, by its name in Python, such as latin-1.
    encoding: _Encoding = "utf-8"
    # What to do about bytes that are invalid in this encoding; replace: they become U+FFFD, which
    # tokenizers drop, and are counted.
    encoding_errors: Literal["stop", "replace"] = "stop"
    # The placeholder for omitted words in the text, such as <unk>; it becomes [UNK].
    unknown_word: str = ""
    # Language of the text, whose rules split it into sentences: an ISO 639 code such as en, de or
    # pt-br.
    language: str = "en"
    # What to do about a document whose whole text occurred before.
    repeated_documents: Literal["keep", "drop"] = "keep"
    # What to do about a document of which an earlier one has most of the text in the same words,
    # found by MinHash; held-out documents count as earlier than others. drop: needs the extra
    # dedup.
    near_duplicates: Literal["keep", "drop"] = "keep"
    # Files of evaluation sets, in any format, by line. A document that holds 13 words in a row of a
    # line is dropped. Needs the extra dedup.
    evaluation_files: tuple[str, ...] = ()
    # train: trains one on the text. Or the path of a vocab.txt, a SentencePiece .model, a
    # tokenizer.json (next to files that name its special tokens) or a run's tokenizer folder.
    tokenizer: str = "train"
    # Algorithm of a trained tokenizer: as BERT's, ModernBERT's, XLM-R's, or SentencePiece's BPE.
    tokenizer_kind: Literal["wordpiece", "byte_bpe", "unigram", "bpe"] = "wordpiece"
    # Number of [unused] tokens at the end of a trained vocabulary, reserved for later words.
    unused_pieces: Count = 0
    # uncased: lower-cased, without accents.
    case: Literal["uncased", "cased"] = "uncased"
    # Share of all documents that is held out for evaluation; at least 8 documents.
    validation_share: _OpenShare = 0.005

    def _problems(self) -> Iterator[Problem]:
        sources = [s if ":" in s else f"{kind_of_file(s) or 'text'}:{s}" for s in self.sources]
        object.__setattr__(self, "sources", tuple(sources))
        if not self.sources:
            yield "sources", "name at least one source of text"
        for source in self.sources:
            kind, _, rest = source.partition(":")
            if not rest or kind not in (*FILE_ENDINGS, "tfds", "tfds_dir"):
                kinds = " ".join(f"{kind}:" for kind in FILE_ENDINGS)
                yield (
                    "sources",
                    f"{source!r} is no source; write {kinds} before FOLDER_OR_GLOB, tfds: before "
                    "NAME, tfds_dir: before a folder",
                )
        for name in ("text_field", "quality"):
            given, needed = len(self._values(name)), len(self.sources)
            if given != needed:
                why = f"{given} values for {needed} corpus.sources; give one for all, or one each"
                yield name, why
        yield from self._quality_problems()
        if problem := self.mixture_problem(self.mixture, self.temperature):
            yield "mixture", problem
        codes, near = _LANGUAGES.split(), self.language[:2].lower()
        if self.language.partition("-")[0] not in codes:
            hint = f"did you mean {near}? " if near in codes else ""
            yield "language", f"unknown language code; {hint}Known codes: {' '.join(codes)}"
        if self.document_starts and self.layout == "sentences_by_line":
            why = "with corpus.layout=sentences_by_line a blank line ends a document; remove it"
            yield "document_starts", why

    def _quality_problems(self) -> Iterator[Problem]:
        for source, quality in zip(self.sources, self._values("quality"), strict=False):
            if quality and not _accepts(parse_quality, quality):
                yield "quality", f"{quality!r}: write FIELD:MIN or FIELD:MIN:BELOW, as in score:2:3"
            elif quality and source.startswith("text:"):
                yield "quality", f"{source} has no fields; give it an empty value, as in score:3,"

    def _values(self, name: Literal["text_field", "quality"]) -> list[str]:
        """Returns the value of each source; as many values as given if their number is wrong."""
        value, count = getattr(self, name), len(self.sources)
        # The field of a single source may have a comma in its name.
        values = value.split(",") if count > 1 else [value]
        return values * count if len(values) == 1 else values

    def split_by_source(self) -> "tuple[Corpus, ...]":
        """Returns one corpus for each source, with its text field and its quality."""
        values = self.sources, self._values("text_field"), self._values("quality")
        return tuple(
            replace(self, sources=(s,), text_field=f, quality=q, mixture=(), temperature=0.0)
            for s, f, q in zip(*values, strict=True)
        )

    @property
    def source_labels(self) -> list[str]:
        """Returns each source with its quality, since one may be listed with several ranges."""
        qualities = self._values("quality")
        return [" ".join(filter(None, pair)) for pair in zip(self.sources, qualities, strict=True)]

    @property
    def is_mixed(self) -> bool:
        """Returns whether sources have shares of the rows, and the text is divided by source."""
        return bool(self.mixture) or self.temperature > 0

    def mixture_problem(self, weights: tuple[float, ...], temperature: float) -> str:
        """Returns what is wrong with the weights of `mixture`; "" if nothing is.

        With a temperature, shares depend on the text: `data.mixture` checks them.
        """
        if len(weights) not in (0, len(self.sources)):
            names = ", ".join(map(source_name, self.source_labels))
            return f"give {len(self.sources)} weights, one for each source: {names}"
        largest = max(weights, default=1.0)  # divided out, since sums may overflow
        if largest == 0:
            return "all weights are 0; give a source that is to be used a positive weight"
        total = sum(weight / largest for weight in weights)
        for weight, source in zip(weights, self.source_labels, strict=False):
            too_small = weight and not temperature and weight / largest * MIXED_ROWS < total
            if weight < 0 or too_small:
                return f"{source} has {LEAST_SHARE}; give it a larger weight, or 0"
        return ""
