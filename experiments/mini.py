"""Four layers, 256 wide, for a book shelf of text: 66 MB of novels, say.

    bert-jax pretrain experiments/mini.py --set 'corpus.sources=text:NOVELS' --workdir runs/novels

Source: tiny.py made larger; its width and depth are those of BERT-mini (Turc et al. 2019), whose
recipe stands in mini_paper.py. The rate falls with width (2e-3; tiny.py has 4e-3 at half of it).
Hardware: two CPU cores, about an hour on the quickest that it ran on; 3 h 40 min where a large
product of float32 is done at 160 GFLOP/s by both.
Expected: with AdamW after an hour, the 6,160 steps of tables/hour.py, held-out masked LM 3.0 nat
below the unigram baseline, 39 % of masked pieces right, next sentence at 0.67 where the majority is
0.55; with Muon 0.08 nat more after 828 steps.
"""

from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase, Run


def experiment() -> Experiment:
    """All rows are 64 long, as those it is scored on."""
    return Experiment(
        name="mini",
        model=Model(
            kind="modern",
            vocab_size=16_000,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=688,
            max_position_embeddings=512,
            global_every=1,
            global_rotary_base=1_000.0,
            initialization="scaled",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        corpus=Corpus(sources=("text:novels",), validation_share=0.1),
        data=Data(
            masked_lm_prob=0.3,
            eval_rows=5_000,
            eval_sequence_length=64,
            eval_max_predictions_per_seq=10,
        ),
        phases=(Phase(steps=4_000, sequence_length=64, max_predictions_per_seq=20, batch_size=96),),
        optimizer=Optimizer(
            name="muon", peak_learning_rate=2e-3, warmup_steps=400, schedule="linear"
        ),
        parallelism=Parallelism(layer_loop="unroll"),
        run=Run(log_every=50, eval_every=1_000, checkpoint_every=250),
    )
