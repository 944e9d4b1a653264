"""Readers of training logs: ours and other trainers', as rows of numbers under the names the source printed."""

from analysis.logs.read import find_logs, read_log
from analysis.logs.table import Log

__all__ = ["Log", "find_logs", "read_log"]
