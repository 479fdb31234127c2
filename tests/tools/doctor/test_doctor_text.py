"""Text with one planted fault each; the doctor finds that fault and no other problem."""

import gzip
import json
import pathlib
import random

import pytest

from bert_jax.config import Corpus
from bert_jax.errors import InputError
from bert_jax.tools import doctor
from bert_jax.tools.doctor import characters, finding, text

SAMPLE = pathlib.Path(__file__).parents[3] / "experiments" / "sample_text"


def sentence(rng, words=9):
    made = [
        "".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(2, 8))) for _ in range(words)
    ]
    return " ".join(made).capitalize() + "."


def documents(count=24, sentences=8, seed=0, words=9):
    rng = random.Random(seed)
    return [[sentence(rng, words) for _ in range(sentences)] for _ in range(count)]


def blocks(docs, between="\n\n", within="\n"):
    return between.join(within.join(doc) for doc in docs) + "\n"


def files(folder, texts, encoding="utf-8", suffix=".txt"):
    folder.mkdir(exist_ok=True)
    for number, content in enumerate(texts):
        data = content if isinstance(content, bytes) else content.encode(encoding)
        (folder / f"{number:02}{suffix}").write_bytes(data)
    return folder


def records(folder, texts):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": content}) + "\n" for content in texts]
    (folder / "all.jsonl").write_text("".join(lines))
    return folder


def paragraphs(docs=None):
    return [" ".join(doc) + "\n" + " ".join(doc[::-1]) + "\n" for doc in docs or documents()]


def wrapped(doc, width=60):
    lines, line = [], ""
    for word in " ".join(doc).split():
        if len(line) + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n".join([*lines, line]) + "\n"


# --- faults: each writes its text and says how it is read --------------------------------------


def blank_line_after_every_sentence(folder):
    files(folder, [blocks(documents(), within="\n\n")])
    return {"layout": "sentences_by_line"}


def repeated_documents(folder):
    docs = paragraphs()
    files(folder, docs + docs[:6])


def a_word_without_end(folder):
    """Not prose: base64, DNA, code without blanks."""
    files(folder, [*paragraphs(), "ACGT" * 1_500])


def no_sentence_ends(folder):
    """Words without end; long lines, so that they are not taken for wrapped."""
    files(folder, [p.replace(".", "").lower() for p in paragraphs(documents(sentences=60))])


def some_files_in_windows_1252(folder):
    texts = [content + "He said: \u201cwell\u201d.\n" for content in paragraphs()]
    files(folder, texts)
    (folder / "07.txt").write_bytes(texts[7].encode("windows-1252"))


def utf8_read_as_latin1(folder):
    files(folder, [content + "Café à la crème.\n" for content in paragraphs()])
    return {"encoding": "latin-1"}


def utf16(folder):
    files(folder, paragraphs())
    (folder / "30.txt").write_bytes(paragraphs(documents(1, seed=9))[0].encode("utf-16"))


def truncated_gz(folder):
    files(folder, paragraphs())
    (folder / "30.txt.gz").write_bytes(gzip.compress(paragraphs()[3].encode())[:-20])


def mojibake(folder):
    damaged = "It’s the café’s “crème”.\n".encode().decode("windows-1252", "replace")
    files(folder, [content + damaged.replace("\ufffd", "\x9d") for content in paragraphs()])


def windows_read_as_latin1(folder):
    damaged = "It’s “well”.\n".encode("windows-1252").decode("latin-1")
    files(folder, [content + damaged for content in paragraphs()])


def replacement_characters(folder):
    files(folder, [content + "The caf\ufffd.\n" for content in paragraphs()])


def control_characters(folder):
    files(folder, [content + "\x1b[31mred\x1b[0m.\n" for content in paragraphs()])


def html_pages(folder):
    page = '<html><body class="x">\n{}<p>More &amp; more.</p>\n</body></html>\n'
    files(folder, [page.format(content) for content in paragraphs()])


def a_few_tags(folder):
    files(folder, [content + "An <i>emphasis</i>.\n" for content in paragraphs(documents(24, 80))])


def one_document_of_nearly_all(folder):
    """99 % of the sentences, as one book among short notes."""
    files(folder, [*paragraphs(documents(24, 2)), *paragraphs(documents(1, 5_000, seed=1))])


def one_document_of_most(folder):
    files(folder, [*paragraphs(documents(24, 8)), *paragraphs(documents(1, 300, seed=1))])


def wrapped_with_one_long_line(folder):
    docs = documents(sentences=200)
    files(folder, [wrapped(doc) + "x" * 300 + "\n" for doc in docs])


def two_documents(folder):
    files(folder, ["".join(paragraphs()[:12]), "".join(paragraphs()[12:])])


def a_broken_record(folder):
    records(folder, paragraphs())
    with (folder / "all.jsonl").open("a") as file:
        file.write('{"text": "cut\n')


def one_sentence_a_line(folder):
    files(folder, [blocks(documents(sentences=6, seed=n)) for n in range(20)])


def paragraphs_a_line(folder):
    files(folder, [blocks([[" ".join(doc[:4]), " ".join(doc[4:])] for doc in documents()])])
    return {"layout": "sentences_by_line"}


