"""Files that are UTF-8 although another encoding is named, of which strange characters come."""

import codecs
from collections.abc import Iterable

from bert_jax.errors import InputError
from bert_jax.text import lines as text_lines

_BLOCK = 1 << 20
# Bytes above 127 that all make UTF-8 characters do so by chance once in thousands, if this many.
_SURELY_UTF8 = 6
_HIGH = bytes(range(128, 256))


def require_not_utf8(paths: Iterable[str], encoding: str) -> None:
    """Refuses files that are UTF-8 where another encoding is named, which garbles them silently."""
    if codecs.lookup(encoding).name in ("utf-8", "utf-8-sig"):
        return
    for path in paths:
        high = _high_of_utf8(path)
        if high >= _SURELY_UTF8:
            raise InputError(
                f"{path}: is UTF-8 ({high:,} bytes beyond ASCII), and corpus.encoding={encoding} "
                "would make strange characters of them; `bert-jax doctor` names all such files: "
                "convert the others to UTF-8, and leave corpus.encoding at utf-8"
            )


def _high_of_utf8(path: str) -> int:
    """Returns how many bytes of a file are above 127; 0 if it is not UTF-8."""
    decoder, high = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with text_lines.open_bytes(path) as file:
            while block := file.read(_BLOCK):
                decoder.decode(block)
                high += 0 if block.isascii() else len(block) - len(block.translate(None, _HIGH))
        decoder.decode(b"", final=True)
    except (UnicodeDecodeError, OSError, *text_lines.DAMAGED):  # what is damaged, reading refuses
        return 0
    return high
