"""Reports on run folders: tables, figures and a self-contained HTML page."""

from __future__ import annotations

from gradwire.tools.report.load import ReportError, Run, load_runs
from gradwire.tools.report.page import write_report
from gradwire.tools.report.summary import RunSummary, summarize, summarize_folders

__all__ = ["ReportError", "Run", "RunSummary", "load_runs", "summarize", "summarize_folders", "write_report"]
