"""Run folders -> one page that opens anywhere; without torch, so that a laptop can make it."""

from fedcover.analysis.report.page import report as report

__all__ = ["report"]
