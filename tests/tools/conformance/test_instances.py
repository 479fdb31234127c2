"""Instances of any text are the reference's: against its own, and a plain implementation."""

import gzip
import json
import pathlib
import random

import broken
import plain
import pytest
from hypothesis import strategies as st

from bert_jax.errors import InputError
from bert_jax.tools.conformance import golden, instances

SAMPLE = (golden.FOLDER / "sample_text.txt").read_bytes()


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(golden.vocabulary()) + "\n")
    return path


def written(folder, texts, vocab, **changes):
    """(settings, instances) as `write` leaves them on disk."""
    out = folder / "out.jsonl"
    asked = instances.InstanceSettings(**{"dupe_factor": 2, **changes})
    count = instances.write(texts, vocab, asked, out)
    head, *lines = map(json.loads, out.read_text().splitlines())
    assert head["instances"] == len(lines) == count
    return head, lines


def plain_documents(texts, vocab_ids, case):
    """How the description says files are read, in few words."""
    documents = [[]]
    for text in texts:
        for raw in text.split(b"\n"):
            line = raw.decode("utf-8", "ignore").strip()
            if not line:
                documents.append([])
            documents[-1].append(plain.tokenize(line, vocab_ids, case))
        # What follows the last line end is no line.
        if text.endswith(b"\n") or not text:
            documents.pop()
    documents = [[pieces for pieces in document if pieces] for document in documents]
    return [document for document in documents if document]


def plain_instances(texts, pieces, head):
    ids = {piece: i for i, piece in enumerate(pieces)}
    fields = plain.Settings.__dataclass_fields__
    asked = plain.Settings(**{name: value for name, value in head.items() if name in fields})
    rng = random.Random(head["random_seed"])
    documents = plain_documents(texts, ids, "uncased" if head["do_lower_case"] else "cased")
    return [
        {
            "input_ids": [ids[piece] for piece in instance.pieces],
            "segment_ids": instance.segment_ids,
            "masked_lm_positions": instance.positions,
            "masked_lm_ids": [ids[piece] for piece in instance.labels],
            "next_sentence_label": int(instance.is_random_next),
        }
        for instance in plain.instances(documents, ids, asked, rng)
    ]


