"""mmBERT-Base's three phases on 64 TPU chips: ever more languages, and ever more evenly.

    bert-jax pretrain experiments/multilingual.py --workdir gs://BUCKET/multilingual

Source: Marone et al. 2025 (mmBERT): 2.3 trillion tokens of 60 languages with temperature .7, 0.6 of
110 with .5, 0.1 of 1,833 with .3; 30, 15 and 5 % of tokens are masked; rows of 8,192 from the
second phase on. The model is that of modern_base_pod.py. Departures, next to those of that file:
five, seven and nine languages, without code, stand for theirs; a BPE of 64,000 tokens is trained on
the text (theirs: Gemma 2's, 256,000); one rate until the last phase, which ends at 0.
Hardware: 64 TPU v5e chips.
Expected: not run. Theirs is the released model.
"""

import dataclasses

import modern_base_pod

from bert_jax.config import Corpus, Experiment, Phase

ENGLISH = "parquet:hf://datasets/HuggingFaceFW/fineweb-edu/sample/100BT/*.parquet"
# FineWeb2: Russian, German, Spanish, French; Icelandic and Swahili; Faroese and Tigrinya.
LANGUAGES = ("rus_Cyrl", "deu_Latn", "spa_Latn", "fra_Latn")
LANGUAGES += ("isl_Latn", "swh_Latn", "fao_Latn", "tir_Ethi")
FOLDER = "parquet:hf://datasets/HuggingFaceFW/fineweb-2/data"


def experiment() -> Experiment:
    """A step of any phase is 4,718,592 tokens."""
    base = modern_base_pod.experiment()
    long_rows = {"sequence_length": 8_192, "batch_size": 576}
    return dataclasses.replace(
        base,
        name="multilingual",
        model=dataclasses.replace(base.model, vocab_size=64_000),
        corpus=Corpus(
            sources=(ENGLISH, *(f"{FOLDER}/{name}/train/*.parquet" for name in LANGUAGES)),
            temperature=0.7,
            layout="paragraphs_by_line",
            tokenizer_kind="bpe",
            case="cased",
            validation_share=0.0001,
        ),
        phases=(
            Phase(
                steps=487_434,  # 2.3e12 tokens
                sequence_length=1_024,
                max_predictions_per_seq=307,  # 30 %
                batch_size=4_608,
                global_rotary_base=10_000.0,
                mixture=(1,) * 5 + (0,) * 4,
            ),
            Phase(
                steps=127_157,  # 600e9 tokens
                max_predictions_per_seq=1_229,  # 15 %
                masked_lm_prob=0.15,
                mixture=(1,) * 7 + (0,) * 2,
                temperature=0.5,
                **long_rows,
            ),
            Phase(
                steps=21_193,  # 100e9 tokens
                max_predictions_per_seq=410,  # 5 %
                masked_lm_prob=0.05,
                temperature=0.3,
                **long_rows,
            ),
        ),
        optimizer=dataclasses.replace(base.optimizer, decay_steps=21_193),
        parallelism=dataclasses.replace(base.parallelism, accumulation=(9, 9, 9)),
    )
