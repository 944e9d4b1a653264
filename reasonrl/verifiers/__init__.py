"""Verifiers: is a completion's answer the gold answer, and if not, why not."""
