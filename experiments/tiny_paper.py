"""The paper's recipe at the size of tiny.py: two layers, 128 wide, on the speeches in sample_text/.

    bert-jax pretrain experiments/tiny_paper.py

Source: the recipe of Devlin et al. 2018 made small; AdamW at a higher rate, as the run is short.
Hardware: any CPU; three to six minutes on two cores.
Expected: held-out masked LM loss half a nat below the unigram baseline, where tiny.py comes to two
and a half in the same time; next sentence near its majority baseline.
"""

from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase, Run


def experiment() -> Experiment:
    """Length 64 for most of the steps, then 128, as the paper goes from 128 to 512."""
    return Experiment(
        name="tiny_paper",
        model=Model(
            vocab_size=8_000,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            max_position_embeddings=128,
        ),
        corpus=Corpus(sources=("jsonl:./sample_text/speeches.jsonl.gz",), validation_share=0.1),
        data=Data(eval_rows=2_000),
        phases=(
            Phase(steps=1_400, sequence_length=64, max_predictions_per_seq=10, batch_size=64),
            Phase(steps=150, sequence_length=128, max_predictions_per_seq=20, batch_size=32),
        ),
        optimizer=Optimizer(
            name="adamw", peak_learning_rate=2e-3, warmup_steps=200, schedule="linear"
        ),
        parallelism=Parallelism(layer_loop="unroll"),
        run=Run(log_every=50, eval_every=400, checkpoint_every=200),
    )
