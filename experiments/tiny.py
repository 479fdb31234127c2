"""An encoder small enough to watch: two layers, 128 wide, on the speeches in sample_text/.

    bert-jax pretrain experiments/tiny.py

Source: ModernBERT's encoder (Warner et al. 2024), with a base of rotary positions for short rows
and scaled fresh weights (docs/results/learning.md); 30 % masked (Wettig et al. 2023); Muon (Jordan
et al. 2024) at high rates and no dropout, as the run is short. The paper's recipe at this size is
tiny_paper.py.
Hardware: any CPU; four to twelve minutes on two cores.
Expected: held-out masked LM loss 2.6 nat below the unigram baseline; next sentence above majority.
"""

from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase, Run


def experiment() -> Experiment:
    """All rows are 64 long, as those it is scored on."""
    return Experiment(
        name="tiny",
        model=Model(
            kind="modern",
            vocab_size=8_000,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=344,
            max_position_embeddings=128,
            global_every=1,
            global_rotary_base=1_000.0,
            initialization="scaled",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        corpus=Corpus(sources=("jsonl:./sample_text/speeches.jsonl.gz",), validation_share=0.1),
        data=Data(
            masked_lm_prob=0.3,
            eval_rows=2_000,
            eval_sequence_length=64,
            eval_max_predictions_per_seq=10,
        ),
        phases=(Phase(steps=1_750, sequence_length=64, max_predictions_per_seq=20, batch_size=64),),
        optimizer=Optimizer(
            name="muon", peak_learning_rate=4e-3, warmup_steps=200, schedule="linear"
        ),
        parallelism=Parallelism(layer_loop="unroll"),
        run=Run(
            log_every=50,
            eval_every=400,
            checkpoint_every=200,
            watch=(
                "My fellow [MASK], we meet here today.",
                "The united [MASK] of America.",
                "I ask the [MASK] to pass this bill.",
                "We must defend the [MASK] of the people.",
            ),
        ),
    )
