"""The first Gemma: names and settings elsewhere."""

from jaxtrain.models.transformers.gemma import Gemma
from jaxtrain.models.weights import gemma_settings, grouped_query

FAMILY = grouped_query.family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    model=Gemma,
    read=gemma_settings.read,
    write=gemma_settings.write,
    names=grouped_query.dense_names,
)
