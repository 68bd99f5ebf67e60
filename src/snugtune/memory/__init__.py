"""Memory techniques, one file each: recompute, chunked loss, loss scaling."""
