"""A text on which a Rust library panics: an error of that text alone, in every command."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import broken
import hf_folder
import pytest
import samples
import sentencex
import tokenizers
from etils import epath
from test_serve import ask, exchange, is_error, post, running, until

from bert_jax.embeddings import embed
from bert_jax.errors import InputError
from bert_jax.pretraining.loaded import Loaded
from bert_jax.serve import served, service
from bert_jax.text import sentences
from bert_jax.text.documents import Document

# Oniguruma gives up on this text for this pattern, and the library panics.
PATTERN, TEXT = "(a+)+$|(a|aa)+b", "a" * 40 + "c"
TOKENIZER = "base/tokenizer/tokenizer.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base whose tokenizer panics on TEXT, and files with TEXT in their third line."""
    place = tmp_path_factory.mktemp("panics")
    hf = hf_folder.write(place / "hf")
    pieces = {piece: number for number, piece in enumerate(hf_folder.VOCAB)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
    cutters = tokenizers.pre_tokenizers
    made.pre_tokenizer = cutters.Sequence(
        [cutters.Split(tokenizers.Regex(PATTERN), "isolated"), cutters.WhitespaceSplit()]
    )
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(hf_folder.VOCAB[:5])
    made.save(str(hf / "tokenizer.json"))
    names = ("pad", "unk", "cls", "sep", "mask")
    naming = {f"{name}_token": f"[{name.upper()}]" for name in names}
    naming["tokenizer_class"] = "PreTrainedTokenizerFast"
    (hf / "tokenizer_config.json").write_text(json.dumps(naming))
    (place / "bad.txt").write_text(f"w7 w8\nw9\n{TEXT}\nw10\n")
    (place / "good.txt").write_text("w7 w8\nw9\n")
    rows = [f"w{n} w8 {'' if n != 9 else TEXT}\t{'ab'[n % 2]}" for n in range(7, 15)]
    (place / "rows.tsv").write_text("\n".join(rows) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert broken.call("import hf --workdir base")[0] == 0
    return place


@pytest.mark.parametrize(
    ("command", "where", "stdin"),
    [
        ("embed bad.txt --workdir base --out v.npz", "bad.txt:3", ""),
        ("embed --workdir base --out v.npz", "standard input:1", TEXT),
        ("tokenize --tokenizer base/tokenizer", "standard input:2", f"w7\n{TEXT}\n"),
        ("search bad.txt w7 --workdir base", "bad.txt:3", ""),
        (f"search good.txt {TEXT} --workdir base", TEXT[:20], ""),
        (f"predict --workdir base {TEXT}[MASK]", "TEXT", ""),
        ("finetune --from base --kind classify --workdir t --train tsv:rows.tsv "
         "--validation tsv:rows.tsv --set task.header=none --set task.text_column=0 "
         "--set task.label_column=1", "rows.tsv:3", ""),
        ("prepare tiny --set corpus.sources=text:bad.txt "
         "--set corpus.tokenizer=base/tokenizer --set model.vocab_size=1000 "
         "--set run.corpus_dir=corpus", "bad.txt", ""),
    ],
)  # fmt: skip
def test_a_command_names_the_text_and_the_tokenizer(folder, monkeypatch, command, where, stdin):
    monkeypatch.chdir(folder)
    broken.fails(command, where, TEXT[:20], stdin=stdin.encode())


def test_a_request_is_answered_500_and_those_after_it_are_answered(folder, monkeypatch):
    monkeypatch.chdir(folder)
    trained = Loaded.of(epath.Path("base"))
    embedder = embed.Embedder(trained, embed.Features(), samples.mesh_of(1))
    with running(served.EmbedEndpoint("base", embedder)) as port:
        error = is_error(ask(port, {"input": ["w7", TEXT]}), 500)
        assert TOKENIZER in error["message"] and TEXT[:20] in error["message"]
        assert ask(port, {"input": ["w7", "w8"]})[0] == 200
        assert ask(port, b"", "/health", "GET")[0] == 200


def test_a_sentence_splitter_that_panics_is_an_input_error(monkeypatch):
    monkeypatch.setattr(sentencex, "segment", panic)
    with pytest.raises(InputError, match=r"x\.txt.*wa wb"):
        sentences.split(Document("x.txt", ("wa wb",), "per_file", 0), "en")


class Panic(BaseException):
    """Not an Exception, as pyo3's PanicException."""


def panic(*_):
    raise Panic("called `Option::unwrap()` on a `None` value")


class Model:
    """Answers each text with its length, as long as it works."""

    path, name, about = "/v1/embeddings", "model", ""

    def __init__(self):
        self.works = threading.Event()
        self.works.set()
        self.slow = threading.Event()

    def warm(self):
        if not self.works.is_set():
            panic()

    def items(self, body, limits):
        return [(text, 1) for text in body["input"]]

    def compute(self, items):
        while self.slow.is_set():
            time.sleep(0.01)
        if "bad" in items:
            panic()
        self.warm()
        return [len(text) for text in items]

    def answer(self, body, results):
        yield json.dumps(results)


def test_a_panic_while_computing_is_an_error_of_its_request_alone():
    with running(Model()) as port:
        is_error(ask(port, {"input": ["abc", "bad"]}), 500)
        is_error(ask(port, {"input": ["bad"]}), 500)
        assert ask(port, {"input": ["abc"]})[::2] == (200, [3])


def test_a_service_that_can_compute_nothing_any_more_ends():
    model = Model()
    model.works.clear()
    service_ = service.Service(model, served.Limits())
    with service.listening("127.0.0.1", 0) as bound, ThreadPoolExecutor(1) as clients:
        bound.listen()
        clients.submit(exchange, bound.getsockname()[1], post({"input": ["abc"]}))
        with pytest.raises(SystemExit, match="Panic"):
            service.server_of(service_, 1.0).run(sockets=[bound])


def test_health_is_503_while_no_request_is_answered_in_time():
    model = Model()
    model.slow.set()
    with running(model, served.Limits(seconds=1)) as port:
        try:
            assert ask(port, b"", "/health", "GET")[0] == 200
            assert ask(port, {"input": ["abc"]})[0] == 503
            assert ask(port, b"", "/health", "GET")[0] == 503
        finally:
            model.slow.clear()
        until(lambda: ask(port, b"", "/health", "GET")[0] == 200)


def test_models_are_listed_as_openai_lists_them_and_a_last_slash_is_ignored():
    """https://platform.openai.com/docs/api-reference/models/list."""
    with running(Model()) as port:
        for path in ("/v1/models", "/v1/models/"):
            status, _, listed = ask(port, b"", path, "GET")
            (model,) = listed.pop("data")
            assert (status, listed) == (200, {"object": "list"})
            assert (model["id"], model["object"]) == ("model", "model")
            assert isinstance(model["created"], int) and isinstance(model["owned_by"], str)
        assert ask(port, {"input": ["abc"]}, "/v1/embeddings/")[::2] == (200, [3])
        assert ask(port, b"", "/health/", "GET")[0] == 200
