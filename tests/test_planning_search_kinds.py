"""The search as a user sees it: kinds of layouts, the best that does not fit, progress, Ctrl-C."""

import dataclasses
import io
import json
import os
import re
import signal

import pytest
from rich.console import Console

from jaxtrain import load_config
from jaxtrain.__main__ import main
from jaxtrain.analysis import commands
from jaxtrain.analysis.planning.machines.targets import parse_target
from jaxtrain.analysis.planning.search import search as searching
from jaxtrain.analysis.planning.search import space
from jaxtrain.analysis.planning.search.candidates import AXIS_OF, FAR, FSDP, NEAR, SHOWN, kinds_of
from jaxtrain.analysis.planning.search.search import price, search

# A mixture of long sequences: every kind of layout has something to split.
MIXTURE = [
    "Mixtral.embed_dim=2048", "Mixtral.mlp_dim=4096", "Mixtral.num_layers=4",
    "Mixtral.num_heads=16", "Mixtral.num_kv_heads=8", "Mixtral.num_experts=4",
    "Mixtral.context_length=4096", "TextData.sequence_length=4096", "Train.global_batch_size=8",
    "Attention.kernel='tpu'", "Mixtral.capacity_factor=None",
]  # fmt: skip
TARGET = "v5e:2x2"
PLAN = ["plan", "mixtral_tiny", "--target", TARGET, "--search", "--no-compile"]
WORDS = [*PLAN, *(word for binding in MIXTURE for word in ("-b", binding))]


def mixture():
    return load_config("mixtral_tiny", MIXTURE)


def machine(lacked=0):
    """Four small chips, of which each has a quarter of its memory and so much more."""
    target = parse_target(TARGET)
    chip = dataclasses.replace(target.chip, hbm_bytes=int(5 * 2**30 + lacked))
    return dataclasses.replace(target, chip=chip)


