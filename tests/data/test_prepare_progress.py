"""How far the parts of a corpus are read, as they report it."""

import contextlib
import gzip
import lzma

import numpy as np
import pytest
from etils import epath

from bert_jax.config import Corpus
from bert_jax.data import build, corpus, parts

# About 8 MB: more than is held of a file, and a sixteenth of it when it is packed.
rng = np.random.default_rng(0)
LINES = [" ".join(map(str, row)) for row in rng.integers(10**7, size=(256, 4))]
TEXT = "".join(f"{LINES[i]}\n\n" for i in rng.integers(len(LINES), size=250_000))


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_of_a_compressed_file_the_share_of_its_bytes_is_reported(tmp_path, suffix):
    """Not its characters, of which nobody knows how many there are."""
    data = TEXT.encode()
    packed = gzip.compress(data, 1) if suffix == "gz" else lzma.compress(data, preset=0)
    (tmp_path / f"a.txt.{suffix}").write_bytes(packed)
    settings = Corpus(sources=(f"text:{tmp_path}",))
    (part,) = parts.plan(settings)
    assert part.bytes < len(TEXT) / 2
    done = read = 0

    def tick(more):
        nonlocal done
        done += more

    for document in part.documents(settings, tick):
        for piece in document.chunks:
            # Of the last pieces all is read before they are taken.
            assert abs(done / part.bytes - read / len(TEXT)) < 0.25
            read += len(piece)
    assert done == part.bytes


def test_of_a_plain_file_characters_are_reported(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    settings = Corpus(sources=(f"text:{tmp_path}",))
    (part,) = parts.plan(settings)
    ticks = []
    read = sum(len(p) for d in part.documents(settings, ticks.append) for p in d.chunks)
    # A piece is reported once the next is asked for.
    assert read == sum(ticks) == pytest.approx(part.bytes, rel=0.01)


@pytest.mark.parametrize("kind", ["wordpiece", pytest.param("unigram", marks=pytest.mark.long)])
def test_every_stage_reports_all_of_each_part(tmp_path, monkeypatch, kind):
    shares = {}

    class Recorder:
        def __init__(self, what, say):
            self.what, self.part = what, 0

        def track(self, total, left):
            return contextlib.nullcontext()

        def tick(self, size):
            self.part += size

        def end(self, size):
            shares.setdefault(self.what, []).append(self.part / size)
            self.part = 0

    monkeypatch.setattr(build, "StageProgress", Recorder)
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text("".join(LINES[number::20]))
    settings = Corpus(sources=(f"text:{tmp_path}/text",), tokenizer_kind=kind, validation_share=0.4)
    corpus.prepare(settings, 40, epath.Path(tmp_path / "c"), lambda line: None)
    assert len(shares) >= 2
    for what, reported in shares.items():
        assert reported == pytest.approx([1.0] * len(reported), rel=0.01), what
