"""The table of what models learn: rows that can be trained, and the page that has them."""

import pytest

from benchmarks import learns
from jaxtrain import load_config
from jaxtrain.data.pairs.source import PairData
from jaxtrain.training.preflight.preflight import check

PAGE = f"before\n\n{learns.TABLE.begin}\n{learns.TABLE.end}\n\nafter\n"
SPOKEN = {
    "cat": [["K", "AE1", "T"], ["K", "AE0", "T"], ["K", "AH0", "T"]], "it's": [["IH1", "T", "S"]],
    "act": [["AE1", "K", "T"]],
}  # fmt: skip
LINE = {"eval_accuracy": 0.6789, "goodput_seconds": {"step": 45.0, "compile": 15.0}}


@pytest.mark.parametrize("name", learns.ROWS)
def test_every_row_can_be_trained(name, tmp_path):
    row = learns.ROWS[name]
    learns.write_words(tmp_path, SPOKEN)
    check(load_config(row.source(tmp_path)), device_count=row.devices, platform="cpu")


def test_rows_are_written_in_their_order_and_again_in_place():
    first, second = list(learns.ROWS)[:2]
    cells = learns.cells_of(learns.ROWS[second], 15210, LINE)
    assert cells[1:] == ["15,210", "fsdp=2", "68 %", "67.9 %", "1.0"]
    page = learns.TABLE.with_row(learns.TABLE.with_row(PAGE, second, cells), first, ["x"] * 6)
    assert list(learns.TABLE.told(page)) == [first, second]
    again = learns.TABLE.with_row(page, first, ["y"] * 6)
    assert again == page.replace(" x |", " y |")
    assert again.startswith("before\n\n")
    assert again.endswith("\n\nafter\n")
    table = [line.count("|") for line in again.splitlines() if line.startswith("|")]
    assert table == [len(learns.TABLE.head) + 1] * 4
    with pytest.raises(ValueError, match="has no lines"):
        learns.TABLE.with_row("no table", first, cells)


def test_words_are_pairs_of_letters_and_phonemes_without_stress(tmp_path):
    learns.write_words(tmp_path, SPOKEN)
    data = PairData(
        source=str(tmp_path / "cmudict.jsonl"), tokenizer=str(tmp_path / "cmudict.json"),
        heldout_fraction=0.5,
    )  # fmt: skip
    opened, tokenizer = data.open(seed=0), data.open_tokenizer()
    told = {}
    for row in (opened.train.example(0, None), opened.heldout.example(0, None)):
        letters = tokenizer.decode(row.source[row.source_segment_ids == 1])
        answers = [one.targets[one.loss_mask == 1] for one in (row, *row.answers)]
        told[letters] = [tokenizer.decode(one[:-1]) for one in answers]
        assert answers[0][-1] == tokenizer.end_of_text == 0
    assert told == {"a c t": ["AE K T", ""], "c a t": ["K AE T", "K AH T"]}


def test_a_row_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        learns.main(["mnist1d_mpl"])
    assert "did you mean 'mnist1d_mlp'" in capsys.readouterr().err
