"""Tools that people use around runs; the core never imports them."""
