"""`python -m bert_jax.cli`, as `bert-jax`."""

from bert_jax.cli import main

main()
