"""Make one page from run folders. It needs no torch, so that any laptop can make it."""

from fedcover.analysis.report.page import report as report

__all__ = ["report"]
