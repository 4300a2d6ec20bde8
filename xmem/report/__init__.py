"""What a run found: results as data, and every rendering of them."""

from xmem.report.model import SCHEMA_VERSION, Case, Machine, Report, Result

__all__ = ["SCHEMA_VERSION", "Case", "Machine", "Report", "Result"]
