"""Text as bytes and characters: what does not decode, or was once decoded in the wrong way.

charset-normalizer, the [doctor] extra, guesses the encoding of files that do not decode and are of
another script; without it they are named all the same.
"""

import math
import os
import re

from bert_jax.config import Corpus
from bert_jax.doctor.finding import Finding, Rule, example, share
from bert_jax.errors import printable
from bert_jax.text.documents import Document
from bert_jax.text.encodings import HIGH, File

# --- files as bytes: what does not decode, and what is no text at all ---

# Files named after the example.
_NAMED = 8
# Bytes above 127 in a European language are a few in a hundred; in other scripts, most.
_ANOTHER_SCRIPT = 0.2

_DAMAGED = Rule(
    "{count} of {files} files cannot be read",
    0, 0,
    "`prepare` stops at the first of them",
    "fetch or compress them again",
)  # fmt: skip
_UNDECODABLE = Rule(
    "{count} of {files} files are not {encoding} ({bytes:,} bytes{guess})",
    0, 0,
    "`prepare` stops at the first of them",
    "{remedy}; they were looked at no further",
)  # fmt: skip
_IS_UTF8 = Rule(
    "{count} of {high} files with characters beyond ASCII are UTF-8, and are read as {encoding}",
    0, 0,
    "`prepare` refuses them: each such character would become two or three strange ones",
    "{remedy} corpus.encoding at utf-8",
)  # fmt: skip
_BINARY = Rule(
    "{count} of {files} files hold NUL bytes and are no text ({nuls:,} in the first, "
    "{share} of it)",
    0, 0,
    "their characters come out as single letters or as nothing",
    "convert them if they are UTF-16 (`iconv -f UTF-16LE -t UTF-8`), else take them out",
)  # fmt: skip


def of_files(corpus: Corpus, files: list[File]) -> list[Finding]:
    """Returns what is wrong with the files of a corpus, as `scan` saw them."""
    findings = []
    damaged = [file for file in files if file.damage]
    bad = [file for file in files if file.bad and not file.damage]
    utf8 = [file for file in files if file.utf8 and not file.bad]
    binary = [file for file in files if file.binary and not file.bad and not file.damage]
    high = sum(file.high > 0 for file in files)
    if damaged:
        where = example(damaged[0].path, damaged[0].damage) + _also(damaged)
        findings += _DAMAGED.check(len(damaged), where, count=len(damaged), files=len(files))
    if bad:
        findings.append(_undecodable(corpus, files, bad))
    if utf8:
        where = example(utf8[0].path, f"{utf8[0].high:,} bytes beyond ASCII") + _also(utf8)
        remedy = "convert the others to UTF-8 with iconv, and leave"
        findings += _IS_UTF8.check(
            len(utf8),
            where,
            count=len(utf8),
            high=high,
            encoding=corpus.encoding,
            remedy="leave" if len(utf8) == high else remedy,
        )
    if binary:
        first = binary[0]
        findings += _BINARY.check(
            len(binary),
            example(first.path, f"{first.size:,} bytes") + _also(binary),
            count=len(binary),
            files=len(files),
            nuls=first.nuls,
            share=share(first.nuls / first.size),
        )
    return findings


def _undecodable(corpus: Corpus, files: list[File], bad: list[File]) -> Finding:
    offset, line, before, after = bad[0].where
    encoding = "UTF-8" if all(file.utf8 for file in bad) else guess(before + after)
    if encoding is None:
        remedy = "find out which encoding it is; pip install 'bert-jax[doctor]' has it guessed here"
    elif encoding == "UTF-8":
        remedy = "leave corpus.encoding at utf-8"
    elif len(bad) == len(files):
        remedy = f"--set corpus.encoding={encoding.lower()} if the example reads well"
    else:
        remedy = f"convert them if the example reads well: `iconv -f {encoding} -t UTF-8`"
    excerpt = before[-30:] + after[:60]
    shown = excerpt.decode(encoding or "windows-1252", "backslashreplace")
    return _UNDECODABLE.finding(
        "problem",
        example(f"{bad[0].path}:{line}, byte {offset}", shown) + _also(bad),
        count=len(bad),
        files=len(files),
        encoding=corpus.encoding,
        bytes=sum(file.bad for file in bad),
        guess=f"; the first looks like {encoding}" if encoding else "",
        remedy=remedy,
    )


def guess(data: bytes) -> str | None:
    """Returns the encoding that bytes look like; None if nobody can say.

    Another script, or UTF-16, is a question for charset-normalizer. Text with few bytes beyond
    ASCII is Windows-1252 nearly always, which charset-normalizer takes for its neighbours (French
    for CP1257).
    """
    if b"\0" not in data and len(data.translate(None, HIGH)) > (1 - _ANOTHER_SCRIPT) * len(data):
        return "WINDOWS-1252"
    try:
        import charset_normalizer
    except ImportError:
        return None
    best = charset_normalizer.from_bytes(data).best()
    return None if best is None else best.encoding.upper().replace("_", "-")


def _also(files: list[File]) -> str:
    """Returns the names of some more files than the first, since all of them want mending."""
    names = [printable(os.path.basename(file.path)) for file in files[1 : 1 + _NAMED]]
    more = len(files) - 1 - len(names)
    if not names:
        return ""
    return f"; also {', '.join(names)}" + (f" and {more:,} more" if more else "")


