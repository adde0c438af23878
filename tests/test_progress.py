"""What people see while a run goes on."""

import io

from rich.console import Console

from jaxtrain.run.show.progress import Display, clock, quantity


def line(step, seconds=0.1, mfu=0.5):
    return {
        "step": step,
        "loss": 2.3125,
        "tokens_per_second": 4120 / seconds,
        "step_seconds": seconds,
        "mfu": mfu,
    }


def test_plain_lines_are_whole_however_narrow_the_console():
    console = Console(file=io.StringIO(), width=40)
    display = Display(console, "tokens", 600, 0)
    display.show(line(1, seconds=30, mfu=0.002))
    display.show(line(100))
    display.show(line(200, mfu=None))
    display.close()
    assert console.file.getvalue().splitlines() == [
        "step 1/600  loss 2.312  137 tokens/s  30 s/step  mfu 0.2%  eta ?",
        "step 100/600  loss 2.312  41.2k tokens/s  0.1 s/step  mfu 50.0%  eta 0:50",
        "step 200/600  loss 2.312  41.2k tokens/s  0.1 s/step  eta 0:40",
    ]


def test_a_resumed_attempts_first_step_foretells_nothing():
    console = Console(file=io.StringIO())
    display = Display(console, "tokens", 600, 400)
    display.show(line(401))
    display.show(line(402))
    endings = [text.rsplit("  ", 1)[1] for text in console.file.getvalue().splitlines()]
    assert endings == ["eta ?", "eta 0:20"]


def test_one_live_line_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    display = Display(console, "tokens", 10, 0)
    for step in range(1, 11):
        display.show(line(step))
    display.line("step 10/10  eval_loss 1.25")
    display.close()
    text = console.file.getvalue()
    assert "step 10/10" in text
    assert "loss 2.312" in text
    assert "eval_loss 1.25" in text
    assert text.rstrip().count("\n") < 6  # redrawn in place
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_numbers_for_people():
    assert [quantity(n) for n in (9.5, 950, 999.7, 41_234, 1.26e6, 3e9, 2e12)] == [
        "9.5", "950", "1000", "41.2k", "1.3M", "3.0G", "2.0T",
    ]  # fmt: skip
    assert [clock(s) for s in (0.4, 50, 725, 3599.7, 11_220)] == [
        "0:00", "0:50", "12:05", "1:00:00", "3:07:00",
    ]  # fmt: skip
