"""Published config.json files are read: their keys, as their authors and older libraries wrote."""

from typing import Any

import pytest

from jaxtrain.models.transformers.vit import ViT
from jaxtrain.models.weights.family import families, model_of
from jaxtrain.models.weights.preprocessor import image_settings

DECODER = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.2",
    "use_cache": True,
}  # fmt: skip
ENCODER = {
    "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02, "layer_norm_eps": 1e-12, "model_type": "bert",
    "max_position_embeddings": 512, "num_attention_heads": 12, "pad_token_id": 0,
    "type_vocab_size": 2, "vocab_size": 30522,
}  # fmt: skip
QWEN = {
    **DECODER, "max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "eos_token_id": [151645, 151643],
}  # fmt: skip
QWEN_MOE = {
    **QWEN, "decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
DEEPSEEK = {
    **DECODER, "attention_bias": False, "auto_map": {"AutoConfig": "configuration_deepseek.C"},
    "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "pretraining_tp": 1,
    "seq_aux": True, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip


def sizes(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, length: int):  # noqa: ANN201
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
        "max_position_embeddings": length,
    }  # fmt: skip


# A model -> its file, and sizes that are read from it.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SmolLM2-135M": ({
        **DECODER, **sizes(576, 1536, 30, 9, 3, 49152, 8192), "model_type": "llama",
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False,
        "is_llama_config": True, "pretraining_tp": 1, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    }, {"rope_theta": 100000.0, "tie_embeddings": True}),
    "Llama-3.2-1B": ({
        **DECODER, **sizes(2048, 8192, 16, 32, 8, 128256, 131072), "model_type": "llama",
        "architectures": ["LlamaForCausalLM"], "head_dim": 64, "attention_bias": False,
        "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 500000.0, "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    }, {"rope_theta": 500000.0, "rope_scaling": 32.0}),
    "Mistral-7B": ({
        **DECODER, **sizes(4096, 14336, 32, 32, 8, 32000, 32768), "model_type": "mistral",
        "architectures": ["MistralForCausalLM"], "sliding_window": 4096,
    }, {"sliding_window": 4096}),
    "Mixtral-8x7B": ({
        **DECODER, **sizes(4096, 14336, 32, 32, 8, 32000, 32768), "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2, "num_local_experts": 8,
        "output_router_logits": False, "router_aux_loss_coef": 0.02, "rope_theta": 1000000.0,
        "sliding_window": None,
    }, {"balance_weight": 0.02, "rope_theta": 1000000.0}),
    "Qwen2.5-Math-1.5B": ({
        **QWEN, **sizes(1536, 8960, 28, 12, 2, 151936, 4096), "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"], "use_mrope": False,
    }, {"qkv_bias": True, "sliding_window": None}),
    "Qwen3-0.6B": ({
        **QWEN, **sizes(1024, 3072, 28, 16, 8, 151936, 40960), "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
        "rope_scaling": None,
    }, {"head_dim": 128, "qk_norm": True}),
    "Qwen3-30B-A3B": ({
        **QWEN_MOE, **sizes(2048, 6144, 48, 32, 4, 151936, 40960), "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "head_dim": 128,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_experts": 128, "num_experts_per_tok": 8, "rope_scaling": None,
    }, {"num_experts": 128, "mlp_dim": 768}),
    "Qwen1.5-MoE-A2.7B": ({
        **QWEN_MOE, **sizes(2048, 5632, 24, 16, 16, 151936, 8192), "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"], "moe_intermediate_size": 1408,
        "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": 5632,
    }, {"num_experts": 60, "shared_mlp_dim": 5632}),
    "gemma-2b": ({
        **DECODER, **sizes(2048, 16384, 18, 8, 1, 256000, 8192), "model_type": "gemma",
        "architectures": ["GemmaForCausalLM"], "attention_bias": False, "head_dim": 256,
        "hidden_act": "gelu", "hidden_activation": None, "rope_scaling": None,
        "tie_word_embeddings": True,
    }, {"head_dim": 256}),
    "gemma-2-2b": ({
        **DECODER, **sizes(2304, 9216, 26, 8, 4, 256000, 8192), "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "head_dim": 256,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "sliding_window_size": 4096, "tie_word_embeddings": True,
    }, {"attention_softcap": 50.0, "global_every": 2}),
    "gemma-3-1b": ({
        **{key: value for key, value in DECODER.items() if key != "hidden_act"},
        **sizes(1152, 6912, 26, 4, 1, 262144, 32768), "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "head_dim": 256,
        "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "tie_word_embeddings": True,
    }, {"global_every": 6, "local_rope_theta": 10000.0}),
    "Phi-3-mini-4k": ({
        **DECODER, **sizes(3072, 8192, 32, 32, 32, 32064, 4096), "model_type": "phi3",
        "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0, "original_max_position_embeddings": 4096, "pad_token_id": 32000,
        "resid_pdrop": 0.0, "rope_scaling": None, "sliding_window": 2047,
    }, {"sliding_window": 2047}),
    "gpt-oss-20b": ({
        **DECODER, **sizes(2880, 2880, 24, 64, 8, 201088, 131072), "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4,
        "head_dim": 64, "initial_context_length": 4096, "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32,
        "output_router_logits": False, "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4",
        },
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0,
    }, {"rope_theta": 150000.0, "rope_scaling": 32.0, "balance_weight": 0.0}),
    "DeepSeek-V2-Lite": ({
        **DEEPSEEK, **sizes(2048, 10944, 27, 16, 16, 102400, 163840), "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1,
        "kv_lora_rank": 512, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
        "topk_method": "greedy", "v_head_dim": 128,
    }, {"num_experts": 64, "rope_scaling": 40.0}),
    "gpt2": ({
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }, {"embed_dim": 768}),
    "bert-base-multilingual": ({
        **ENCODER, **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
        "architectures": ["BertForMaskedLM"], "classifier_dropout": None,
        "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3, "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform", "position_embedding_type": "absolute",
    }, {"embed_dim": 768}),
    "all-MiniLM-L6": ({
        **ENCODER, **{"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6},
        "_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"],
        "gradient_checkpointing": False, "position_embedding_type": "absolute",
        "sentence_transformers": {
            "modules": ["Transformer", "Pooling", "Normalize"],
            "transformer": {"max_seq_length": 256, "do_lower_case": False},
            "whole": {"__version__": {"pytorch": "1.8.1"}},
            "pooling": {
                "word_embedding_dimension": 384, "pooling_mode_cls_token": False,
                "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False,
                "pooling_mode_mean_sqrt_len_tokens": False,
            },
        },
    }, {"pooling": "mean", "normalized": True}),
    "roberta-base": ({
        **ENCODER, **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
        "architectures": ["RobertaForMaskedLM"], "bos_token_id": 0, "eos_token_id": 2,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "model_type": "roberta",
        "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 50265,
    }, {"context_length": 512, "first_position": 2}),
    "t5-small": ({
        "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
        "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1,
        "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06,
        "model_type": "t5", "n_positions": 512, "num_heads": 8, "num_layers": 6,
        "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32,
        "task_specific_params": {"summarization": {"num_beams": 4}}, "vocab_size": 32128,
    }, {"embed_dim": 512}),
    "mamba-130m": ({
        "architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4,
        "d_inner": 1536, "d_model": 768, "eos_token_id": 0, "expand": 2, "fused_add_norm": True,
        "hidden_act": "silu", "hidden_size": 768, "initializer_range": 0.1,
        "intermediate_size": 1536, "layer_norm_epsilon": 1e-05, "model_type": "mamba",
        "n_layer": 24, "num_hidden_layers": 24, "pad_token_id": 0, "pad_vocab_size_multiple": 8,
        "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True,
        "ssm_cfg": {}, "state_size": 16, "time_step_floor": 0.0001,
        "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001,
        "time_step_rank": 48, "time_step_scale": 1.0, "torch_dtype": "float32",
        "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 50280,
    }, {"embed_dim": 768}),
    "vit-base": ({
        "architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768,
        "id2label": {"0": "cat", "1": "dog"}, "image_size": 224, "initializer_range": 0.02,
        "intermediate_size": 3072, "label2id": {"cat": "0", "dog": "1"},
        "layer_norm_eps": 1e-12, "model_type": "vit", "num_attention_heads": 12,
        "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": True,
    }, {"num_classes": 2}),
    "resnet-50": ({
        "architectures": ["ResNetForImageClassification"], "depths": [3, 4, 6, 3],
        "downsample_in_first_stage": False, "embedding_size": 64, "hidden_act": "relu",
        "hidden_sizes": [256, 512, 1024, 2048], "id2label": {"0": "cat", "1": "dog"},
        "label2id": {"cat": 0, "dog": 1}, "layer_type": "bottleneck", "model_type": "resnet",
        "num_channels": 3, "out_features": None, "torch_dtype": "float32",
        "stage_names": ["stem", "stage1", "stage2", "stage3", "stage4"],
    }, {"depth": 50}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name):
    content, said = PUBLISHED[name]
    _, model = model_of(content, where=name)
    assert {key: getattr(model, key) for key in said} == said


def test_most_families_stand_here():
    found = {content["architectures"][0] for content, _ in PUBLISHED.values()}
    others = {"DeepseekV3ForCausalLM", "Mamba2ForCausalLM", "RobertaModel",
              "BertForSequenceClassification"}  # fmt: skip
    assert {family.architecture for family in families()} - others == found


def test_published_image_processors_are_read():
    plain = {"do_normalize": True, "do_resize": True, "image_mean": [0.5] * 3, "size": 224,
             "image_std": [0.5] * 3}  # fmt: skip
    assert image_settings(plain, ViT(), where="vit")["resize"] == "stretch"
    newer = {
        **plain, "image_processor_type": "ViTImageProcessor", "resample": 2, "do_rescale": True,
        "rescale_factor": 0.00392156862745098, "size": {"height": 224, "width": 224},
        "do_convert_rgb": None,
    }  # fmt: skip
    assert image_settings(newer, ViT(), where="vit") == image_settings(plain, ViT(), where="vit")
