"""Where token sequences come from: lists, InternEvo's tokenized folders, jsonl and parquet files of text."""