def a_few_repeats(folder):
    docs = paragraphs()
    files(folder, [*docs, docs[0]])


def a_file_of_another_kind(folder):
    files(folder, paragraphs())
    (folder / "more.md").write_text("One sentence. Another one.\n")


FAULTY = {name: rule for name, (*_, rule) in characters.FAULTS.items()}
PROBLEMS = [
    (blank_line_after_every_sentence, finding.ONE_SENTENCE, "00.txt:1:"),
    (repeated_documents, finding.REPEATED, "24.txt:1:"),
    (a_word_without_end, finding.LONG_SENTENCES, "24.txt:1"),
    (no_sentence_ends, finding.LONG_SENTENCES, ".txt:"),
    (some_files_in_windows_1252, text.REFUSED, "07.txt: byte "),
    (utf8_read_as_latin1, text.REFUSED, "00.txt: is UTF-8"),
    (utf16, text.REFUSED, "30.txt: byte 0"),
    (truncated_gz, text.REFUSED, "30.txt.gz"),
    (mojibake, FAULTY["mojibake"], "00.txt:3"),
    (windows_read_as_latin1, FAULTY["windows"], "00.txt:3"),
    (replacement_characters, FAULTY["replaced"], "00.txt:3"),
    (control_characters, FAULTY["controls"], "00.txt:3"),
    (html_pages, FAULTY["html"], "00.txt:1: "),
    (one_document_of_nearly_all, finding.DOMINANT, "24.txt:1"),
    (wrapped_with_one_long_line, text.LAYOUTS["wrapped"], "00.txt:1"),
    (two_documents, text.TOO_FEW, ".txt:1"),
    (a_broken_record, text.REFUSED, "all.jsonl:25: not JSON"),
]
# What may be meant that way.
NOTES = [
    (one_sentence_a_line, text.LAYOUTS["sentences_by_line"], "00.txt:1"),
    (paragraphs_a_line, text.LAYOUTS["paragraphs_by_line"], "00.txt:1"),
    (a_few_repeats, finding.REPEATED, "24.txt:1:"),
    (a_few_tags, FAULTY["html"], "00.txt:3"),
    (one_document_of_most, finding.DOMINANT, "24.txt:1"),
    (a_file_of_another_kind, text.LEFT_OUT, ""),
]


def examine(folder, **settings):
    """What the doctor says of a folder read with these settings of the corpus."""
    word = "jsonl" if (folder / "all.jsonl").exists() else "text"
    return text.examine(Corpus(sources=(f"{word}:{folder}",), **settings))


def problems(found):
    return [finding for finding in found if finding.severity == "problem"]


