"""ModernBERT-Base on 64 TPU chips: 1.7 trillion tokens at 1,024, then 0.3 trillion at 8,192.

    bert-jax pretrain experiments/modern_base_pod.py --workdir gs://BUCKET/modern_base_pod

Source: Warner et al. 2024 (ModernBERT), its `modernbert-base-pretrain.yaml`, and the paper's table
of rows of 8,192. Departures: their text is not public, a public one stands in, and a byte BPE of as
many pieces is trained on it; batches have their full size from the beginning (theirs grow over 50
billion tokens); nothing is dropped (theirs: a tenth of what attention adds); the long rows go down
from the one peak, as 1 - sqrt (theirs: five sixths of them at 3e-4, then down).
Hardware: 64 TPU v5e chips, 8,192 tokens on a chip at a time.
Expected: not run. Theirs is the released model.
"""

from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase, Run


def experiment() -> Experiment:
    """A step of either phase is 4,718,592 tokens."""
    return Experiment(
        name="modern_base_pod",
        model=Model(
            kind="modern",
            vocab_size=50_368,
            hidden_size=768,
            num_hidden_layers=22,
            num_attention_heads=12,
            intermediate_size=1_152,
            max_position_embeddings=8_192,
            local_window=128,
            global_every=3,
            global_rotary_base=160_000.0,  # paper, section 2.2.2
            local_rotary_base=10_000.0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            compute_dtype="bfloat16",  # amp_bf16
            dropout_rng="in_kernel",  # kernels; there is no dropout to draw
        ),
        corpus=Corpus(
            sources=("parquet:hf://datasets/HuggingFaceFW/fineweb-edu/sample/100BT/*.parquet",),
            layout="paragraphs_by_line",
            tokenizer_kind="byte_bpe",
            unused_pieces=83,
            case="cased",
            validation_share=0.0001,
        ),
        data=Data(
            objective="mlm",
            masked_lm_prob=0.3,
            eval_rows=4_096,
            eval_sequence_length=1_024,
            eval_max_predictions_per_seq=154,  # 15 % of 1,024
        ),
        phases=(
            Phase(
                steps=364_303,  # 1.719e12 tokens
                sequence_length=1_024,
                max_predictions_per_seq=307,  # 30 %
                batch_size=4_608,
                global_rotary_base=10_000.0,
            ),
            Phase(
                steps=63_578,  # 250e9 and 50e9 tokens
                sequence_length=8_192,
                max_predictions_per_seq=2_458,  # 30 %
                batch_size=576,  # paper, table 3
            ),
        ),
        optimizer=Optimizer(
            name="stable_adamw",
            peak_learning_rate=8e-4,
            warmup_steps=636,  # 3e9 tokens
            schedule="wsd",
            decay_steps=63_578,
            b1=0.9,
            b2=0.98,
            eps=1e-6,
            weight_decay=0.0125,  # their 1e-5 is no multiple of the rate: 1e-5 / 8e-4
            clip="none",
            gradient_reduction="bfloat16",
        ),
        # 72 rows of 1,024 on a chip, eight at a time; nine of 8,192, one at a time.
        parallelism=Parallelism(state="zero1", accumulation=(9, 9), remat="dots"),
        run=Run(log_every=100, eval_every=4_000, checkpoint_every=1_000),
    )