# --- characters: text read in the wrong encoding, cut, full of markup ---

# What bytes 0x80 to 0xbf, which go on a UTF-8 character, look like as Latin-1 or Windows-1252.
_CONTINUES = "".join(map(chr, range(0x80, 0xC0))) + bytes(range(0x80, 0xC0)).decode(
    "windows-1252", "ignore"
)
# Chosen so that no correct text matches: an É or é may stand before a closing guillemet, with a
# no-break space between, so a first byte counts alone only where it is no common letter.
_MOJIBAKE = re.compile(
    f"[ÂÃ][{_CONTINUES}]|â[€\x80][{_CONTINUES}]|ð[Ÿ\x9f][{_CONTINUES}]"
    f"|(?:[ÎÏÐÑ][{_CONTINUES}]){{2,}}|(?:[ä-é][{_CONTINUES}]{{2}}){{2,}}"
)
# One broken character in 10,000 is one word in 2,000: more than a vocabulary learns to overlook.
_BROKEN = 1e-4
# A tag in every 1,000 characters is in every other example of 128 pieces.
_MARKED_UP = 1e-3
_COUNTED = ": {count:,} in {documents:,} documents{scope}, {value} of all characters"

# (pattern, fewer matches may be chance, whether pure ASCII can match, the rule for matches a
# character). Where the first matches, its parts do not count for the others.
_CHARACTERS = (
    (_MOJIBAKE, 3, False, Rule(
        'UTF-8 was once read as Latin-1 or Windows-1252 ("Ã©" for "é")' + _COUNTED, 0, _BROKEN,
        "words with accents and quotation marks become strange pieces, apart from their like",
        "read it as corpus.encoding=utf-8; if it is, the files are damaged: mend or fetch "
        "them again",
    )),
    # 0x85 is a line end of some systems.
    (re.compile("[\x80-\x84\x86-\x9f]"), 1, False, Rule(
        "Windows-1252 was once read as Latin-1 (control characters for quotation marks)" + _COUNTED,
        0, _BROKEN,
        "the tokenizer drops them: quotation marks, dashes and apostrophes are lost",
        "--set corpus.encoding=windows-1252; if the files are UTF-8, they are damaged",
    )),
    (re.compile("\ufffd"), 1, False, Rule(
        "replacement characters (U+FFFD) stand where an earlier conversion failed" + _COUNTED,
        0, _BROKEN,
        "the tokenizer drops them: words lose letters",
        "fetch the text again, and convert it in its own encoding",
    )),
    (re.compile("\ufeff"), 1, False, Rule(
        "byte-order marks stand inside the text" + _COUNTED, 0, math.inf,
        "none, the tokenizer drops them; files were joined",
        "if documents were joined with the files, separate them",
    )),
    (re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f]"), 1, True, Rule(
        "control characters" + _COUNTED, 0, _BROKEN,
        "the tokenizer drops them, and what they stood between runs together",
        "remove them, e.g. `tr -d '\\000-\\010\\013\\016-\\037\\177'`",
    )),
    (re.compile(r"</?[A-Za-z][^<>\n]{0,80}>|&(?:[a-z]{2,8}|#\d{2,5});"), 10, True, Rule(
        "markup (tags such as <b> or <unk>, references such as &amp;)" + _COUNTED, 0, _MARKED_UP,
        "the model learns tags and their letters in place of words",
        "take the text out of its markup before training",
    )),
)  # fmt: skip


class Characters:
    """Counts the faults of documents as they are read."""

    def __init__(self) -> None:
        self._characters = 0
        self._counts = [0] * len(_CHARACTERS)
        self._documents = [0] * len(_CHARACTERS)
        self._first = [""] * len(_CHARACTERS)

    def add(self, document: Document) -> None:
        """Counts the faults of a document."""
        text = document.text
        self._characters += len(text)
        is_ascii = text.isascii()
        for number, (pattern, _, matches_ascii, _) in enumerate(_CHARACTERS):
            match = None if is_ascii and not matches_ascii else pattern.search(text)
            if match is None:
                continue
            if not self._counts[number]:
                at = match.start()
                excerpt = document.text[max(at - 20, 0) : at + 40]
                self._first[number] = example(_place(document, at), excerpt)
            self._documents[number] += 1
            self._counts[number] += sum(1 for _ in pattern.finditer(text))
            if pattern is _MOJIBAKE:  # the same number of characters, so that places stay
                text = _MOJIBAKE.sub(lambda match: "?" * len(match[0]), text)

    def findings(self, scope: str) -> list[Finding]:
        """Returns the findings; `scope` says how much was read."""
        findings = []
        for (_, least, _, rule), count, in_documents, first in zip(
            _CHARACTERS, self._counts, self._documents, self._first, strict=True
        ):
            if count >= least:
                rate = count / self._characters
                findings += rule.check(
                    rate, first, count=count, documents=in_documents, scope=scope
                )
        return findings


def _place(document: Document, position: int) -> str:
    """Returns FILE:LINE; of a record its name and how far in."""
    if document.line:
        return document.place(document.text.count("\n", 0, position))
    return f"{document.name}, character {position}"
