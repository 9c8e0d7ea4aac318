"""A model of any family as a Megatron-Core `GPTModel`, through a layer spec of our own.

The architecture is a pre-norm decoder with grouped-query attention, RoPE, RMSNorm and SwiGLU. The canonical `wqkv` has
rows `[kv_heads, q_per_kv + 2, head_dim]` (the queries of a group, then its key, then its value), which is how
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
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn.functional import silu

from roll.config import Head, Mode, ModelConfig, ParallelSettings
from roll.families.tensors import EMBEDDING, OUTPUT
from roll.models.all_gather_attention import AllGatherAttention
from roll.models.attention import PackedCausalAttention
from roll.models.embedding import HiddenParallelEmbedding
from roll.models.heads import HandOn, LanguageModelHead, ValueHead
from roll.models.hf_mapping import mapped_parameters
from roll.models.linears import BiasedRowParallelLinear, GateAndUpLinear, GatherOnceColumnParallelLinear, SwiGLU
from roll.models.ring_attention import RingAttention
from roll.models.rms_norm import RMSNorm
from roll.models.rotary import PositionRotaryEmbedding
from roll.models.self_attention import GroupedQueryAttention
from roll.models.ulysses import UlyssesAttention
from roll.models.weight_rules import is_trained
from roll.models.weight_sharding import shard_weights
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
        add_bias_linear=False,  # For wo and the MLP alike; wo's bias comes with its layer.
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
        use_cpu_initialization=True,  # It is built without memory, see `build_model`.
        use_te_activation_func=not on_gpu,  # The activation of the layer spec, which is ours.
        # The fused kernels below need CUDA (and some of them Apex or transformer-engine).
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def layer_spec(parallel: ParallelSettings, model: ModelConfig) -> ModuleSpec:
    """One decoder layer: Megatron-Core's, with the linears and the attention of the mode."""
    mode = parallel.mode
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=GroupedQueryAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=GatherOnceColumnParallelLinear if mode == "msp" else ColumnParallelLinear,
                    core_attention=core_attention(parallel),
                    linear_proj=BiasedRowParallelLinear if model.bias else RowParallelLinear,
                    # Each rank has the norms whole and its own heads only. Megatron-Core sums their gradients over the
                    # tensor-parallel group by these names, with sequence parallelism and without.
                    q_layernorm=RMSNorm if model.qk_norm else None,
                    k_layernorm=RMSNorm if model.qk_norm else None,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=_GATE_AND_UP[mode], activation_func=SwiGLU, linear_fc2=RowParallelLinear
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def core_attention(parallel: ParallelSettings) -> type[torch.nn.Module]:
    """Attention between the tokens of the ranks over which a sequence is split, or of the only one."""
    if parallel.mode == "isp":
        return UlyssesAttention
    if parallel.cp == 1:
        return PackedCausalAttention
    return {"a2a": UlyssesAttention, "all_gather": AllGatherAttention, "ring": RingAttention}[parallel.cp_comm]


_GATE_AND_UP = {
    "mtp": ColumnParallelLinear,
    "msp": GatherOnceColumnParallelLinear,
    "fsp": ColumnParallelLinear,
    "isp": GateAndUpLinear,
}


def build_model(
    model: ModelConfig,
    parallel: ParallelSettings,
    state: ParallelState,
    *,
    dtype: torch.dtype,
    head: Head,
    stored_dtype: torch.dtype | None = None,
) -> GPTModel:
    """This rank's part of the model, with unset weights, on this rank's device.

    Args:
        dtype: of activations, and of the weights when they are used.
        head: `lm` for the vocabulary projection (`LanguageModelHead`), `value` for one value per token (`ValueHead`).
        stored_dtype: of the weights where they are split while they are not used (mode isp); `dtype` unless given.

    The forward pass of the last stage returns hidden states `[b, s, H]` for `lm`, on which `gpt.head` computes what is
    asked (`[b, s/n, H]` where the sequence is split over n tensor-parallel ranks), and values `[b, s, 1]` for `value`;
    other stages return hidden states for the next stage. s are the tokens of a row that this rank's part of the
    context-parallel split has (`PackedSequence.own`): all of them unless there is such a split.
    """
    platform = get_platform()
    with platform.quiet_megatron():
        config = megatron_config(model, parallel, dtype)
    if state.mode == "isp":
        config.params_dtype = stored_dtype or dtype
    layers = [layer_spec(parallel, model)] * (model.num_hidden_layers // parallel.pp)
    # Nothing is allocated before it is known which part of it this rank keeps.
    with torch.device("meta"):
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_position_embeddings,
            pre_process=state.is_first_stage,
            post_process=state.is_last_stage,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            pg_collection=state.megatron,
        )
        if state.is_first_stage:
            gpt.embedding = HiddenParallelEmbedding(model.vocab_size, config, state.tp)
        if state.is_last_stage and head == "lm":
            gpt.output_layer = HandOn()
            gpt.head = LanguageModelHead(model.vocab_size, config, state)
        elif state.is_last_stage:
            gpt.output_layer = ValueHead(config, state)
    if state.weight_mesh is not None:
        shard_weights(gpt, state.weight_mesh, dtype)
    gpt.to_empty(device=platform.device())
    gpt.rotary_pos_emb = PositionRotaryEmbedding(model).to(platform.device())
    if state.mode != "isp":
        _mark_parameters(gpt, state.mode)
    for mapped in mapped_parameters(gpt, state.mode):
        mapped.parameter.requires_grad_(mapped.trained)
    if state.is_first_stage and model.tie_word_embeddings and head == "lm":
        assert is_trained(EMBEDDING) == is_trained(OUTPUT), "tied weights are trained together"
        gpt.embedding.weight.shared = True  # The norm of the gradients counts the output layer's copy only.
    return gpt


def _mark_parameters(gpt: GPTModel, mode: Mode) -> None:
    """Tell Megatron-Core how the gradients of each parameter are to be treated.

    Of split parameters each rank has a part; without the mark, the norm of the gradients counts them on
    tensor-parallel rank 0 alone. Of whole parameters each rank has a copy, which under sequence parallelism has seen
    its own tokens only: Megatron-Core sums their gradients over tp (finalize_model_grads.py:318).
    """
    for mapped in mapped_parameters(gpt, mode):
        if mapped.split is None:
            mapped.parameter.sequence_parallel = mode in ("msp", "fsp")  # type: ignore[attr-defined]
        elif not hasattr(mapped.parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(mapped.parameter, is_parallel=True, dim=mapped.split.dim, stride=1)
