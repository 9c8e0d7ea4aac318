"""InternLM2 as a Megatron-Core `GPTModel`, through a layer spec of our own.

The architecture is a pre-norm decoder with grouped-query attention, RoPE, RMSNorm and SwiGLU. InternLM2's one `wqkv`
has rows `[kv_heads, q_per_kv + 2, head_dim]` (the queries of a group, then its key, then its value), which is how
Megatron-Core lays out `linear_qkv` too.
"""

from __future__ import annotations

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn.functional import silu

from roll.config import ModelConfig, ParallelSettings
from roll.models.attention import PackedCausalAttention
from roll.models.heads import LanguageModelHead, ValueHead
from roll.models.hf_mapping import mapped_parameters
from roll.models.rms_norm import RMSNorm
from roll.models.rotary import PositionRotaryEmbedding
from roll.parallel.state import ParallelState
from roll.platform import get_platform


def megatron_config(model: ModelConfig, parallel: ParallelSettings, dtype: torch.dtype) -> TransformerConfig:
    """Megatron-Core's config for this model under these degrees.

    Gradients are plain sums: `calculate_per_token_loss` keeps the schedule and the data-parallel wrapper from dividing
    by micro-batches or ranks, because our losses are already divided by their global normaliser.
    """
    on_gpu = get_platform().name != "cpu"
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        layernorm_epsilon=model.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths is refused otherwise, MoE or not.
        perform_initialization=False,  # Weights come from `roll.checkpoint.hf`, random ones too.
        use_cpu_initialization=not on_gpu,
        # The fused kernels below need CUDA (and some of them Apex or transformer-engine).
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def layer_spec(model: ModelConfig) -> ModuleSpec:
    """One decoder layer."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=PackedCausalAttention,
                    linear_proj=RowParallelLinear,
                    # Each rank has the norms whole and its own heads only. Megatron-Core sums their gradients over the
                    # tensor-parallel group by these names, with sequence parallelism and without.
                    q_layernorm=RMSNorm if model.qk_norm else None,
                    k_layernorm=RMSNorm if model.qk_norm else None,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def build_internlm2(
    model: ModelConfig, parallel: ParallelSettings, state: ParallelState, *, dtype: torch.dtype, head: str
) -> GPTModel:
    """This rank's part of the model, with unset weights, on this rank's device.

    Args:
        head: `lm` for the vocabulary projection (`LanguageModelHead`), `value` for one value per token (`ValueHead`).

    The forward pass of the last stage returns `[1, T, H]` hidden states for `lm` (see `LanguageModelHead`) and
    `[1, T, 1]` values for `value`; other stages return hidden states for the next stage.
    """
    with get_platform().quiet_megatron():
        config = megatron_config(model, parallel, dtype)
    num_layers = model.num_hidden_layers // parallel.pp
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer_spec(model)] * num_layers, layer_norm=RMSNorm
        ),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=state.is_first_stage,
        post_process=state.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        pg_collection=state.megatron,
    )
    gpt.rotary_pos_emb = PositionRotaryEmbedding(model)
    if state.is_last_stage:
        gpt.output_layer = _head(head, model, config, state)
        gpt.output_layer.weight.is_embedding_or_output_parameter = True
    # Megatron-Core 0.16 marks split parameters only where it initialises them (0.19 always does). Without the mark, the
    # norm of the gradients counts them on tensor-parallel rank 0 alone.
    for mapped in mapped_parameters(gpt, head):
        if mapped.dim is not None and not hasattr(mapped.parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(mapped.parameter, is_parallel=True, dim=mapped.dim, stride=1)
    return gpt.to(get_platform().device())


def _head(
    head: str, model: ModelConfig, config: TransformerConfig, state: ParallelState
) -> LanguageModelHead | ValueHead:
    if head == "value":
        return ValueHead(config, state.tp)
    assert head == "lm", head
    return LanguageModelHead(
        model.hidden_size,
        model.vocab_size,
        config=config,
        init_method=config.init_method,
        bias=False,
        tp_group=state.tp,
    )
