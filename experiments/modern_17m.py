"""ModernBERT's encoder in Ettin's smallest shape, for a shelf of books: 66 MB of novels, say.

    bert-jax pretrain experiments/modern_17m.py --set 'corpus.sources=text:NOVELS' \
        --workdir runs/modern_17m

Source: Weller et al. 2025 (Ettin), its `encoder_very_tiny.yaml`; each number says where it departs.
Two thirds of its 17M parameters are 50,368 pieces: with the 16,000 that a shelf of books bears it
has 8.2M. Ettin drops a tenth of what attention adds, and nothing else; here nothing is dropped.
Hardware: two CPU cores, an evening.
Expected: not trained to its end by those who wrote it.
"""

from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase, Run


def experiment() -> Experiment:
    """Rows of full sentences, 30 % masked; four passes over 15 million tokens."""
    return Experiment(
        name="modern_17m",
        model=Model(
            kind="modern",
            vocab_size=16_000,  # Ettin: 50,368; as mini.py, for as much text
            hidden_size=256,
            num_hidden_layers=7,
            num_attention_heads=4,
            intermediate_size=384,
            max_position_embeddings=256,  # Ettin: 1,024; what two cores have time for
            local_window=128,
            global_every=3,
            global_rotary_base=10_000.0,  # both bases, as long as rows are short
            local_rotary_base=10_000.0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        corpus=Corpus(sources=("text:novels",), validation_share=0.1),
        data=Data(
            objective="mlm",
            masked_lm_prob=0.3,
            eval_rows=1_000,
            eval_sequence_length=256,
            eval_max_predictions_per_seq=39,  # 15 % of 256
        ),
        phases=(
            # Ettin: 4,608 rows of 1,024; 360,000 steps. Here 61 million tokens.
            Phase(steps=15_000, sequence_length=256, max_predictions_per_seq=77, batch_size=16),
        ),
        optimizer=Optimizer(
            name="stable_adamw",
            peak_learning_rate=3e-3,
            warmup_steps=750,  # Ettin: 850, of far larger batches
            schedule="wsd",
            decay_steps=1_500,  # a tenth, as Hägele et al. 2024
            b1=0.9,
            b2=0.98,
            eps=1e-6,
            weight_decay=0.1,  # Ettin's 3e-4 is no multiple of the rate: 3e-4 / 3e-3
            clip="none",
        ),
        parallelism=Parallelism(layer_loop="unroll"),
        run=Run(log_every=50, eval_every=1_000, eval_batch_size=64, checkpoint_every=250),
    )
