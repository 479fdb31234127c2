"""`bert-jax compare`: experiments that differ in a few fields, at equal budgets, in one table."""
