"""Which beams go on, which are finished and when a search ends: as in transformers."""

import itertools

import numpy as np
import pytest

from jaxtrain.run.generation.beams import BeamSearch, Candidate, Search

torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
transformers = pytest.importorskip("transformers", reason="transformers is the peer")

V, NEW = 17, 9
PROMPTS = [[5, 9, 14], [5], [8], [11, 4, 4, 16]]


@pytest.fixture(scope="module")
def model():
    """A small GPT-2 with likelihoods that differ by some nats."""
    torch.manual_seed(3)
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
            eos_token_id=0, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for value in made.parameters():
            value.add_(0.3 * torch.randn_like(value))
    return made


def searched(model, prompt, settings, ends):
    """`Search` over the likelihoods of the model, every text read anew."""
    search, W = Search(settings, NEW, ends), settings.beams
    while not search.done:
        ids = torch.tensor([[*prompt, *beam.tokens] for beam in search.running])
        with torch.no_grad():
            told = torch.log_softmax(model(ids).logits[:, -1], -1)
        totals = told + torch.tensor([[beam.score] for beam in search.running])
        best, places = totals.reshape(-1).topk(min(max(2, 1 + len(ends)) * W, W * V))
        candidates = [
            Candidate(np.float32(total), place // V, place % V, told.reshape(-1)[place].item())
            for total, place in zip(best.tolist(), places.tolist(), strict=True)
        ]
        before = [beam.tokens for beam in search.running]
        parents = search.take(candidates)
        for parent, beam in zip(parents, search.running, strict=True):
            assert beam.tokens[:-1] == before[parent]
    return search.answer()


@pytest.mark.parametrize(
    ("beams", "length_penalty", "early_stopping", "ends"),
    [
        (1, 1.0, False, [3]),
        (2, 1.0, False, []),
        (2, 1.0, False, list(range(6))),  # where stopping changes answers
        (2, -1.0, False, [3]),
        (4, 2.5, False, [2, 8, 12]),
        (4, 0.0, True, [2, 8, 12]),
        (3, -1.0, True, [2, 8, 12]),
        (2, 2.5, "never", [2, 8, 12]),
        (3, -1.0, "never", [3, 5]),
    ],
)
def test_the_answer_and_its_score(model, beams, length_penalty, early_stopping, ends):
    settings = BeamSearch(beams=beams, length_penalty=length_penalty, early_stopping=early_stopping)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
            num_beams=beams, length_penalty=length_penalty, early_stopping=early_stopping,
            eos_token_id=ends or None, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        tokens = out.sequences[0, len(prompt) :].tolist()
        expected = list(itertools.takewhile(lambda token: token not in ends, tokens))
        found = searched(model, prompt, settings, ends)
        assert found.tokens == expected
        assert found.ended == ("length" if len(expected) == NEW else "end")
        if beams > 1:
            assert found.score == pytest.approx(out.sequences_scores.item(), rel=1e-4)
