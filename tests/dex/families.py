"""Tiny random decoders of many families of transformers, and of this library."""

import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 48}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
# name -> model type, options, heads and value width, rows that write keys or values by ending
FAMILIES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "gemma2": ("gemma2", {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 5}),
    "gemma3": ("gemma3_text", {"head_dim": 12, "sliding_window": 5}),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "olmo2": ("olmo2", {}),
    "stablelm": ("stablelm", {}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "diffllama": ("diffllama", {}),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 4}),
}
OURS = ["softmax", "v1-gqa", "v2-gqa", "grouped", "gated qk-norm"]
NAMES = [*FAMILIES, *(f"diffattn {kind}" for kind in OURS)]


def build(name, **options):
    """A tiny random model in evaluation mode."""
    torch.manual_seed(1)
    if name.startswith("diffattn "):
        return tiny.model(name.removeprefix("diffattn "), "eager", **options)
    kind, chosen = FAMILIES[name]
    config = AutoConfig.for_model(kind, **{**SIZES, **chosen, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def heads(name):
    """Heads and value width that the output projection reads."""
    known = {
        "qwen3": (4, 12),
        "gemma2": (4, 12),
        "gemma3": (4, 12),
        "deepseek_v3": (4, 6),
        "diffllama": (2, 16),
        "diffattn softmax": (8, 8),
        "diffattn v2-gqa": (8, 8),
    }
    return known.get(name, (4, 16) if name.startswith("diffattn") else (4, 8))


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# name -> options, what the refusal says
REFUSED = {
    "mamba": ({"state_size": 8}, "has no attention"),
    "mamba2": ({"state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 1}, "got None"),
    "rwkv": ({"attention_hidden_size": 32}, "no keys and values; linear maps found: rwkv"),
    "qwen3_next": (
        {"num_hidden_layers": 4, "head_dim": 8, "shared_expert_intermediate_size": 16}
        | LINEAR
        | FEW_EXPERTS,
        r"layers \[0, 1, 2\]: linear_attn.out_proj; layers \[3\]: self_attn.o_proj",
    ),
}


def build_refused(kind):
    """A tiny model whose layers are not, or not all, attention."""
    options, _ = REFUSED[kind]
    sizes = {name: value for name, value in SIZES.items() if "attention_heads" not in name}
    kept = SIZES if kind == "qwen3_next" else sizes
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**kept, **options}))
