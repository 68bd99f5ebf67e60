"""Adapters: LoRA and its files."""
