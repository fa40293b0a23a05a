"""Measures real training runs on every rank and reports what they needed."""

REPORT_KINDS = ("json", "md", "html", "png")  # the files that a report can be written as
