"""Gemma: Hugging Face names and settings."""

from jaxtrain.config.key_table import irrelevant, only
from jaxtrain.models.transformers.gemma import Gemma
from jaxtrain.models.weights import gemma_settings, grouped_query

FAMILY = grouped_query.family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    model=Gemma,
    keys={
        **gemma_settings.KEYS,
        # "gelu" is what the first files say, and transformers takes it for the other.
        "hidden_act": only(gemma_settings.ACTIVATION, "gelu"),
        **irrelevant("transformers reads hidden_act", "hidden_activation"),
    },
    read=gemma_settings.read,
    write=gemma_settings.write,
    names=grouped_query.dense_names,
)
