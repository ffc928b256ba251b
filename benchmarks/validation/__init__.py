"""What was promised, run on real hardware: rows of models and cards, each trained as a user would train it."""
