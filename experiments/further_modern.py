"""ModernBERT-Base, trained further on the text of a domain.

    hf download answerdotai/ModernBERT-base --local-dir modernbert
    bert-jax import modernbert --workdir bases/modernbert
    bert-jax pretrain experiments/further_modern.py --set corpus.sources=text:TEXT

Source: weights of Warner et al. 2024 (ModernBERT), and its masks, 30 %; the rate is warmed up
again, to less than theirs, and falls in the last tenth alone, so that a run can be gone on with.
Hardware: 8 TPU v5e chips.
Expected: not run at this size (docs/results/learning.md has a smaller run). Plan for v5e:2x4: 12.6
of 16 GiB a chip, 0.8 hours, 29 % of the chips' peak.
"""

from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase, Run


def experiment() -> Experiment:
    """The model is the base's; so is the vocabulary. Words of the domain take unused pieces."""
    return Experiment(
        name="further_modern",
        init_from="bases/modernbert",
        model=Model(
            kind="modern",
            vocab_size=50_368,
            num_hidden_layers=22,
            intermediate_size=1_152,
            max_position_embeddings=8_192,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            compute_dtype="bfloat16",
            dropout_rng="in_kernel",
        ),
        corpus=Corpus(
            sources=("text:my_domain",), tokenizer="bases/modernbert/tokenizer", case="cased"
        ),
        data=Data(
            objective="mlm",
            masked_lm_prob=0.3,
            eval_rows=1_024,
            eval_sequence_length=1_024,
            eval_max_predictions_per_seq=308,
        ),
        phases=(
            Phase(steps=6_000, sequence_length=1_024, max_predictions_per_seq=308, batch_size=256),
        ),
        optimizer=Optimizer(
            name="adamw",
            peak_learning_rate=3e-4,
            warmup_steps=300,
            schedule="wsd",
            decay_steps=600,
        ),
        parallelism=Parallelism(accumulation=(4,)),
        run=Run(log_every=50, eval_every=500, checkpoint_every=500),
    )
