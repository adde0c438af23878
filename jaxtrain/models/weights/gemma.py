"""The first Gemma: names and settings elsewhere."""

from jaxtrain.models.transformers.gemma import Gemma
from jaxtrain.models.weights import gemma_settings, grouped_query
from jaxtrain.models.weights.family import Family

FAMILY = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    model=Gemma,
    read=gemma_settings.read,
    write=gemma_settings.write,
    names=grouped_query.dense_names,
    prefix=grouped_query.PREFIX,
    copies=grouped_query.COPIES,
    buffers=grouped_query.BUFFERS,
)
