"""Counting what repeats, in bounded memory."""

import dataclasses
import hashlib

# Different texts held at once: some 100 MB.
_HELD = 300_000


@dataclasses.dataclass
class Entry:
    """A text seen: how often, in how many documents, how long it is, where first."""

    count: int
    documents: int
    last_document: int
    length: int
    place: str
    excerpt: str


class Repeats:
    """Counts texts by their hashes.

    Once too many differ, it keeps those whose hash is even, then a multiple of four, and so on:
    a fair sample of the different texts, each with its true count.
    """

    def __init__(self) -> None:
        self._mask = 0
        self._entries: dict[int, Entry] = {}

    @property
    def sampled(self) -> int:
        """One in how many different texts is counted."""
        return self._mask + 1

    def add(self, text: str, document: int, place: str) -> bool:
        """Counts a text; whether it is known to have stood before."""
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        if key & self._mask:
            return False
        entry = self._entries.get(key)
        if entry is not None:
            entry.count += 1
            entry.documents += entry.last_document != document
            entry.last_document = document
            return True
        self._entries[key] = Entry(1, 1, document, len(text), place, text[:200])
        if len(self._entries) > _HELD:
            self._mask = 2 * self._mask + 1
            self._entries = {k: e for k, e in self._entries.items() if not k & self._mask}
        return False

    def total(self) -> tuple[int, int, int, int]:
        """(texts, repeats, characters, characters of repeats) of those that are counted."""
        entries = self._entries.values()
        return (
            sum(e.count for e in entries),
            sum(e.count - 1 for e in entries),
            sum(e.count * e.length for e in entries),
            sum((e.count - 1) * e.length for e in entries),
        )

    def commonest(self) -> Entry:
        """The text whose repeats hold the most characters; the most documents in a tie."""
        return max(self._entries.values(), key=lambda e: ((e.count - 1) * e.length, e.documents))
