"""Key table of config.json that both versions of Mamba share."""

from jaxtrain.config.key_table import KeyTable, irrelevant, only, used
from jaxtrain.models.weights import config_keys

KEYS: KeyTable = {
    **config_keys.LANGUAGE,
    **used(
        "vocab_size", "num_hidden_layers", "hidden_size", "expand", "state_size", "conv_kernel",
        "layer_norm_epsilon", "max_position_embeddings",
    ),
    **irrelevant(
        "values are drawn only where training starts anew",
        "time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme",
        "time_step_scale", "rescale_prenorm_residual",
    ),
    **irrelevant(
        "it changes how transformers computes, and no logits",
        "residual_in_fp32", "use_mambapy", "use_associative_scan", "chunk_size",
        "fused_add_norm",
    ),
    **irrelevant("it is a size of the authors' code, for which transformers has another key",
                 "d_inner", "d_model", "n_layer", "pad_vocab_size_multiple"),
    "ssm_cfg": only({}),
    "rms_norm": only(True),
    "hidden_act": only("silu", "swish"),
    "use_bias": only(False),
    "use_conv_bias": only(True),
}  # fmt: skip
