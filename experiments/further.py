"""Others' six-layer encoder, trained further on a book shelf: 66 MB of novels, say.

    bert-jax import all-MiniLM-L6-v2 --workdir bases/minilm
    bert-jax pretrain experiments/further.py --workdir runs/further
    bert-jax pretrain experiments/further.py --workdir runs/fresh --set init_from= \
        --set run.corpus_dir=runs/further/corpus

Source: weights of the shape of Wang et al. 2020 (MiniLM) as sentence-transformers spread them,
without heads, which begin fresh; the task is Devlin et al. 2018.
Hardware: one CPU core, five minutes.
Its vectors get worse: masked LM alone takes the cosine's correlation with people's scores of
similarity (STS-B, dev) from 0.867 to 0.620; see docs/interop.md, "Using a base".
Expected: after 250 steps held-out masked LM far below the unigram line (5.16 against 6.77 nat),
where the same model begun fresh, or with the encoder's layers in another order, has not come below
it (6.99, 6.95). Next sentence wants more than these 4,000 examples: all three say the majority.
"""

from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase, Run


def experiment() -> Experiment:
    """The model is the base's; so is the vocabulary."""
    return Experiment(
        name="further",
        init_from="bases/minilm",
        model=Model(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1_536,
        ),
        corpus=Corpus(
            sources=("text:novels",), tokenizer="bases/minilm/tokenizer", validation_share=0.1
        ),
        data=Data(eval_rows=1_000, eval_sequence_length=64, eval_max_predictions_per_seq=10),
        phases=(Phase(steps=250, sequence_length=64, max_predictions_per_seq=10, batch_size=16),),
        optimizer=Optimizer(
            name="adamw", peak_learning_rate=5e-4, warmup_steps=25, schedule="linear"
        ),
        parallelism=Parallelism(layer_loop="unroll"),
        run=Run(log_every=25, eval_every=125, checkpoint_every=125),
    )
