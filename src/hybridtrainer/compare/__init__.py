"""Honest comparison of ways to train: paired seeds, runs in turns, time to a target that is kept, intervals."""
