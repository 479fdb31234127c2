"""Folders with random tokenizers and settings, and what their libraries make of some texts.

`python tests/interop/make_tokenizer_folders.py FOLDER COUNT [NAME...]`, in an environment with
torch, transformers and sentence-transformers, writes COUNT folders, each with expected.json: ids
and vectors of `TEXTS`, or the error. The folders NAME go into tests/golden, without weights:
200 and 005 014 021 028 045 089 162 173, with transformers 5.23.0, sentence-transformers 6.2.0.
"""

import json
import pathlib
import random
import sys

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenizer_folders.json"
TEXTS = (
    "the clerk opened the door",
    "The Farmer's H\u00f4tel, caf\u00e9 na\u00efve: M\u00fcsste stra\u00dfe!",
    "covid19 xcovid19y covid19, COVID19 [e1] e1 new york New  York newyork",
    "\u6771\u4eac\u304b \u6771 \u4eac a\u6771b",
    "  two  blanks\tand\ta tab \n line ",
    "a",
    "",
    "don't 1,000.5% x\u200by \u00a8a e\u0301",
    "the bell and the door of the farmer by the old bridge of the town and the bell " * 3,
)
WORDS = """
the a clerk farmer opened sold door bell m\u00fcsste musste stra\u00dfe and of by old bridge town
two blanks tab line new york hotel h\u00f4tel cafe caf\u00e9 naive
\u6771 \u4eac \u6771\u4eac \u304b covid ##id ##19 ##s The Farmer Hotel New York don t '
""".split()  # noqa: SIM905
LETTERS = list("abcdefghijklmnopqrstuvwxyzTFHNYM0123456789.,:;!?%'[]\u00e9\u00f4\u00ef\u00fc\u00df")
SQUARE = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ANGLED = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
POSITIONS = 40


def pieces() -> list[str]:
    listed = [*SQUARE.values(), *WORDS, *LETTERS, *(f"##{c}" for c in LETTERS), "covid19"]
    return list(dict.fromkeys(listed))


