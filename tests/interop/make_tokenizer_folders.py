"""Writes the ids in tests/golden/tokenizer_folders.json again, as sentence-transformers has them.

Run `python tests/interop/make_tokenizer_folders.py` in an environment with transformers 5.23.0 (for
MPNet and ELECTRA 5.24.0) and sentence-transformers 6.2.0. The files of each folder were drawn at
random: a tokenizer of some family, with settings of all kinds next to it. Weights do not matter,
and are not kept.
"""

import json
import pathlib
import tempfile

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
POSITIONS = 40  # most tokens of a text for the models of these folders


def compute_ids(files: dict[str, str]) -> list[list[int]]:
    """Returns the ids of each text by itself, for a folder with these files."""
    import transformers
    from sentence_transformers import SentenceTransformer

    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            pathlib.Path(folder, name).write_text(content)
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModel.from_config(config)
        model.save_pretrained(folder)
        for name, content in files.items():
            pathlib.Path(folder, name).write_text(content)
        if "modules.json" in files:
            pooling = pathlib.Path(folder, "1_Pooling")
            pooling.mkdir()
            width = {"word_embedding_dimension": 16}
            (pooling / "config.json").write_text(json.dumps(width))
        reader = SentenceTransformer(folder, device="cpu")
        return [reader.preprocess([text])["input_ids"][0].tolist() for text in TEXTS]


def main() -> None:
    folders = json.loads(GOLDEN.read_text())
    made = [folder | {"ids": compute_ids(folder["files"])} for folder in folders]
    GOLDEN.write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n")


if __name__ == "__main__":
    main()
