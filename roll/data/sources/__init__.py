"""Where token sequences come from: lists, InternEvo's tokenized folders, plain text, conversations."""
