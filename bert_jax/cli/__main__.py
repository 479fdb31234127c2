"""`python -m bert_jax.cli`, as `bert-jax`."""

import sys

from bert_jax.cli import main

sys.exit(main())
