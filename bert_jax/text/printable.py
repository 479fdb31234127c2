"""Corpus text on a terminal."""


def printable(text: str) -> str:
    """Text with control characters shown as escapes: a corpus may hold terminal commands."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
