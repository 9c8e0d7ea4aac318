"""RL post-training strategies on Megatron-Core and Ray."""
