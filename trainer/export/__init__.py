"""checkpoint → the standard speculator format, and back."""