def wordpiece(draw: random.Random, folder: pathlib.Path, is_whole: bool) -> dict:
    """vocab.txt, or a tokenizer.json that is as BertTokenizer's, or otherwise; and settings."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    vocab = {piece: i for i, piece in enumerate(pieces())}
    says: dict = {"tokenizer_class": "BertTokenizer"}
    for name, values in (
        ("do_lower_case", [True, False]),
        ("strip_accents", [True, False, None]),
        ("tokenize_chinese_chars", [True, True, False]),
    ):
        if draw.random() < 0.5:
            says[name] = draw.choice(values)
    if not is_whole and draw.random() < 0.5:
        (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
        return says
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    lowers = says.get("do_lower_case", True) if draw.random() < 0.8 else draw.random() < 0.5
    made.normalizer = normalizers.BertNormalizer(
        lowercase=lowers,
        strip_accents=says.get("strip_accents"),
        handle_chinese_chars=says.get("tokenize_chinese_chars", True),
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if is_whole:
        steps = [made.normalizer, normalizers.NFKC(), normalizers.Lowercase(), None]
        made.normalizer = draw.choice(steps)
        split = pre_tokenizers.Split(Regex(r"\s+"), "removed")
        made.pre_tokenizer = draw.choice([made.pre_tokenizer, split, pre_tokenizers.Whitespace()])
        says["tokenizer_class"] = "PreTrainedTokenizerFast"
        says |= {f"{role}_token": piece for role, piece in SQUARE.items()}
    second = draw.choice([1, 1, 0])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(list(SQUARE.values()))
    finish(draw, made, folder)
    return says


def byte_bpe(draw: random.Random, folder: pathlib.Path, is_whole: bool) -> dict:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    made, prefix = Tokenizer(models.BPE()), draw.random() < 0.5
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(ANGLED.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS, *WORDS], trainer)
    cls, sep = (("<s>", made.token_to_id("<s>")), ("</s>", made.token_to_id("</s>")))
    made.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=prefix)
    says: dict = {"tokenizer_class": "RobertaTokenizer"}
    if is_whole:
        says = {"tokenizer_class": "PreTrainedTokenizerFast"}
        made.normalizer = draw.choice([None, normalizers.NFC(), normalizers.Lowercase()])
    elif draw.random() < 0.2:
        made.normalizer = normalizers.NFC()
    if draw.random() < 0.7:
        says["add_prefix_space"] = prefix if draw.random() < 0.8 else not prefix
    if is_whole or draw.random() < 0.6:
        says |= {f"{role}_token": piece for role, piece in ANGLED.items()}
    finish(draw, made, folder)
    return says


def unigram(draw: random.Random, folder: pathlib.Path, is_whole: bool) -> dict:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    scored = [(f"\u2581{w}", -3.0 - i / 50) for i, w in enumerate(WORDS) if w[:2] != "##"]
    scored += [(c, -8.0 - i / 50) for i, c in enumerate(LETTERS)] + [("\u2581", -5.0)]
    vocab = [(piece, 0.0) for piece in specials]
    vocab += [*dict(scored).items(), ("<mask>", 0.0)]
    made = Tokenizer(models.Unigram(vocab, unk_id=3, byte_fallback=False))
    scheme = draw.choice(["always", "always", "never", "first"])
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    cutters = [pre_tokenizers.WhitespaceSplit(), metaspace]
    made.pre_tokenizer = metaspace if draw.random() < 0.2 else pre_tokenizers.Sequence(cutters)
    runs = normalizers.Replace(Regex(" {2,}"), draw.choice([" ", "\u2581"]))
    steps = [None, normalizers.Sequence([normalizers.Strip(left=False), runs]), normalizers.NFKC()]
    made.normalizer = draw.choice([*steps, None])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    says: dict = {"tokenizer_class": "XLMRobertaTokenizer"}
    if is_whole:
        says = {"tokenizer_class": "TokenizersBackend"}
    if draw.random() < 0.6:
        says["add_prefix_space"] = scheme == "always" if draw.random() < 0.8 else False
    if is_whole or draw.random() < 0.6:
        says |= {f"{role}_token": piece for role, piece in ANGLED.items()}
    finish(draw, made, folder)
    return says


def finish(draw: random.Random, made, folder: pathlib.Path) -> None:
    """Adds tokens, truncation and padding, and saves."""
    from tokenizers import AddedToken

    for piece in ("covid19", "e1", "new york"):
        if draw.random() < 0.15:
            flags = {n: draw.random() < 0.3 for n in ("single_word", "lstrip", "rstrip")}
            is_special = draw.random() < 0.2
            token = AddedToken(piece, normalized=draw.random() < 0.5, special=is_special, **flags)
            (made.add_special_tokens if is_special else made.add_tokens)([token])
    if draw.random() < 0.15:
        made.enable_truncation(draw.choice([5, 12]), direction=draw.choice(["left", "right"]))
    if draw.random() < 0.15:
        made.enable_padding(direction=draw.choice(["left", "right"]))
    made.save(str(folder / "tokenizer.json"))


def settings(draw: random.Random, folder: pathlib.Path, says: dict, is_roberta: bool) -> None:
    """Writes tokenizer_config.json and the files next to it, with keys of all kinds."""
    usual: dict = {
        "model_max_length": lambda: draw.choice([12, 20, POSITIONS, 10**30]),
        "truncation_side": lambda: draw.choice(["right", "right", "left"]),
        "padding_side": lambda: draw.choice(["right", "left"]),
        "max_len": lambda: draw.choice([9, 512]),
        "clean_up_tokenization_spaces": lambda: draw.random() < 0.5,
        "model_input_names": lambda: draw.choice(
            [["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]]
        ),
        "never_split": lambda: draw.choice([None, ["[e1]"]]),
        "do_basic_tokenize": lambda: draw.choice([True, True, False]),
        "split_special_tokens": lambda: draw.random() < 0.5,
        "add_bos_token": lambda: draw.random() < 0.5,
        "add_eos_token": lambda: draw.random() < 0.5,
        "stride": lambda: 2,
        "max_length": lambda: 7,
        "truncation_strategy": lambda: "only_second",
        "pad_to_multiple_of": lambda: 8,
        "pad_token_type_id": lambda: 1,
        "trim_offsets": lambda: draw.random() < 0.5,
        "errors": lambda: "replace",
        "name_or_path": lambda: "some/model",
        "processor_class": lambda: "SomeProcessor",
        "chat_template": lambda: "{{ messages }}",
        "a_key_of_nobody": lambda: 3,
        "extra_special_tokens": lambda: draw.choice([[], ["e1"], ["<new>"]]),
        "additional_special_tokens": lambda: draw.choice([[], ["covid19"], ["<new>"]]),
        "auto_map": lambda: {"AutoTokenizer": ["tok.MyTokenizer", None]},
        "fix_mistral_regex": lambda: False,
        "legacy": lambda: True,
        "use_fast": lambda: draw.random() < 0.5,
    }
    for key in draw.sample(sorted(usual), draw.choice([0, 1, 2, 3])):
        says[key] = usual[key]()
    if is_roberta:  # whose rows of positions sentence-transformers takes for places
        says["model_max_length"] = min(says.get("model_max_length", POSITIONS), POSITIONS)
    if draw.random() < 0.15:
        says["tokenizer_class"] += "Fast" * (not says["tokenizer_class"].endswith(("Fast", "end")))
    if draw.random() < 0.15:
        del says["tokenizer_class"]
    token = {"content": "covid19", "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"normalized": draw.random() < 0.5, "special": draw.random() < 0.3}
    if draw.random() < 0.12:
        says["added_tokens_decoder"] = {"97": token}
    if draw.random() < 0.12:
        (folder / "added_tokens.json").write_text(json.dumps({draw.choice(["covid19", "e1"]): 97}))
    if draw.random() < 0.2:
        names = SQUARE if (folder / "vocab.txt").exists() else ANGLED
        mapped = {f"{role}_token": piece for role, piece in names.items()}
        (folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    (folder / "tokenizer_config.json").write_text(json.dumps(says))


KINDS = (
    ("bert", wordpiece, False),
    ("bert", wordpiece, False),
    ("bert", wordpiece, True),
    ("distilbert", wordpiece, False),
    ("roberta", byte_bpe, False),
    ("roberta", byte_bpe, True),
    ("xlm-roberta", unigram, False),
    ("bert", unigram, False),
    ("modernbert", byte_bpe, True),
    ("modernbert", byte_bpe, False),
)


def write(draw: random.Random, folder: pathlib.Path) -> str:
    """Writes a folder; returns its kind."""
    import torch
    import transformers

    folder.mkdir(parents=True)
    model_type, make, is_whole = draw.choice(KINDS)
    says = make(draw, folder, is_whole)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": POSITIONS}
    if model_type == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
        sizes |= {"max_position_embeddings": POSITIONS}
    if "roberta" in model_type:
        pad = 1
        sizes |= {"max_position_embeddings": POSITIONS + pad + 1, "type_vocab_size": 1}
        sizes |= {"pad_token_id": pad}
    if model_type == "modernbert":
        sizes |= {f"{n}_token_id": 0 for n in ("pad", "bos", "eos", "cls", "sep")}
        sizes["local_attention"] = 16
    if "roberta" not in model_type and model_type != "modernbert" and draw.random() < 0.1:
        sizes["pad_token_id"] = 7
    size = len(pieces())
    if (folder / "tokenizer.json").exists():
        parts = json.loads((folder / "tokenizer.json").read_text())
        size = len({*(p if isinstance(p, str) else p[0] for p in parts["model"]["vocab"]),
                    *(t["content"] for t in parts["added_tokens"])})  # fmt: skip
    fields = sizes | {"vocab_size": size + draw.choice([0, 0, 3])}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(draw.randrange(10**6))
    model = transformers.AutoModel.from_config(config)
    for value in model.parameters():
        torch.nn.init.normal_(value, 0.0, 0.2)
    model.save_pretrained(folder)
    settings(draw, folder, says, "roberta" in model_type)
    if draw.random() < 0.4:
        reads = {"max_seq_length": draw.choice([8, 16, POSITIONS, None]), "do_lower_case": False}
        if draw.random() < 0.15:
            reads["do_lower_case"] = True
        listed = [("Transformer", ""), ("Pooling", "1_Pooling")]
        listed += [("Normalize", "2_Normalize")] * (draw.random() < 0.5)
        kinds = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (name, path) in enumerate(listed)
        ]
        (folder / "modules.json").write_text(json.dumps(kinds))
        (folder / "sentence_bert_config.json").write_text(json.dumps(reads))
        (folder / "1_Pooling").mkdir()
        is_cls = draw.random() < 0.5
        pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": is_cls}
        pooling["pooling_mode_mean_tokens"] = not is_cls
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return f"{model_type}, {make.__name__}, {'as it is' if is_whole else 'class'}"


def expected(folder: pathlib.Path) -> dict:
    """Returns ids and vectors of each text by itself, as sentence-transformers makes them."""
    import numpy as np
    from sentence_transformers import SentenceTransformer

    try:
        model = SentenceTransformer(str(folder), device="cpu")
        ids = [model.preprocess([text])["input_ids"][0].tolist() for text in TEXTS]
        vectors = [model.encode([text], batch_size=1)[0] for text in TEXTS]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"ids": ids, "vectors": np.round(np.float64(vectors), 7).tolist()}


def main(place: str, count: str, *keep: str) -> None:
    """Writes the folders, and the numbers in `keep` into the golden file, without weights."""
    for number in range(int(count)):
        folder = pathlib.Path(place) / f"{number:03}"
        if not folder.exists():
            kind = write(random.Random(f"0/{number}"), folder)
            (folder / "expected.json").write_text(json.dumps({"kind": kind} | expected(folder)))
    golden = []
    for name in keep:
        folder = pathlib.Path(place) / name
        made = json.loads((folder / "expected.json").read_text())
        files = {path.name: path.read_text() for path in sorted(folder.glob("*.*"))
                 if path.name != "expected.json" and path.suffix in (".json", ".txt")}  # fmt: skip
        golden.append({"kind": made["kind"], "files": files, "ids": made["ids"]})
    if golden:
        GOLDEN.write_text("[\n" + ",\n".join(map(json.dumps, golden)) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