@pytest.mark.parametrize(
    ("plant", "rule", "where"), PROBLEMS + NOTES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_fault_is_the_one_found(plant, rule, where, tmp_path):
    settings = plant(tmp_path / "text") or {}
    found = examine(tmp_path / "text", **settings)
    if (plant, rule, where) in PROBLEMS:
        found = problems(found)
    else:
        assert not problems(found)
    assert [one.rule for one in found] == [rule], found
    assert where in found[0].example
    assert found[0].effect and found[0].remedy


def test_healthy_text_has_no_finding_in_any_layout(tmp_path):
    docs = documents(sentences=60)
    for layout, texts in {
        "sentences_by_line": [blocks(docs)],
        "wrapped": [wrapped(doc) for doc in docs],
        "paragraphs_by_line": paragraphs(docs),
    }.items():
        folder = files(tmp_path / layout, texts)
        assert examine(folder, layout=layout) == []
        if layout != "sentences_by_line":
            assert examine(folder) == []
    assert examine(records(tmp_path / "records", paragraphs(docs))) == []


def test_the_shipped_sample_has_no_finding():
    assert doctor.examine(str(SAMPLE)) == []
    assert doctor.examine("experiments/tiny.py") == []


@pytest.mark.parametrize("named", ["utf-8-sig", "utf-16", "utf-16-le", "shift_jis", "gbk"])
def test_text_in_the_encoding_that_is_named_has_no_finding(named, tmp_path):
    content = [one + "日本の文章、中国的文字。\n" for one in paragraphs(documents(sentences=60))]
    files(tmp_path / "text", content, named)
    assert examine(tmp_path / "text", encoding=named) == []


def test_mathematics_and_words_in_angle_brackets_are_no_html(tmp_path):
    lines = "If a<b and b>c, <unk> is <s> </s>, AT&T; x <- y & z <p, q> <Alice> &c. <a@b.org>\n"
    files(tmp_path / "text", [content + 9 * lines for content in paragraphs()])
    assert FAULTY["html"] not in [f.rule for f in examine(tmp_path / "text")]


def test_all_refused_files_are_counted_by_their_reasons(tmp_path):
    folder = files(tmp_path / "text", paragraphs())
    bad = {
        "cut": (gzip.compress(paragraphs()[3].encode())[:-20], ".txt.gz", 12),
        "latin": ("é 1\n".encode("latin-1"), ".txt", 3),
    }
    for name, (content, ending, count) in bad.items():
        for number in range(count):
            padding = b"x" * number if ending == ".txt" else b""  # the bad byte is elsewhere
            (folder / f"{name}{number}{ending}").write_bytes(padding + content)
    found = [one for one in examine(folder) if one.rule is text.REFUSED]
    assert len(found) == len(bad)
    for one, (name, (_, _, count)) in zip(found, bad.items(), strict=True):
        assert f"{count} file" in one.message and f"{name}0" in one.example
        named = min(count, 9)
        assert sum(f"{name}{number}." in one.example for number in range(count)) == named
        assert (f"{count - named} more" in one.example) == (count > named)


def test_rare_reasons_are_counted_together(tmp_path):
    folder = tmp_path / "text"
    files(folder, paragraphs(), suffix=".jsonl")
    for number in range(9):  # each lacks the field in its own way
        (folder / f"{number:02}.jsonl").write_text(json.dumps({"text": [], "x" * number: 1}))
    for number, line in enumerate(("3", "[]", "null", "true", '"x"', "{}", '{"text": {}}')):
        (folder / f"{number + 10}.jsonl").write_text(line)
    found = text.examine(Corpus(sources=(f"jsonl:{folder}",)))
    counts = [int(one.message.split()[2]) for one in found if one.rule is text.REFUSED]
    assert sum(counts) == 24 and len(counts) <= 6


def test_typography_of_other_languages_is_no_mojibake(tmp_path):
    """Guillemets behind no-break spaces, capitals before them, and letters that mojibake uses."""
    lines = (
        "« Liberté\u00a0», dit-il\u00a0; «\u00a0ÉGALITÉ»\u00a0! Voilà «\u00a0l’été\u00a0».",
        "NÃO À GUERRA: AMANHÃ, MAÇÃ. Ângela, Áurea e João têm pão.",
        "Ðað er gott. Ñandú y ñoño. Πρώτη Ελλάδα. Это хорошо.",
        "北京是中国的首都。日本語の文章です。🙂 👍🏽",
    )
    files(tmp_path / "text", [p + "\n".join(lines) + "\n" for p in paragraphs()])
    assert FAULTY["mojibake"] not in [f.rule for f in examine(tmp_path / "text")]


def test_the_place_of_a_fault_is_its_line(tmp_path):
    """Blank lines before the text count, as do documents before it in its file."""
    docs = documents()
    docs[5][3] += " Caf\ufffd."
    files(tmp_path / "text", ["\n\n" + blocks(docs)])
    (found,) = examine(tmp_path / "text", layout="sentences_by_line")
    line = (tmp_path / "text" / "00.txt").read_text().split("\n").index(docs[5][3]) + 1
    assert found.example.startswith(f"{tmp_path}/text/00.txt:{line}: ")
    content = paragraphs()
    content[2] += "Caf\ufffd.\n"
    files(tmp_path / "more", ["\n \n" + one for one in content])
    (found,) = examine(tmp_path / "more")
    assert found.example.startswith(f"{tmp_path}/more/02.txt:5: ")


def test_an_example_is_short_and_on_one_line(tmp_path):
    a_word_without_end(tmp_path / "text")
    (found,) = problems(examine(tmp_path / "text"))
    place, _, excerpt = found.example.partition(': "')
    assert place == f"{tmp_path}/text/24.txt:1"
    assert len(excerpt) <= 71 and excerpt.endswith('..."')


def test_hostile_text_is_shown_escaped(tmp_path):
    files(tmp_path / "text", [content + "\x1b]0;pwned\x07 ok.\n" for content in paragraphs()])
    (found,) = examine(tmp_path / "text")
    assert "\\x1b]0;pwned\\x07" in found.example
    assert found.example.isprintable()


def test_of_much_text_a_sample_is_read_and_named(tmp_path, monkeypatch):
    control_characters(tmp_path / "text")
    size = sum(path.stat().st_size for path in (tmp_path / "text").iterdir())
    monkeypatch.setattr(text, "_MAX_CHARACTERS", size // 2)
    read = []
    add = characters.Characters.add
    monkeypatch.setattr(
        characters.Characters, "add", lambda self, one: (read.append(one.name), add(self, one))
    )
    (found,) = problems(examine(tmp_path / "text"))
    assert 10 <= len(read) <= 14
    assert found.rule is FAULTY["controls"]
    assert f"in {len(read)} documents (in a sample" in found.message


def test_what_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "thesis.pdf").write_bytes(b"%PDF")
    for path in (tmp_path, tmp_path / "thesis.pdf", tmp_path / "nowhere"):
        with pytest.raises(InputError, match="nothing to examine"):
            doctor.examine(str(path))
    with pytest.raises(InputError, match=r"--set seed=1: .* is no experiment"):
        doctor.examine(str(files(tmp_path / "text", paragraphs())), ["seed=1"])


def test_one_file_of_text_is_examined_whatever_its_name(tmp_path):
    path = tmp_path / "a[1].txt"
    path.write_text(blocks(documents()))
    (found,) = problems(doctor.examine(str(path)))
    assert found.rule is text.TOO_FEW and "a[1].txt:1" in found.example
