"""Characters that tell of a text's mishaps: read in the wrong encoding, cut, full of markup."""

import dataclasses
import re

from bert_jax.doctor.finding import Finding, example, severity, share
from bert_jax.text.documents import Document

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


@dataclasses.dataclass(frozen=True)
class _Fault:
    """A pattern, and what to say where it matches.

    Attributes:
      pattern: of the fault.
      found_from: fewer matches may be chance.
      problem_over: matches a character; from there on a problem.
      ascii: whether pure ASCII text can match.
    """

    pattern: re.Pattern[str]
    found_from: int
    problem_over: float
    ascii: bool
    what: str
    effect: str
    remedy: str


_FAULTS = (
    _Fault(
        _MOJIBAKE,
        3,
        _BROKEN,
        False,
        'UTF-8 was once read as Latin-1 or Windows-1252 ("Ã©" for "é")',
        "words with accents and quotation marks become strange pieces, apart from their like",
        "read it as corpus.encoding=utf-8; if it is, the files are damaged: mend or fetch anew",
    ),
    _Fault(
        re.compile("[\x80-\x84\x86-\x9f]"),  # 0x85 is a line end of some systems
        1,
        _BROKEN,
        False,
        "Windows-1252 was once read as Latin-1 (control characters for quotation marks)",
        "the tokenizer drops them: quotation marks, dashes and apostrophes are lost",
        "--set corpus.encoding=windows-1252; if the files are UTF-8, they are damaged",
    ),
    _Fault(
        re.compile("\ufffd"),
        1,
        _BROKEN,
        False,
        "replacement characters (U+FFFD) stand where an earlier conversion failed",
        "the tokenizer drops them: words lose letters",
        "fetch the text anew, and convert it in its own encoding",
    ),
    _Fault(
        re.compile("\ufeff"),
        1,
        1.0,  # dropped without harm: never a problem
        False,
        "byte-order marks stand inside the text",
        "none, the tokenizer drops them; files were joined",
        "if documents were joined with the files, separate them",
    ),
    _Fault(
        re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f]"),
        1,
        _BROKEN,
        True,
        "control characters",
        "the tokenizer drops them, and what they stood between runs together",
        "remove them, e.g. `tr -d '\\000-\\010\\013\\016-\\037\\177'`",
    ),
    _Fault(
        re.compile(r"</?[A-Za-z][^<>\n]{0,80}>|&(?:[a-z]{2,8}|#\d{2,5});"),
        10,
        _MARKED_UP,
        True,
        "markup (tags such as <b> or <unk>, references such as &amp;)",
        "the model learns tags and their letters in place of words",
        "take the text out of its markup before training",
    ),
)


class Characters:
    """Counts the faults of documents as they are read."""

    def __init__(self) -> None:
        self._characters = 0
        self._counts = [0] * len(_FAULTS)
        self._documents = [0] * len(_FAULTS)
        self._first = [""] * len(_FAULTS)

    def add(self, document: Document) -> None:
        """Looks at a document."""
        text = document.text
        self._characters += len(text)
        is_ascii = text.isascii()
        for number, fault in enumerate(_FAULTS):
            if is_ascii and not fault.ascii:
                continue
            match = fault.pattern.search(text)
            if match is None:
                continue
            if not self._counts[number]:
                at = match.start()
                excerpt = document.text[max(at - 20, 0) : at + 40]
                self._first[number] = example(_place(document, at), excerpt)
            self._documents[number] += 1
            self._counts[number] += sum(1 for _ in fault.pattern.finditer(text))
            if fault.pattern is _MOJIBAKE:
                # Its parts may be control characters of the next fault: told once. The same
                # number of characters, so that places stay.
                text = _MOJIBAKE.sub(lambda m: "?" * len(m[0]), text)

    def findings(self, scope: str) -> list[Finding]:
        """What was found; `scope` says how much was read."""
        found = []
        for fault, count, documents, first in zip(
            _FAULTS, self._counts, self._documents, self._first, strict=True
        ):
            if count < fault.found_from:
                continue
            rate = count / self._characters
            found.append(
                Finding(
                    severity(rate, fault.problem_over),
                    f"{fault.what}: {count:,} in {documents:,} documents{scope}, "
                    f"{share(rate)} of all characters",
                    first,
                    fault.effect,
                    fault.remedy,
                )
            )
        return found


def _place(document: Document, position: int) -> str:
    """FILE:LINE; of a record its name and how far in."""
    if document.line:
        return document.place(document.text.count("\n", 0, position))
    return f"{document.name}, character {position}"
