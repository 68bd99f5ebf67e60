"""Plain torch first; what is fast on a device is chosen here."""
