"""The report of runs and comparisons as one HTML file. Reads folders; knows no trainer and no torch."""

from hybridtrainer.report.page import write_report

__all__ = ["write_report"]
