"""Finding, loading and naming the parts of a model."""
