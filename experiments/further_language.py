"""XLM-R-Base made one language's, and trained further on its text.

    hf download FacebookAI/xlm-roberta-base --local-dir xlmr
    bert-jax import xlmr --workdir bases/language --prune-vocabulary TEXT --keep 30000
    bert-jax pretrain experiments/further_language.py --set corpus.sources=text:TEXT

Source: weights of Conneau et al. 2020 (XLM-R), of whose 250,002 pieces those stay that the text
uses most; 170 of the 278 million parameters go. Masks and the rate as Gururangan et al. 2020
(further pre-training on a domain) have them; it stays at its peak until the last tenth, so that a
run can be gone on with.
Hardware: 8 TPU v5e chips.
Expected: not run at this size (docs/results/learning.md has a smaller run). Plan for v5e:2x4: 12.8
of 16 GiB a chip, half an hour, 32 % of the chips' peak.
"""

from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Phase, Run


def experiment() -> Experiment:
    """The model is the base's; so is the vocabulary."""
    return Experiment(
        name="further_language",
        init_from="bases/language",
        model=Model(
            vocab_size=30_000,
            type_vocab_size=1,
            position_offset=2,
            layer_norm_eps=1e-5,
            compute_dtype="bfloat16",
            dropout_rng="in_kernel",
        ),
        corpus=Corpus(
            sources=("text:my_language",), tokenizer="bases/language/tokenizer", case="cased"
        ),
        data=Data(
            objective="mlm",
            eval_rows=2_048,
            eval_sequence_length=512,
            eval_max_predictions_per_seq=77,
        ),
        phases=(
            Phase(steps=12_500, sequence_length=512, max_predictions_per_seq=77, batch_size=256),
        ),
        optimizer=Optimizer(
            name="adamw",
            peak_learning_rate=1e-4,
            warmup_steps=750,
            schedule="wsd",
            decay_steps=1_250,
        ),
        run=Run(log_every=50, eval_every=500, checkpoint_every=500),
    )
