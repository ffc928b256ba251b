"""Measurements. Each script prints a table and writes a file into benchmarks/results."""