@pytest.fixture(scope="module", autouse=True)
def few_policies():
    """Fewer layouts of each mesh, for the time that it takes to price all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space, "POLICIES", ("none", "full"))
        for name in ("KEPT", "ON_HOST"):
            patch.setattr(space, name, ())
        yield


@pytest.fixture(scope="module")
def found(few_policies):
    return search(mixture(), machine())


def fastest(candidates):
    """Kind -> seconds of its fastest layout."""
    best = {}
    for one in candidates:
        for kind in kinds_of(one.mesh):
            best[kind] = min(best.get(kind, one.price.seconds), one.price.seconds)
    return best


def test_the_kinds_of_a_layout_are_the_axes_that_split_the_model():
    assert kinds_of({"data": 2, "fsdp": 4}) == (FSDP,)
    assert kinds_of({"fsdp": 4, "pipe": 2, "tensor": 2}) == ("tensor", "pipeline")
    assert set(AXIS_OF.values()) == {"tensor", "expert", "context", "pipe"}


# Prices every layout; the next test has the best of each kind as the search finds it.
@pytest.mark.slow
@pytest.mark.rotated("searches")
def test_the_best_of_each_kind_is_the_one_that_pricing_everything_finds(found, monkeypatch):
    monkeypatch.setattr(searching, "_may_be_shown", lambda *_: True)
    everything = search(mixture(), machine())
    assert everything.slower == 0
    assert found.priced < everything.priced
    all_kinds, few = fastest(everything.candidates), fastest(found.candidates)
    first = min(all_kinds.values())
    assert few == {kind: time for kind, time in all_kinds.items() if time <= FAR * first}
    assert len(few) + len(found.absent) == 5
    assert len(few) >= 3


# A whole search; tests/test_planning_search.py has others in the fast part.
@pytest.mark.slow
def test_each_mesh_is_shown_once_and_each_kind_at_its_best(found):
    shown = found.shown
    meshes = [tuple(one.mesh.values()) for one in shown]
    assert len(set(meshes)) == len(meshes)
    kinds = [kind for one in shown for kind in one.best_of]
    assert sorted(kinds) == sorted(fastest(found.candidates))
    for one in shown:
        assert set(one.best_of) <= set(kinds_of(one.mesh))
    assert shown[0].bindings == found.candidates[0].bindings
    ranks = [one.rank for one in shown]
    assert ranks == sorted(ranks)
    assert all(rank <= place for place, rank in enumerate(ranks, 1))
    assert [one["best_of"] for one in found.to_json()["candidates"]] == [
        list(one.best_of) for one in shown
    ]


def test_where_there_is_one_mesh_alone_its_layouts_are_shown():
    one = search(load_config("gpt2_124m"), parse_target("h100:1x1"))
    assert 1 < len(one.shown) <= SHOWN


# Reads the same search.
@pytest.mark.slow
def test_the_best_that_does_not_fit_would_with_what_it_lacks(found):
    """Given the bytes that it lacks it fits, and with one less it does not; and a search with that
    memory finds none faster."""
    unfit = found.unfit
    assert unfit.price.seconds < min(one.price.seconds for one in found.candidates)
    assert unfit.over > 0
    assert price(unfit.config, machine(unfit.over)).fits
    assert not price(unfit.config, machine(unfit.over - 1)).fits
    again = search(mixture(), machine(unfit.over))
    assert min(one.price.seconds for one in again.candidates) <= unfit.price.seconds
    fitting = [one for one in again.candidates if one.price.seconds < unfit.price.seconds]
    # Only with fewer microbatches, which take more memory than the layout that was named.
    assert all(one.price.memory.total <= unfit.price.memory.total for one in fitting)
    saved = found.to_json()["search"]["best_that_does_not_fit"]
    assert (saved["over_bytes"], saved["fits"]) == (unfit.over, False)


# Reads the same search.
@pytest.mark.slow
def test_a_search_ends_with_the_first_that_is_fast_enough(found):
    fastest = min(one.price.seconds for one in found.candidates)
    early = search(mixture(), machine(), enough=1.2 * fastest)
    assert early.interrupted
    assert early.left > 0
    assert early.priced < found.priced
    assert fastest <= min(one.price.seconds for one in early.candidates) <= 1.2 * fastest


# Reads the same search.
@pytest.mark.slow
def test_a_layout_that_lacks_more_than_a_device_has_is_not_named(found):
    """6.5 GiB are too much for 5, and out of reach for 2.5."""
    assert found.unfit.price.memory.total < NEAR * 5 * 2**30
    small = machine(-2.5 * 2**30)
    assert found.unfit.price.memory.total > NEAR * small.chip.hbm_bytes
    unfit = search(mixture(), small).unfit
    assert unfit is not None
    assert 0 < unfit.over <= small.chip.hbm_bytes


@pytest.fixture
def interrupt_after(monkeypatch):
    """Sends SIGINT to this process as a layout is priced."""

    def after(layouts):
        sized, priced = searching._fewest, []

        def interrupted(*given):
            priced.append(given)
            if len(priced) > layouts:
                os.kill(os.getpid(), signal.SIGINT)
            return sized(*given)

        monkeypatch.setattr(searching, "_fewest", interrupted)

    # A shell's background jobs ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield after
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_search_shows_the_best_so_far(interrupt_after, capsys, tmp_path):
    interrupt_after(30)
    file = tmp_path / "plan.json"
    assert main([*WORDS, "--json", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.err == "jaxtrain: interrupted by Ctrl-C; the best so far is shown\n"
    said = re.search(
        r"The search was interrupted: [\d,]+ layouts were priced, "
        r"([\d,]+) more were not considered",
        printed.out,
    )
    assert said
    saved = json.loads(file.read_text())
    assert saved["search"]["interrupted"]
    assert saved["search"]["left"] == int(said[1].replace(",", ""))
    assert saved["fits"]
    assert saved["candidates"][0]["bindings"]
    assert "To train this layout: -b" in printed.out


def test_a_search_interrupted_before_any_layout_fits_shows_none(interrupt_after, capsys):
    interrupt_after(0)
    assert main(WORDS) == 1
    printed = capsys.readouterr()
    assert printed.err == "jaxtrain: interrupted by Ctrl-C\n"
    assert "Search" not in printed.out


def test_progress_is_told_on_a_terminal_alone(monkeypatch, capsys):
    file = io.StringIO()
    monkeypatch.setattr(searching, "_REPORT_EVERY", 5)
    shown = Console(file=file, force_terminal=True, width=200)
    monkeypatch.setattr(commands, "terminal", lambda: shown)
    assert main(WORDS) == 0
    assert re.search(r"best so far .*Ctrl-C", file.getvalue())
    monkeypatch.undo()
    assert main(WORDS) == 0
    printed = capsys.readouterr()
    assert "best so far" not in printed.out + printed.err
    assert "Search: best layouts first" in printed.out


# Reads the same search.
@pytest.mark.slow
def test_progress_counts_up_to_all_layouts(found):
    told = []
    end = search(mixture(), machine(), told.append)
    assert end == found
    done = [re.search(r"forms: ([\d,]+) of ([\d,]+)", words) for words in told]
    counts = [int(one[1].replace(",", "")) for one in done if one]
    assert counts == sorted(set(counts))
    assert counts
    assert "listing layouts" in told[0]
