"""Sources of token sequences: lists, InternEvo's tokenized folders, plain text, conversations."""
