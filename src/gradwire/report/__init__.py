"""Tables, figures and one self-contained page from run folders; nothing here trains or needs a process group."""

from __future__ import annotations

from gradwire.report.load import ReportError, Run, load_runs
from gradwire.report.page import write_report
from gradwire.report.summary import RunSummary, summarize, summarize_folders

__all__ = ["ReportError", "Run", "RunSummary", "load_runs", "summarize", "summarize_folders", "write_report"]
