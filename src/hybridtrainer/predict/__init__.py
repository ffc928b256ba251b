"""Forecasts of weights: recorded, proposed, probed, written, undone."""
