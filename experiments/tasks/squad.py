"""Which words of an article answer a question, if any do? SQuAD 2.0.

    bert-jax finetune experiments/tasks/squad.py --from bases/bert --workdir runs/squad

Source: Rajpurkar et al. 2018, train-v2.0.json and dev-v2.0.json in data/; the recipe is section 4.3
of Devlin et al. 2018. For SQuAD 1.1 the files are others, `task.no_answer=never`, `epochs=3` and
`batch_size=32`.
Hardware: an accelerator, an hour or more.
Expected: F1 above the 50.1 that never giving an answer has on dev-v2.0.json.
"""

from bert_jax.config import Finetuning, Run, Task


def experiment() -> Finetuning:
    """130,319 questions, and 11,873 to score on."""
    return Finetuning(
        name="squad",
        task=Task(
            kind="span",
            train=("squad:data/train-v2.0.json",),
            validation=("squad:data/dev-v2.0.json",),
            no_answer="possible",
            max_sequence_length=384,
        ),
        epochs=2.0,
        batch_size=48,
        run=Run(log_every=100, eval_every=2_000, checkpoint_every=1_000, eval_batch_size=64),
    )
