"""Tiny random causal language models of many architectures, and folders to load them from."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

QUICKSTART = Path(__file__).resolve().parent.parent / "models" / "quickstart"

Fields = dict[str, Any]

TOKENS: Fields = {"vocab_size": 263, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTH: Fields = TOKENS | {"hidden_size": 64}
SIZES: Fields = WIDTH | {
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GROUPED: Fields = SIZES | {"num_key_value_heads": 2}
HEADED: Fields = GROUPED | {"head_dim": 16}
# The names of gpt2 and its kin, and of mpt.
N_EMBD: Fields = TOKENS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
D_MODEL: Fields = TOKENS | {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}

WINDOW: Fields = {"sliding_window": 8}
# A window in one layer and none in the other.
MIXED: Fields = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
# A recurrence in one layer and attention in the other.
LINEAR: Fields = {"layer_types": ["linear_attention", "full_attention"]}

EXPERTS: Fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS: Fields = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS: Fields = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SHARED_EXPERT: Fields = EXPERTS | {"shared_expert_intermediate_size": 32}

LATENT: Fields = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DELTA: Fields = LINEAR | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA: Fields = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
FIRST_MAMBA: Fields = {"mamba_d_state": 8, "mamba_dt_rank": 4}


def _rope(kind: str, **parameters: object) -> Fields:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LLAMA3: Fields = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN: Fields = _rope("yarn", factor=32.0, original_max_position_embeddings=16)


@dataclass(frozen=True)
class Architecture:
    """A model_type of transformers with the fields of a tiny config; the library reads back what it saves of each."""

    kind: str
    fields: Mapping[str, Any]
    attention: Literal["sdpa", "eager"] = "sdpa"
    scale: float = 4.0  # of parameters with more than one dimension, so that attention matters
    causal: bool = True  # logits depend on no later token


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("llama", GROUPED),
        "llama-linear": Architecture("llama", GROUPED | _rope("linear", factor=2.0)),
        "llama-dynamic": Architecture("llama", GROUPED | _rope("dynamic", factor=2.0)),
        # 40 tokens are past what the positions were trained for: frequencies change with the length of the row.
        "llama-dynamic-crossed": Architecture(
            "llama", GROUPED | _rope("dynamic", factor=2.0) | {"max_position_embeddings": 32}
        ),
        "llama-yarn": Architecture("llama", GROUPED | YARN),
        "llama-llama3": Architecture("llama", GROUPED | LLAMA3),
        "llama4_text": Architecture(
            "llama4_text",
            HEADED
            | LOCAL_EXPERTS
            | {
                "intermediate_size_mlp": 96,
                "moe_layers": [1],
                "no_rope_layers": [1, 0],
                "layer_types": ["chunked_attention", "full_attention"],
                "attention_chunk_size": 8,
                "floor_scale": 16,
            },
        ),
        "mistral": Architecture("mistral", HEADED | {"sliding_window": None}),
        "mistral-sliding": Architecture("mistral", HEADED | WINDOW),
        "ministral": Architecture("ministral", HEADED | MIXED),
        "ministral3": Architecture(
            "ministral3",
            HEADED
            | _rope("yarn", factor=32.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1),
        ),
        "mixtral": Architecture("mixtral", HEADED | LOCAL_EXPERTS),
        "qwen2": Architecture("qwen2", GROUPED),
        "qwen2-sliding": Architecture(
            "qwen2", GROUPED | WINDOW | {"use_sliding_window": True, "max_window_layers": 0}
        ),
        "qwen2-mixed": Architecture(
            "qwen2", GROUPED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
        ),
        "qwen2_moe": Architecture("qwen2_moe", GROUPED | SHARED_EXPERT),
        "qwen3": Architecture("qwen3", HEADED),
        "qwen3_moe": Architecture("qwen3_moe", HEADED | EXPERTS),
        "qwen3_next": Architecture("qwen3_next", HEADED | SHARED_EXPERT | DELTA),
        "qwen3_5_text": Architecture("qwen3_5_text", HEADED | DELTA),
        "qwen3_5_moe_text": Architecture("qwen3_5_moe_text", HEADED | SHARED_EXPERT | DELTA),
        "gemma": Architecture("gemma", HEADED),
        "gemma2": Architecture("gemma2", HEADED | MIXED | {"query_pre_attn_scalar": 16}),
        "gemma3_text": Architecture("gemma3_text", HEADED | MIXED | {"query_pre_attn_scalar": 16}),
        "gemma3n_text": Architecture(
            "gemma3n_text",
            HEADED
            | {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 8,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": 263,
                "hidden_size_per_layer_input": 16,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                "laurel_rank": 8,
            },
        ),
        "gemma4_text": Architecture(
            "gemma4_text",
            HEADED
            | MIXED
            | {"global_head_dim": 32, "vocab_size_per_layer_input": 263, "hidden_size_per_layer_input": 16},
        ),
        "gemma4_text-shared": Architecture(
            "gemma4_text",
            HEADED
            | {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 8,
                "num_kv_shared_layers": 2,
                "global_head_dim": 32,
                "vocab_size_per_layer_input": 263,
                "hidden_size_per_layer_input": 16,
            },
        ),
        "gemma4_text-moe": Architecture(
            "gemma4_text",
            HEADED
            | MIXED
            | {
                "global_head_dim": 32,
                "vocab_size_per_layer_input": 263,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
            },
        ),
        "vaultgemma": Architecture("vaultgemma", HEADED | MIXED | {"query_pre_attn_scalar": 16}),
        "recurrent_gemma": Architecture(
            "recurrent_gemma",
            WIDTH
            | {
                "intermediate_size": 192,  # of both halves of the gate
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "lru_width": 64,
                "attention_window_size": 8,
                "block_types": ["recurrent", "attention"],
            },
        ),
        "phi": Architecture("phi", GROUPED),
        "phi3": Architecture("phi3", GROUPED),
        "phi3-sliding": Architecture("phi3", GROUPED | WINDOW),
        "phi3-longrope": Architecture(
            "phi3",
            GROUPED
            | {"original_max_position_embeddings": 256}
            | _rope(
                "longrope",
                short_factor=[1.0] * 8,
                long_factor=[4.0] * 8,
                original_max_position_embeddings=256,
            ),
        ),
        # 40 tokens take the long factors, 24 the short ones.
        "phi3-longrope-crossed": Architecture(
            "phi3",
            GROUPED
            | {"original_max_position_embeddings": 32}
            | _rope(
                "longrope",
                short_factor=[1.0] * 8,
                long_factor=[4.0] * 8,
                original_max_position_embeddings=32,
            ),
        ),
        "phimoe": Architecture("phimoe", GROUPED | LOCAL_EXPERTS),
        "olmo": Architecture("olmo", GROUPED),
        "olmo2": Architecture("olmo2", GROUPED),
        "olmo3": Architecture("olmo3", GROUPED | MIXED),
        "olmoe": Architecture("olmoe", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
        "flex_olmo": Architecture("flex_olmo", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
        "olmo_hybrid": Architecture("olmo_hybrid", GROUPED | DELTA | {"linear_num_key_heads": 4}),
        "smollm3": Architecture("smollm3", GROUPED | {"no_rope_layers": [1, 0]}),
        "granite": Architecture(
            "granite",
            GROUPED
            | {
                "attention_multiplier": 0.25,
                "embedding_multiplier": 2.0,
                "residual_multiplier": 0.5,
                "logits_scaling": 2.0,
            },
        ),
        "granite_swa": Architecture("granite_swa", GROUPED | MIXED, attention="eager"),
        "granitemoe": Architecture("granitemoe", GROUPED | LOCAL_EXPERTS),
        "granitemoeshared": Architecture(
            "granitemoeshared", GROUPED | LOCAL_EXPERTS | {"shared_intermediate_size": 32}
        ),
        "granitemoehybrid": Architecture(
            "granitemoehybrid", GROUPED | LOCAL_EXPERTS | LINEAR | MAMBA | {"shared_intermediate_size": 32}
        ),
        "bamba": Architecture("bamba", GROUPED | MAMBA | {"attn_layer_indices": [1]}),
        "cohere": Architecture("cohere", GROUPED | {"logit_scale": 0.25}),
        "cohere2": Architecture("cohere2", HEADED | MIXED | {"logit_scale": 0.25}),
        "glm": Architecture("glm", HEADED),
        "glm4": Architecture("glm4", HEADED),
        "glm4_moe": Architecture("glm4_moe", HEADED | ROUTED_EXPERTS),
        "glm4_moe_lite": Architecture(
            "glm4_moe_lite", SIZES | LATENT | ROUTED_EXPERTS | {"mlp_layer_types": ["dense", "sparse"]}
        ),
        "ernie4_5": Architecture("ernie4_5", HEADED),
        "ernie4_5_moe": Architecture(
            "ernie4_5_moe",
            GROUPED
            | {
                "moe_num_experts": 4,
                "moe_k": 2,
                "moe_num_shared_experts": 1,
                "moe_intermediate_size": 32,
                "moe_layer_end_index": 1,
            },
        ),
        "seed_oss": Architecture("seed_oss", HEADED),
        "hunyuan_v1_dense": Architecture("hunyuan_v1_dense", HEADED),
        "hunyuan_v1_moe": Architecture("hunyuan_v1_moe", HEADED | {"num_experts": 4, "moe_topk": 2}),
        "exaone4": Architecture("exaone4", GROUPED | MIXED),
        "helium": Architecture("helium", HEADED),
        "nemotron": Architecture("nemotron", HEADED),
        "nemotron_h": Architecture(
            "nemotron_h",
            WIDTH
            | ROUTED_EXPERTS
            | {
                "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
                "intermediate_size": 96,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 512,
                "mamba_num_heads": 4,
                "mamba_head_dim": 32,
                "ssm_state_size": 16,
                "n_groups": 1,
                "chunk_size": 8,
                "moe_shared_expert_intermediate_size": 32,
            },
        ),
        "starcoder2": Architecture("starcoder2", GROUPED),
        "starcoder2-sliding": Architecture("starcoder2", GROUPED | WINDOW),
        "stablelm": Architecture("stablelm", GROUPED),
        "persimmon": Architecture("persimmon", SIZES),
        "falcon": Architecture("falcon", SIZES | {"ffn_hidden_size": 96}),
        "falcon-alibi": Architecture(
            "falcon", SIZES | {"ffn_hidden_size": 96, "alibi": True, "multi_query": False}
        ),
        "falcon-new": Architecture(
            "falcon", SIZES | {"ffn_hidden_size": 96, "new_decoder_architecture": True, "num_kv_heads": 2}
        ),
        "falcon_h1": Architecture("falcon_h1", HEADED | MAMBA | {"mamba_d_ssm": 128}),
        "falcon_mamba": Architecture(
            "falcon_mamba",
            WIDTH | {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
            attention="eager",
        ),
        "bloom": Architecture("bloom", WIDTH | {"n_layer": 2, "n_head": 4}, attention="eager"),
        "mpt": Architecture("mpt", D_MODEL | {"expansion_ratio": 2}, attention="eager"),
        "dbrx": Architecture(
            "dbrx",
            D_MODEL
            | {
                "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
                "ffn_config": {
                    "hidden_size": 64,
                    "ffn_hidden_size": 96,
                    "moe_num_experts": 4,
                    "moe_top_k": 2,
                },
            },
        ),
        "gpt2": Architecture("gpt2", N_EMBD | {"n_inner": 96}),
        "gpt_bigcode": Architecture("gpt_bigcode", N_EMBD | {"n_inner": 96}),
        "gpt_bigcode-heads": Architecture("gpt_bigcode", N_EMBD | {"n_inner": 96, "multi_query": False}),
        "gptj": Architecture("gptj", N_EMBD | {"n_inner": 96, "rotary_dim": 8}, attention="eager"),
        "codegen": Architecture(
            "codegen", N_EMBD | {"n_inner": 96, "rotary_dim": 8, "n_ctx": 512}, attention="eager"
        ),
        "ctrl": Architecture("ctrl", N_EMBD | {"dff": 96}),
        "openai-gpt": Architecture("openai-gpt", N_EMBD, attention="eager"),
        "gpt_neo": Architecture(
            "gpt_neo",
            WIDTH
            | {
                "intermediate_size": 96,
                "max_position_embeddings": 512,
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 8,
            },
            attention="eager",
        ),
        "gpt_neox": Architecture("gpt_neox", SIZES),
        "gpt_oss": Architecture("gpt_oss", HEADED | LOCAL_EXPERTS | MIXED | YARN, attention="eager"),
        "opt": Architecture("opt", SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        "opt-projected": Architecture(
            "opt", SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}
        ),
        "xglm": Architecture(
            "xglm",
            TOKENS
            | {
                "d_model": 64,
                "ffn_dim": 96,
                "num_layers": 2,
                "attention_heads": 4,
                "max_position_embeddings": 512,
            },
            attention="eager",
        ),
        "biogpt": Architecture("biogpt", SIZES),
        "deepseek_v2": Architecture(
            "deepseek_v2", SIZES | LATENT | ROUTED_EXPERTS | {"first_k_dense_replace": 1}
        ),
        "deepseek_v3": Architecture(
            "deepseek_v3",
            SIZES | LATENT | ROUTED_EXPERTS | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        ),
        "minicpm3": Architecture("minicpm3", SIZES | LATENT | {"dim_model_base": 32}),
        "youtu": Architecture("youtu", SIZES | LATENT | {"embedding_initializer_range": 0.02}),
        "longcat_flash": Architecture(
            "longcat_flash",
            WIDTH
            | LATENT
            | {
                "num_layers": 2,
                "num_attention_heads": 4,
                "head_dim": 8,
                "max_position_embeddings": 512,
                "ffn_hidden_size": 96,
                "expert_ffn_hidden_size": 32,
                "n_routed_experts": 4,
                "zero_expert_num": 2,
                "moe_topk": 2,
            },
        ),
        "kimi_linear": Architecture(
            "kimi_linear",
            WIDTH
            | LATENT
            | LINEAR
            | {
                "q_lora_rank": None,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "model_max_length": 512,
                "mlp_layer_types": ["dense", "sparse"],
                "moe_intermediate_size": 32,
                "num_experts": 4,
                "num_experts_per_token": 2,
                "linear_num_heads": 4,
                "linear_head_dim": 16,
            },
        ),
        "mamba": Architecture(
            "mamba",
            WIDTH | {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
            attention="eager",
            scale=2.0,
        ),
        "mamba2": Architecture(
            "mamba2",
            WIDTH
            | {
                "num_hidden_layers": 2,
                "num_heads": 4,
                "head_dim": 32,
                "state_size": 16,
                "n_groups": 1,
                "chunk_size": 8,
            },
            attention="eager",
        ),
        "jamba": Architecture(
            "jamba",
            GROUPED
            | FIRST_MAMBA
            | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        ),
        "zamba": Architecture(
            "zamba",
            GROUPED
            | FIRST_MAMBA
            | {
                "num_hidden_layers": 4,
                "num_key_value_heads": 4,
                "layers_block_type": ["linear_attention", "hybrid"] * 2,
                "attention_hidden_size": 128,
                "attention_head_dim": 32,
                "n_mamba_heads": 2,
            },
        ),
        "zamba2": Architecture(
            "zamba2",
            GROUPED
            | {
                "num_hidden_layers": 3,
                "num_key_value_heads": 4,
                "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
                "n_mamba_heads": 4,
                "mamba_headdim": 32,
                "mamba_d_state": 16,
                "chunk_size": 8,
                "adapter_rank": 8,
            },
        ),
        "lfm2": Architecture(
            "lfm2", GROUPED | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
        ),
        "lfm2_moe": Architecture(
            "lfm2_moe",
            GROUPED | EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        ),
        "rwkv": Architecture(
            "rwkv",
            WIDTH
            | {
                "num_hidden_layers": 2,
                "attention_hidden_size": 64,
                "intermediate_size": 96,
                "context_length": 512,
            },
            attention="eager",
        ),
        "xlstm": Architecture(
            "xlstm",
            WIDTH
            | {
                "embedding_dim": 64,
                "num_hidden_layers": 2,
                "num_blocks": 2,
                "num_heads": 4,
                "chunk_size": 8,
                "qk_dim_factor": 1.0,
            },
            attention="eager",
        ),
        "minimax": Architecture("minimax", HEADED | LOCAL_EXPERTS | LINEAR | {"block_size": 8}),
        "minimax_m2": Architecture("minimax_m2", HEADED | LOCAL_EXPERTS),
        "bitnet": Architecture("bitnet", GROUPED),
        "apertus": Architecture("apertus", GROUPED | LLAMA3),
        "arcee": Architecture("arcee", HEADED),
        "cwm": Architecture("cwm", HEADED | MIXED | LLAMA3),
        "doge": Architecture("doge", GROUPED),
        "diffllama": Architecture("diffllama", HEADED),
        "dots1": Architecture(
            "dots1", HEADED | ROUTED_EXPERTS | WINDOW | {"first_k_dense_replace": 1, "max_window_layers": 1}
        ),
        "afmoe": Architecture("afmoe", HEADED | EXPERTS | MIXED | {"num_shared_experts": 1}),
        "nanochat": Architecture("nanochat", GROUPED),
        "solar_open": Architecture("solar_open", HEADED | ROUTED_EXPERTS),
        "modernbert-decoder": Architecture(
            "modernbert-decoder",
            SIZES
            | {
                "layer_types": ["full_attention", "sliding_attention"],
                "local_attention": 16,
                "cls_token_id": 1,
                "sep_token_id": 2,
            },
        ),
        "mimo_v2_flash": Architecture(
            "mimo_v2_flash",
            HEADED | ROUTED_EXPERTS | MIXED | {"v_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
            attention="eager",
        ),
        "jetmoe": Architecture("jetmoe", GROUPED | LOCAL_EXPERTS | {"kv_channels": 16}),
        "reformer": Architecture(
            "reformer",
            SIZES
            | {
                "is_decoder": True,
                "attention_head_size": 16,
                "feed_forward_size": 96,
                "attn_layers": ["local", "local"],
                "axial_pos_embds": False,
                "local_attn_chunk_length": 8,
            },
            attention="eager",
        ),
        "reformer-lsh": Architecture(
            "reformer",
            SIZES
            | {
                "is_decoder": True,
                "attention_head_size": 16,
                "feed_forward_size": 96,
                "attn_layers": ["local", "lsh"],
                "axial_pos_embds": False,
                "local_attn_chunk_length": 8,
                "lsh_attn_chunk_length": 8,
                "num_buckets": 4,
                "hash_seed": 0,
            },
            attention="eager",
            causal=False,  # which tokens share a bucket depends on all of them
        ),
        "xlnet": Architecture(
            "xlnet",
            TOKENS | {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96, "attn_type": "uni"},
            attention="eager",
        ),
        "xlnet-both-ways": Architecture(
            "xlnet",
            TOKENS | {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96},
            attention="eager",
            causal=False,
        ),
        "hyperclovax": Architecture("hyperclovax", HEADED),
        "jais2": Architecture("jais2", HEADED),
        "exaone_moe": Architecture(
            "exaone_moe", HEADED | EXPERTS | MIXED | {"mlp_layer_types": ["dense", "sparse"]}
        ),
        "mellum": Architecture("mellum", HEADED | EXPERTS | MIXED),
        "laguna": Architecture(
            "laguna",
            HEADED
            | SHARED_EXPERT
            | MIXED
            | {"num_attention_heads_per_layer": [4, 4], "mlp_layer_types": ["dense", "sparse"]},
        ),
        "granitemoe_swa": Architecture("granitemoe_swa", GROUPED | LOCAL_EXPERTS | MIXED, attention="eager"),
        "zaya": Architecture("zaya", HEADED | EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 32}),
        "roberta": Architecture("roberta", SIZES | {"is_decoder": True}),
        "electra": Architecture("electra", SIZES | {"embedding_size": 32, "is_decoder": True}),
        "bart": Architecture(
            "bart",
            TOKENS
            | {
                "d_model": 64,
                "decoder_layers": 2,
                "decoder_attention_heads": 4,
                "decoder_ffn_dim": 96,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 96,
                "max_position_embeddings": 512,
            },
        ),
        "deepseek_v32": Architecture(
            "deepseek_v32",
            SIZES
            | LATENT
            | ROUTED_EXPERTS
            | {
                "index_topk": 8,
                "index_n_heads": 16,
                "index_head_dim": 16,
                "first_k_dense_replace": 1,
                "n_group": 2,
                "topk_group": 1,
            },
        ),
        "gpt_neox_japanese": Architecture(
            "gpt_neox_japanese", SIZES | {"intermediate_multiple_size": 2}, attention="eager"
        ),
        "cohere2_moe": Architecture(
            "cohere2_moe",
            HEADED
            | MIXED
            | {
                "num_experts_per_tok": 2,
                "logit_scale": 0.25,
                "num_experts": 4,
                "mlp_layer_types": ["sparse", "sparse"],
            },
        ),
        "hrm_text": Architecture(
            "hrm_text", SIZES | {"num_hidden_layers": 8, "head_dim": 16, "num_layers_per_stack": 1}
        ),
        "xlm": Architecture(
            "xlm",
            TOKENS
            | {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 512, "causal": True},
            attention="eager",
        ),
        "bert": Architecture("bert", SIZES | {"is_decoder": True}),
        "bert-both-ways": Architecture("bert", SIZES, causal=False),
    }
)


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """The architecture's model with random weights, in float32 and ready for evaluation."""
    made = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(made.kind, **made.fields),
        dtype=torch.float32,
        attn_implementation=made.attention,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(made.scale)
    model.generation_config.eos_token_id = 2
    return model.eval()


def save_tiny(name: str, folder: Path) -> None:
    """The model of tiny and the quickstart's tokenizer as a Hugging Face folder."""
    tiny(name).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / file, folder)
