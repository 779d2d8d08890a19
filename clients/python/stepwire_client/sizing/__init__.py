"""How much memory a model takes and how many requests it leaves room for, from its config.json alone."""
