"""Finds characters that betray a wrong encoding, and leftovers of markup."""

import collections
import re

from bert_jax.text.documents import Document
from bert_jax.tools.doctor.finding import Finding, FindingRule, example

# Continuation bytes of UTF-8 characters, 0x80 to 0xbf, read as Latin-1 or Windows-1252.
_CONTINUES = "".join(map(chr, range(0x80, 0xC0))) + bytes(range(0x80, 0xC0)).decode(
    "windows-1252", "ignore"
)
# Correct text never matches: in French, a no-break space and a guillemet may follow an É or é, so
# characters whose first byte is a common letter match only if two of them follow one another.
_MOJIBAKE = re.compile(
    f"[ÂÃ][{_CONTINUES}]|â[€\x80][{_CONTINUES}]|ð[Ÿ\x9f][{_CONTINUES}]"
    f"|(?:[ÎÏÐÑ][{_CONTINUES}]){{2,}}|(?:[ä-é][{_CONTINUES}]{{2}}){{2,}}"
)
# Only names of HTML tags, since <s> and <unk> are words of some corpora.
_TAG = (
    "a|abbr|article|b|blockquote|body|br|button|center|cite|code|dd|div|dl|dt|em|figure|font|"
    "footer|form|h[1-6]|head|header|hr|html|i|iframe|img|input|label|li|link|meta|nav|ol|option|p|"
    "pre|script|section|select|small|span|strong|style|sub|sup|svg|table|tbody|td|th|thead|title|"
    "tr|u|ul"
)
_HTML = re.compile(
    rf"(?i)</?(?:{_TAG})(?:\s+[\w:-]+\s*=[^<>]{{0,1000}})?\s*/?>|<!--|<!doctype\s"
    r"|&(?:amp|nbsp|lt|gt|quot|apos|#\d{1,7}|#x[0-9a-f]{1,6});"
)
# One tag in 1,000 characters is one in 200 words.
_TAG_RATE = 1e-3
# One broken character in 10,000 is one word in 2,000: often enough to enter a vocabulary.
_BROKEN_RATE = 1e-4
_COUNTED = ": {count:,} in {documents:,} documents{scope}, {value} of all characters"

# {fault: (pattern, least matches (fewer may be chance), whether pure ASCII can match, rule for the
# matches per character)}. Matches of "mojibake" do not count for the other faults.
FAULTS = {
    "mojibake": (_MOJIBAKE, 3, False, FindingRule(
        'UTF-8 was once read as Latin-1 or Windows-1252 ("Ã©" for "é")' + _COUNTED, 0, _BROKEN_RATE,
        "words with accents and quotation marks become odd tokens, unrelated to the correct words",
        "read it with corpus.encoding=utf-8; if this is set, the files are damaged: repair or "
        "fetch them again",
    )),
    # 0x85 is a line end on some systems.
    "windows": (re.compile("[\x80-\x84\x86-\x9f]"), 1, False, FindingRule(
        "Windows-1252 was once read as Latin-1 (control characters for quotation marks)" + _COUNTED,
        0, _BROKEN_RATE,
        "the tokenizer drops them: quotation marks, dashes and apostrophes are lost",
        "--set corpus.encoding=windows-1252; if the files are UTF-8, they are damaged",
    )),
    "replaced": (re.compile("\ufffd"), 1, False, FindingRule(
        "replacement characters (U+FFFD) stand where an earlier conversion failed" + _COUNTED,
        0, _BROKEN_RATE,
        "the tokenizer drops them: words lose letters",
        "fetch the text again, and convert it in its own encoding",
    )),
    "controls": (re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f]"), 1, True, FindingRule(
        "control characters" + _COUNTED, 0, _BROKEN_RATE,
        "the tokenizer drops them, and joins the text on both sides",
        "remove them, e.g. `tr -d '\\000-\\010\\013\\016-\\037\\177'`",
    )),
    "html": (_HTML, 10, True, FindingRule(
        "HTML tags or entities" + _COUNTED, 0, _TAG_RATE,
        "the model learns to predict markup, and names of tags and attributes fill the vocabulary",
        "convert the files to plain text, e.g. `pandoc --from html --to plain`",
    )),
}  # fmt: skip


class Characters:
    """Counts the faults of documents as they are read."""

    def __init__(self) -> None:
        self._characters = 0
        self._counts, self._documents = collections.Counter[str](), collections.Counter[str]()
        self._first: dict[str, str] = {}

    def add(self, document: Document) -> None:
        """Counts the faults of a document."""
        text = document.text
        self._characters += len(text)
        is_ascii = text.isascii()
        for name, (pattern, _, matches_ascii, _) in FAULTS.items():
            match = None if is_ascii and not matches_ascii else pattern.search(text)
            if match is None:
                continue
            if name not in self._first:
                start = match.start()
                excerpt = document.text[max(start - 20, 0) : start + 40]
                self._first[name] = example(_location(document, start), excerpt)
            self._documents[name] += 1
            self._counts[name] += sum(1 for _ in pattern.finditer(text))
            if pattern is _MOJIBAKE:  # same number of characters, so that positions stay valid
                text = _MOJIBAKE.sub(lambda match: "?" * len(match[0]), text)

    def findings(self, scope: str) -> list[Finding]:
        """Returns the findings; `scope` describes the part that was read."""
        findings = []
        for name, (_, least, _, rule) in FAULTS.items():
            count = self._counts[name]
            if count >= least:
                counts = {"count": count, "documents": self._documents[name]}
                rate = count / self._characters
                findings += rule.check(rate, self._first[name], **counts, scope=scope)
        return findings


def _location(document: Document, position: int) -> str:
    """Returns FILE:LINE; for a record of JSON or a table its name, and the position in it."""
    if document.line:
        return document.location(document.text.count("\n", 0, position))
    return f"{document.name}, character {position}"