def assert_plain(folder, texts, vocab, **changes):
    paths = [folder / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    head, found = written(folder, paths, vocab, **changes)
    assert found == plain_instances(texts, vocab.read_text().split("\n")[:-1], head)
    return found


@pytest.mark.parametrize("name", golden.INSTANCES)
def test_instances_equal_the_references_byte_for_byte(name, tmp_path, vocab):
    """So are those of the plain implementation, with which those of odd text are compared."""
    asked, _ = golden.instances(name)
    del asked["instances"]
    assert_plain(tmp_path, [SAMPLE], vocab, **asked)
    expected = gzip.decompress((golden.FOLDER / name).read_bytes())
    assert (tmp_path / "out.jsonl").read_bytes() == expected


@pytest.mark.parametrize(("case", "name"), [("uncased", "lower_tokens"), ("cased", "cased_tokens")])
def test_tokens_of_the_plain_implementation_are_the_references(case, name):
    vocab = {piece: i for i, piece in enumerate(golden.vocabulary())}
    rows = golden.tokens()
    assert rows and not [r for r in rows if plain.tokenize(r["text"], vocab, case) != r[name]]


ODD = {
    "empty": [b""],
    "nothing but blank lines": [b"\n \n\t\n"],
    "nothing that is a token": [b"\0\x01\xef\xbb\xbf\n\xff\xfe\n"],
    "one document": [SAMPLE.replace(b"\n\n", b"\n")],
    "one sentence": [b"Nothing else was said."],
    "two documents of a word": [b"a\n\nb\n"],
    "CRLF": [SAMPLE.replace(b"\n", b"\r\n")],
    "CR within lines": [SAMPLE.replace(b", ", b",\r")],
    "a lone CR within a word, at an end and alone": [
        SAMPLE.replace(b"the", b"t\rhe").replace(b".\n", b".\r\r\n").replace(b"\n\n", b"\n\r\n"),
    ],
    "a mark in front": [b"\xef\xbb\xbf" + SAMPLE],
    "a mark alone opens no document": [SAMPLE.replace(b"\n\n", b"\n\xef\xbb\xbf\n")],
    "bytes that are no UTF-8": [SAMPLE.replace(b"e", b"e\xe9").replace(b"a ", b"a\xc3 ")],
    "half a character at the end": [SAMPLE + b"last \xe4\xb8"],
    "lines of control characters": [SAMPLE.replace(b"\n\n", b"\n\x00\n\n\x1f\n\x85\n")],
    "blank lines of other blanks": [SAMPLE.replace(b"\n\n", "\n\u2003\n\u2028\n\xa0\n".encode())],
    "separators within lines": [SAMPLE.replace(b", ", "\u2028\x0b\x0c\x1c\x85".encode())],
    "unknown characters": [SAMPLE.replace(b"the", "\u2654 \U0001f600\u0b95".encode())],
    "very long words": [SAMPLE.replace(b"the", b"x" * 200).replace(b"and", b"y" * 201)],
    "specials as text": [SAMPLE.replace(b"the", b"[SEP] [MASK] ##s [UNK]")],
    "accents and ideographs": [
        SAMPLE.replace(b"the", "\u00c9\u0130\u03a3 \u4e2d\u6587a\u0301".encode())
    ],
    "a very long line": [SAMPLE, b"so it went on and on " * 2000 + b"\n\n" + SAMPLE],
    "a word alone, then a long sentence": [(b"so\n" + b"it went on and " * 50 + b"\n\n") * 9],
    "no document ends with a file": [SAMPLE[:2000], SAMPLE[2000:].rstrip(), b"\n\n", SAMPLE],
}


@pytest.mark.parametrize("as_the_later_models", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_odd_text_gives_what_the_plain_implementation_gives(
    name, as_the_later_models, tmp_path, vocab
):
    asked = {"whole_word_mask": as_the_later_models, "do_lower_case": not as_the_later_models}
    found = assert_plain(tmp_path, ODD[name], vocab, **asked)
    assert bool(found) == (not name.startswith(("empty", "nothing")))


lines = st.one_of(
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.binary(max_size=20),
    st.sampled_from([b"", b" ", b"\r", b"\x1f", b"the cat sat on the mat .", b"unaffable" * 9]),
    st.sampled_from(SAMPLE.split(b"\n")),
)
files = st.lists(lines, max_size=25).map(b"\n".join)


def test_the_command_writes_what_the_library_does(tmp_path, vocab):
    text = golden.FOLDER / "sample_text.txt"
    head, found = written(
        tmp_path, [text, text], vocab, whole_word_mask=True, do_lower_case=False, random_seed=7
    )
    assert head["do_lower_case"] is False
    command = ["conformance-instances", str(text), str(text), "--vocab", str(vocab)]
    command += ["--dupe-factor", "2", "--whole-word", "--cased", "--random-seed", "7"]
    command += ["--max-seq-length", "128", "--max-predictions", "20"]
    broken.said([*command, "--out", str(tmp_path / "command.jsonl")])
    assert (tmp_path / "command.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert found


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing.txt"], "missing.txt"),
        (["text.txt", "--vocab", "missing"], "missing: cannot be read"),
        (["text.txt", "--max-seq-length", "4"], "max_seq_length"),
        (["text.txt", "--dupe-factor", "0"], "dupe_factor"),
        (["text.txt", "--masked-lm-prob", "1.5"], "masked_lm_prob"),
        (["text.txt", "--short-seq-prob", "nan"], "short_seq_prob"),
        (["text.txt", "--out", "text.txt"], "is a file of the input"),
        (["text.txt", "--out", "."], "a file in a folder"),
        (["text.txt", "--out", "no/such/out.jsonl"], "a file in a folder"),
        ([".", "text.txt"], "directory"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(arguments, complaint, tmp_path, vocab, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.txt").write_bytes(SAMPLE)
    command = ["conformance-instances", "--vocab", str(vocab), "--out", "out.jsonl"]
    broken.fails([*command, *arguments], complaint)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    assert pathlib.Path("text.txt").read_bytes() == SAMPLE


def test_what_fails_half_way_leaves_the_old_file(tmp_path, vocab, monkeypatch):
    text, out = golden.FOLDER / "sample_text.txt", tmp_path / "out.jsonl"
    out.write_text("old")

    def fails(documents, ids, settings):
        yield "{}"
        raise InputError("half way")

    monkeypatch.setattr(instances, "create", fails)
    with pytest.raises(InputError, match="half way"):
        instances.write([text], vocab, instances.InstanceSettings(), out)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert out.read_text() == "old"
