"""Rows to tokens to micro-batches."""
