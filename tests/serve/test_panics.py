"""A text on which a Rust library panics fails alone, with an error that names it."""

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
from test_serve import ask, exchange, is_error, post, running, until

from bert_jax.embeddings import embed
from bert_jax.errors import InputError
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.serve import endpoints, service
from bert_jax.storage.mirror import open_workdir
from bert_jax.text import sentence_splitter
from bert_jax.text.documents import Document

# The regex engine (Oniguruma) exceeds its limit on this text, and the library panics.
PATTERN, TEXT = "(a+)+$|(a|aa)+b", "a" * 40 + "c"
TOKENIZER = "base/tokenizer/tokenizer.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base whose tokenizer panics on TEXT, and files with TEXT in their third line."""
    workdir = tmp_path_factory.mktemp("panics")
    hf = hf_folder.write(workdir / "hf")
    vocab = {token: number for number, token in enumerate(hf_folder.VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    steps = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = steps.Sequence(
        [steps.Split(tokenizers.Regex(PATTERN), "isolated"), steps.WhitespaceSplit()]
    )
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(hf_folder.VOCAB[:5])
    tokenizer.save(str(hf / "tokenizer.json"))
    roles = ("pad", "unk", "cls", "sep", "mask")
    config = {f"{role}_token": f"[{role.upper()}]" for role in roles}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (hf / "tokenizer_config.json").write_text(json.dumps(config))
    (workdir / "bad.txt").write_text(f"w7 w8\nw9\n{TEXT}\nw10\n")
    (workdir / "good.txt").write_text("w7 w8\nw9\n")
    rows = [f"w{n} w8 {'' if n != 9 else TEXT}\t{'ab'[n % 2]}" for n in range(7, 15)]
    (workdir / "rows.tsv").write_text("\n".join(rows) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workdir)
        assert broken.call("import hf --workdir base")[0] == 0
    return workdir


@pytest.mark.parametrize(
    ("command", "location", "stdin"),
    [
        ("embed bad.txt --workdir base --out v.npz", "bad.txt:3", ""),
        ("embed good.txt bad.txt --workdir base --out v.npz", "bad.txt:3", ""),
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
def test_the_error_names_the_text_and_its_location(folder, monkeypatch, command, location, stdin):
    monkeypatch.chdir(folder)
    broken.fails(command, location, TEXT[:20], stdin=stdin.encode())


def test_a_request_with_the_text_gets_500_and_later_requests_succeed(folder, monkeypatch):
    monkeypatch.chdir(folder)
    trained = LoadedModel.of(open_workdir("base"))
    embedder = embed.Embedder(trained, embed.VectorOptions(), samples.mesh_of(1))
    with running(endpoints.EmbedEndpoint("base", embedder)) as port:
        error = is_error(ask(port, {"input": ["w7", TEXT]}), 500)
        assert TOKENIZER in error["message"] and TEXT[:20] in error["message"]
        assert ask(port, {"input": ["w7", "w8"]})[0] == 200
        assert ask(port, b"", "/health", "GET")[0] == 200


def test_a_sentence_splitter_that_panics_is_an_input_error(monkeypatch):
    monkeypatch.setattr(sentencex, "segment", raise_panic)
    with pytest.raises(InputError, match=r"x\.txt.*wa wb"):
        sentence_splitter.split(Document("x.txt", ("wa wb",), "per_file", 0), "en")


class Panic(BaseException):
    """Like pyo3's PanicException, not a subclass of Exception."""


def raise_panic(*_):
    raise Panic("called `Option::unwrap()` on a `None` value")


class Model:
    """Answers each text with its length; panics unless `works` is set, hangs while `hangs` is."""

    path, name, description = "/v1/embeddings", "model", ""

    def __init__(self):
        self.works = threading.Event()
        self.works.set()
        self.hangs = threading.Event()

    def warm(self):
        if not self.works.is_set():
            raise_panic()

    def items(self, body, limits):
        return [(text, 1) for text in body["input"]]

    def compute(self, items):
        while self.hangs.is_set():
            time.sleep(0.01)
        if "bad" in items:
            raise_panic()
        self.warm()
        return [len(text) for text in items]

    def answer(self, body, results):
        yield json.dumps(results)


def test_a_panic_while_computing_fails_only_its_request():
    with running(Model()) as port:
        is_error(ask(port, {"input": ["abc", "bad"]}), 500)
        is_error(ask(port, {"input": ["bad"]}), 500)
        assert ask(port, {"input": ["abc"]})[::2] == (200, [3])


def test_a_service_exits_if_its_model_panics_on_every_text():
    model = Model()
    model.works.clear()
    service_ = service.Service(model, endpoints.Limits())
    with service.bind_socket("127.0.0.1", 0) as bound, ThreadPoolExecutor(1) as clients:
        bound.listen()
        clients.submit(exchange, bound.getsockname()[1], post({"input": ["abc"]}))
        with pytest.raises(SystemExit, match="Panic"):
            service.make_server(service_, 1.0).run(sockets=[bound])


def test_health_is_503_while_the_model_hangs():
    model = Model()
    model.hangs.set()
    with running(model, endpoints.Limits(seconds=1)) as port:
        try:
            assert ask(port, b"", "/health", "GET")[0] == 200
            # A turn begins after its request, perhaps much later, and so exceeds the limit later.
            # A request that exceeds it before its turn is dropped: the next one has a turn.
            until(
                lambda: (
                    ask(port, {"input": ["abc"]})[0] == 503
                    and ask(port, b"", "/health", "GET")[0] == 503
                )
            )
        finally:
            model.hangs.clear()
        until(lambda: ask(port, b"", "/health", "GET")[0] == 200)


def test_models_are_listed_as_by_openai_and_a_trailing_slash_is_ignored():
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
