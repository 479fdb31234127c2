"""Small vocabularies in the form of published ones, each trained on the speeches of experiments/.

Of ModernBERT (byte BPE, added tokens of blanks), RoBERTa (byte BPE, two separators), XLM-R
(Unigram) and Gemma 2 (BPE over blanks as letters, with byte fallback).
"""

import pathlib

from bert_jax.text import library

FOLDER = pathlib.Path(__file__).parent / "golden" / "tokenizers"
SQUARE = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
ANGLED = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
NAMED = {"modernbert": SQUARE, "roberta": ANGLED, "xlmr": ANGLED, "gemma": ANGLED}
CONTENT = {name: (FOLDER / f"{name}.json").read_bytes() for name in NAMED}
OURS = {name: library.LibraryTokenizer(CONTENT[name], NAMED[name], name) for name in NAMED}
