"""The training loop and evaluation."""
