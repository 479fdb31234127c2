"""Two languages in one vocabulary: beginnings of English and French articles, for translate.py.

    bert-jax pretrain experiments/leads.py --workdir runs/leads

Source: the recipe of Devlin et al. 2018 made small, without pairs (Liu et al. 2019), 30 % masked
(Wettig et al. 2023); lead sections of Wikipedia, `{"title": ..., "text": ...}` a line. A unigram
vocabulary keeps case, accents and blanks, so that what is generated is text again.
Hardware: two CPU cores, ten minutes.
Expected: a plateau for 800 steps, then held-out masked LM loss 3.7 nat below the unigram baseline.
"""

from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase, Run


def experiment() -> Experiment:
    """As tiny_paper.py, in two languages."""
    return Experiment(
        name="leads",
        model=Model(
            vocab_size=8_000,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            max_position_embeddings=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        corpus=Corpus(
            sources=("jsonl:data/wiki_leads/en.jsonl.gz", "jsonl:data/wiki_leads/fr.jsonl.gz"),
            tokenizer_kind="unigram",
            case="cased",
            validation_share=0.05,
        ),
        data=Data(
            objective="mlm",
            masked_lm_prob=0.3,
            eval_rows=1_000,
            eval_sequence_length=64,
            eval_max_predictions_per_seq=10,
        ),
        phases=(Phase(steps=6_000, sequence_length=64, max_predictions_per_seq=20, batch_size=64),),
        optimizer=Optimizer(
            name="adamw", peak_learning_rate=2e-3, warmup_steps=600, schedule="linear"
        ),
        parallelism=Parallelism(layer_loop="unroll"),
        run=Run(log_every=50, eval_every=1_000, checkpoint_every=500),
    )
