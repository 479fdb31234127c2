"""BERT-Base as the paper trained it, on 16 TPU chips.

    bert-jax pretrain experiments/bert_base.py --workdir gs://BUCKET/bert_base

Source: Devlin et al. 2018, section 3 and appendix A.2 (12 layers, 768 wide, 12 heads, 110M
parameters; 1M steps of 256 sequences, 90 % of them 128 long and 10 % 512; Adam at 1e-4). Semantics
are those of google-research/bert, down to the gradient clip on each of the 32 cores of 16 v2 or v3
chips before the sum, and to static masks: its files hold ten passes over the text by default.
`bert-jax conformance experiments/bert_base.py` lists what is left. The corpus is English Wikipedia;
the paper's BooksCorpus is not public.
Hardware: 16 TPU v2 or v3 chips (4 days in the paper).
Expected: the paper's BASE, less what BooksCorpus taught it.
"""

from bert_jax.config import Corpus, Data, Experiment, Optimizer, Parallelism, Phase, Run


def experiment() -> Experiment:
    """The certified recipe."""
    return Experiment(
        name="bert_base",
        corpus=Corpus(
            sources=("tfds:wikipedia/20230601.en",),
            layout="paragraphs_by_line",
            validation_share=0.005,
        ),
        data=Data(dupe_factor=10, eval_rows=10_000),
        phases=(
            Phase(steps=900_000, sequence_length=128, max_predictions_per_seq=20),
            Phase(steps=100_000, sequence_length=512, max_predictions_per_seq=77),
        ),
        optimizer=Optimizer(
            name="bert_adam",
            peak_learning_rate=1e-4,
            warmup_steps=10_000,
            schedule="paper",
            clip="per_replica",
            reference_replicas=32,
        ),
        # The same arithmetic as replicated, with the optimizer's work and memory cut over devices.
        parallelism=Parallelism(state="zero1"),
        run=Run(log_every=100, eval_every=10_000, checkpoint_every=1_000),
    )
