"""The section of a pre-training that says what is read, and how text becomes ids."""

import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from bert_jax.config.fields import Count, FieldRule, Section, Wrong

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


def _works(function: Callable[[str], object], text: str) -> bool:
    try:
        function(text)
    except (LookupError, ValueError, re.error):
        return False
    return True


_PartOf = Annotated[float, FieldRule(lambda share: 0 < share < 1, "must be in (0, 1)")]
_Encoding = Annotated[str, FieldRule(lambda name: _works("".encode, name), "not known to Python")]
_Starts = Annotated[str, FieldRule(lambda text: _works(re.compile, text), "no regular expression")]

# What stands before a path that an experiment's file gave as relative to its own folder.
_FOLDER = re.compile(r"(?:(?<=\w:)|^)/(?!/).*/\./")


def named(source: str) -> str:
    """Returns what a source, or a file of one, is called wherever it lies.

    `text:/home/me/experiments/./shelf`, which a file in that folder spells `text:./shelf`, is that
    again.
    """
    return _FOLDER.sub("./", source, count=1)


def source_of_text(path: str) -> str:
    """Returns the source that a path of text is, by the end of its name; a source stays one."""
    word = pathlib.PurePath(re.sub(r"(?i)\.(gz|zst|bz2|xz)$", "", path)).suffix[1:].lower()
    if re.match(r"\w+:(?!//)", path):
        return path
    return f"{word if word in TEXT_FILES else 'text'}:{re.sub(r'(?<=[^:/])/+$', '', path)}"


# Rows of which each source of a mixture has its share exactly.
MIXED_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Corpus(Section, role="identity", label="corpus"):
    """The text and how it becomes ids; see `named` for what a source is called."""

    # text:, jsonl:, csv:, tsv: or parquet:FOLDER_OR_GLOB, relative to the current directory or at
    # an address that fsspec knows (gs://, hf://); tfds:NAME or tfds_dir:PATH. What begins with ./
    # or ../ in an experiment's .py file lies where that file does.
    sources: tuple[str, ...]
    # Weights of the sources, one each: the shares of rows that they have in training, whatever
    # their sizes, 3,1 for three of four. Held-out rows are of all documents alike. Empty:
    # every document is taken once an epoch.
    mixture: tuple[float, ...] = ()
    # How a file falls into documents and paragraphs; per_file decides by its longest line.
    layout: Literal["sentences_by_line", "wrapped", "paragraphs_by_line", "per_file"] = "per_file"
    # Lines that begin a document of a file that holds several: a regular expression that such a
    # line begins with, as CHAPTER; headings: those of wikis, of Markdown and of books.
    document_starts: _Starts = ""
    # A document of more sentences than this is cut into several of about so many; 0: none is cut.
    cut_documents: Count = 0
    # The field of a JSON line or of a TFDS example that holds its text, data.text within another
    # field, or a column of a table; of several sources that differ one each, in their order:
    # text,body.
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
            why = "in corpus.layout=sentences_by_line a blank line ends a document; remove it"
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
                yield "mixture", f"{why}, or remove it of corpus.sources"
