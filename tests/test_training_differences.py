"""What an import says of training: the load-balancing loss beside that of transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.transformers.deepseek import DeepSeek
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.models.transformers.mixtral import Mixtral
from jaxtrain.nn.moe.experts import router_statistics
from jaxtrain.nn.moe.routing import Softmax
from jaxtrain.run.huggingface.importing import training_differences

torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")


def test_the_balancing_loss_is_that_of_transformers_row_by_row_and_layer_by_layer():
    """So what an import says of it holds: of all rows and layers together it is another number."""
    layers, rows, length, experts, chosen = 3, 2, 16, 4, 2
    rng = np.random.default_rng(0)
    means_LB1E = rng.normal(0, 2, (layers, rows, 1, experts))
    logits_LBTE = (means_LB1E + rng.normal(size=(layers, rows, length, experts))).astype(np.float32)

    def theirs(*parts: np.ndarray) -> float:
        gates = tuple(torch.tensor(part.reshape(-1, experts)) for part in parts)
        return float(mixtral.load_balancing_loss_func(gates, experts, chosen))

    ours = []
    for logits_BTE in jnp.asarray(logits_LBTE):
        routed = Softmax()({}, logits_BTE, chosen)
        kept = jnp.ones((rows, length, chosen), bool)
        sums, _ = router_statistics(logits_BTE, routed, kept, None)
        ours.append(float(sums["balance"]) / (rows * length))
    each = [theirs(row) for layer in logits_LBTE for row in layer]
    assert np.mean(ours) == pytest.approx(np.mean(each), rel=1e-5)
    assert abs(theirs(*logits_LBTE) - np.mean(each)) > 0.3


@pytest.mark.parametrize(
    ("model", "content", "said"),
    [
        (Llama(), {"attention_dropout": 0.0}, []),
        (Llama(), {"attention_dropout": 0.1, "resid_pdrop": 0.2},
         ["attention_dropout = 0.1, resid_pdrop = 0.2 of config.json is not used"]),
        (Mixtral(balance_weight=0.0), {"router_aux_loss_coef": 0.0}, []),
        (Mixtral(), {"router_aux_loss_coef": 0.02},
         ["Mixtral.balance_weight = 0.02 multiplies the load-balancing loss of each row and layer "
          "by itself, averaged; in transformers router_aux_loss_coef, where output_router_logits "
          "is true, multiplies one of all rows and layers together"]),
        (Mixtral(), {"router_aux_loss_coef": 0.02, "output_router_logits": True},
         ["in transformers router_aux_loss_coef multiplies one of all rows"]),
        (DeepSeek(), {}, ["which transformers does not have"]),
    ],
)  # fmt: skip
def test_what_is_otherwise_in_training_is_said(model, content, said):
    found = training_differences(model, content)
    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True))
