"""The small architecture of the configs in these tests."""

MODEL = """
  config:
    vocab_size: 64
    hidden_size: 128
    intermediate_size: 384
    num_hidden_layers: 6
    num_attention_heads: 8
    num_key_value_heads: 4
    max_position_embeddings: 64
"""
"""What stands behind `model:`, in a config whose sections are indented by two."""
