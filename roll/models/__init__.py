"""Language models on Megatron-Core, and their Hugging Face layout."""
