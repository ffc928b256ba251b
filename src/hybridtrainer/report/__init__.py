"""The report of runs and comparisons as one HTML file. Reads folders; knows no trainer and no torch."""

from hybridtrainer.report.page import write_report
from hybridtrainer.report.picture import Picture, draw_losses

__all__ = ["Picture", "draw_losses", "write_report"]
