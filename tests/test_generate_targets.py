"""What T5 tells of sources equals `transformers.generate` token for token, on random weights."""

import itertools

import numpy as np
import pytest

from jaxtrain.run.generation.beams import BeamSearch
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.generation.targets import targets
from jaxtrain.run.trainer import Trainer

torch = pytest.importorskip("torch", reason="PyTorch is the peer of this test")
transformers = pytest.importorskip("transformers", reason="transformers is the peer")

V, NEW, BEGIN, END = 19, 10, 0, 4
SOURCES = [[5, 17, 9, 3, 2, 11], [8, 1], [6, 11, 3, 4, 12, 7, 5, 16, 13]]
MESHES = {
    1: ["Mesh.data=2", "Mesh.fsdp=2", "Mesh.tensor=2"],
    2: ["Mesh.fsdp=8"],
    35: ["Mesh.data=4", "Mesh.tensor=2"],
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(s, marks=() if s == 1 else pytest.mark.slow) for s in MESHES],
)
def pair(request, tmp_path_factory):
    """A T5 of transformers with the wide random weights of a seed, and a trainer that holds it."""
    torch.manual_seed(request.param)
    there = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=V, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4,
            relative_attention_num_buckets=8, relative_attention_max_distance=9,
            decoder_start_token_id=BEGIN, pad_token_id=BEGIN, eos_token_id=END,
        )
    )  # fmt: skip
    with torch.no_grad():
        for key, value in there.named_parameters():
            value.normal_(1.0 if "norm" in key else 0.0, 0.5)
        there.shared.weight *= 3
    folder = tmp_path_factory.mktemp(f"t5_{request.param}")
    there.eval().save_pretrained(folder)
    bindings = [*MESHES[request.param], "Precision.compute='float32'"]
    return there, Trainer.from_huggingface(folder, bindings=bindings)


def theirs(model, sources, **settings):
    """Targets up to their end of sources padded on the right, and what `generate` gave."""
    longest = max(len(source) for source in sources)
    out = model.generate(
        torch.tensor([source + [0] * (longest - len(source)) for source in sources]),
        attention_mask=torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sources]),
        max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_scores=True,
        **settings,
    )  # fmt: skip
    rows = [row.tolist() for row in out.sequences[:, 1:]]
    return [list(itertools.takewhile(lambda token: token != END, row)) for row in rows], out


def ours(trainer, sources, sampling, **more):
    return targets(
        trainer.program.setup, trainer.config.train.model, trainer.state, sources, begin=BEGIN,
        ends=[END], max_new_tokens=NEW, sampling=sampling, seed=0, batch_size=8, **more,
    )  # fmt: skip


# Each search once, each mesh with at least one.
@pytest.mark.parametrize(
    ("pair", "settings"),
    [
        (1, {"beams": 4, "length_penalty": 2.0, "early_stopping": True, "repetition_penalty": 1.4}),
        *(
            pytest.param(seed, settings, marks=pytest.mark.slow)
            for seed, settings in (
                (2, {"beams": 1}),
                (35, {"beams": 3}),
                (2, {"beams": 2, "length_penalty": -1.0, "early_stopping": "never"}),
                (35, {"beams": 5, "length_penalty": 0.0}),
            )
        ),
    ],
    indirect=["pair"],
)
def test_beam_search(pair, settings):
    there, trainer = pair
    given = {**settings, "num_beams": settings["beams"]}
    del given["beams"]
    expected, out = theirs(there, SOURCES, **given)
    found = ours(trainer, SOURCES, BeamSearch(**settings))
    assert [answer.tokens for answer in found] == expected
    assert len({tuple(tokens) for tokens in expected}) > 1
    for answer in found:
        assert answer.ended == ("length" if len(answer.tokens) == NEW else "end")
    if settings["beams"] > 1:
        scores = [answer.score for answer in found]
        np.testing.assert_allclose(scores, out.sequences_scores, rtol=1e-4)


@pytest.mark.slow
def test_a_repetition_penalty_knows_the_token_that_targets_begin_with(pair):
    there, trainer = pair
    for penalty in (1.0, 1.8):
        expected, _ = theirs(there, SOURCES, repetition_penalty=penalty)
        found = ours(trainer, SOURCES, Sampling(temperature=0.0, repetition_penalty=penalty))
        assert [answer.tokens for answer in found] == expected


@pytest.mark.slow
def test_a_watch_ends_some_targets_and_no_others(pair):
    """After three tokens every second source; what is written until then is what others have."""
    _, trainer = pair

    class Watch:
        every = 2

        def find_stop(self, prompt, tokens):
            return 3 if prompt % 2 and len(tokens) >= 3 else None

    sources, greedy = SOURCES * 2, Sampling(temperature=0.0)
    whole = ours(trainer, sources, greedy)
    found = ours(trainer, sources, greedy, watch=Watch())
    for number, (answer, other) in enumerate(zip(found, whole, strict=True)):
        ends = number % 2 and len(other.tokens) >= 3
        assert answer.tokens == (other.tokens[:3] if ends else other.tokens)
        assert answer.ended == ("stop" if ends else other.ended)
        assert len(answer.log_probabilities) == len(answer.tokens)
    assert {answer.ended for answer in found} >= {"stop"}
