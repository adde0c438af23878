"""GPT-2: Hugging Face names and settings; its Conv1D weights are [in, out], like ours."""

from jaxtrain.config.key_table import only
from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.weights import config_file
from jaxtrain.models.weights.config_file import Row, constant, derive, ignore, integer, number
from jaxtrain.models.weights.family import Family, Name, layer_norm, linear

_LAYER = "transformer.h.{L}"
_NAMES = (
    Name("transformer.wte.weight", "token_embedding", "VD->VD"),
    Name("transformer.wpe.weight", "position_embedding", "CD->CD"),
    *layer_norm(f"{_LAYER}.ln_1", "layers/attention_norm", "LD->D"),
    *linear(f"{_LAYER}.attn.c_attn", "layers/qkv", "LPDNH->D(PNH)", "LPNH->(PNH)"),
    *linear(f"{_LAYER}.attn.c_proj", "layers/out", "LNHD->(NH)D", "LD->D"),
    *layer_norm(f"{_LAYER}.ln_2", "layers/mlp_norm", "LD->D"),
    *linear(f"{_LAYER}.mlp.c_fc", "layers/up", "LDF->DF", "LF->F"),
    *linear(f"{_LAYER}.mlp.c_proj", "layers/down", "LFD->FD", "LD->D"),
    *layer_norm("transformer.ln_f", "norm", "D->D"),
)
_GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    model=GPT,
    rows=(
        Row(config_file.LANGUAGE),
        integer("vocab_size", "vocab_size"),
        integer("n_layer", "num_layers"),
        integer("n_embd", "embed_dim"),
        integer("n_head", "num_heads"),
        integer("n_positions", "context_length", 1024),
        derive("n_inner", lambda config: 4 * config.integer("n_embd"), lambda _: None),
        number("layer_norm_epsilon", "norm_eps", 1e-5),
        constant("activation_function", "gelu_new", "gelu_pytorch_tanh"),
        constant("tie_word_embeddings", True),
        ignore("n_positions says it", "n_ctx"),
        ignore(
            "it belongs to a second head, which is not imported",
            "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
            "summary_first_dropout", "predict_special_tokens",
        ),
        ignore("softmax is float32 here anyway", "reorder_and_upcast_attn"),
        Row({"scale_attn_weights": only(True), "scale_attn_by_inverse_layer_idx": only(False)}),
    ),
    names=lambda _: _NAMES,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    # The causal mask, in files of transformers before 4.
    buffers=r".*\.attn\.(bias|masked_bias)",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    dequantized=(),  # its matrices are stored [in, out], unlike linear layers
)  # fmt: skip

FAMILIES = (_GPT2,)
