"""The algorithms, as one readable loop each."""
