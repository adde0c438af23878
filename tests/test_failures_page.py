"""docs/failures*.md: every message that they quote is one that the program really prints."""

import ast
import re
import socket
import string
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxtrain.cli import main
from jaxtrain.config.errors import UserError
from jaxtrain.data.bad_records import BadRecord, BadRecordError, BadRecords
from jaxtrain.run.attempts.begin import begin
from jaxtrain.run.attempts.goodput import Account
from jaxtrain.run.attempts.lock import RunLock, Superseded
from jaxtrain.run.checkpoint.manifest import CheckpointError
from jaxtrain.run.checkpoint.store import Checkpoints
from jaxtrain.run.cluster.authentication import RunToken
from jaxtrain.run.cluster.channel import rendezvous
from jaxtrain.run.cluster.cluster import Cluster, ClusterError, Flags
from jaxtrain.run.cluster.wire import RejectedClients
from jaxtrain.run.metrics.log import what_is_bad
from jaxtrain.training import guard
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Checkpoint, load_config

ROOT = Path(__file__).parent.parent
PAGE = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("failures*.md")))
QUOTES = [line for block in re.findall(r"^```\n(.*?)^```", PAGE, re.S | re.M)
          for line in block.splitlines()]  # fmt: skip
HOLE = "\0"
FEWEST_LETTERS = 10  # of a piece that is looked for in the source: "; use " alone says nothing


def pattern(pieces: list[str]) -> str:
    return ".*".join(re.escape(piece) for piece in pieces)


# -- messages out of the source -------------------------------------------------------------------


def template(node: ast.expr) -> str:
    """A string of the source as it is printed, a hole for each value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    return HOLE


def templates() -> list[str]:
    found = []
    for path in (ROOT / "jaxtrain").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        found += [template(n) for n in nodes if isinstance(n, ast.Constant | ast.JoinedStr)]
    return sorted({unquoted(one, HOLE) for one in found})


def unquoted(text: str, hole: str) -> str:
    """Without the quotes around a hole, which the source writes as such or leaves to `repr`."""
    return text.replace(f"'{hole}'", hole)


def stands_in(message: str, sources: list[str]) -> bool:
    """Whether a message is made of strings of the source, one after the other, cut at its holes."""
    pieces = unquoted(message, "...").split("...")

    def ends(first: int) -> bool:
        """Whether the pieces from `first` on are made so."""
        if first == len(pieces) or not any(pieces[first:]):
            return True
        for last in range(len(pieces), first, -1):
            run = pieces[first:last]
            letters = sum(letter in string.ascii_letters for letter in "".join(run))
            if letters >= FEWEST_LETTERS and any(
                all(piece in source for piece in run) and re.search(pattern(run), source, re.S)
                for source in sources
            ):
                return ends(last)
        return False

    while pieces and not pieces[0]:
        pieces = pieces[1:]
    return bool(pieces) and ends(0)


# -- messages that are provoked -------------------------------------------------------------------


@pytest.fixture(scope="module")
def heard(tmp_path_factory) -> list[str]:
    """What the program says to an error, a damage or a clash."""
    return [
        *_bindings(),
        *load_config("mixtral_tiny", ["Optimizer.name=lion", "Train.model=@GPT()"]).notes,
        *_sizes(tmp_path_factory.mktemp("text")),
        *_bad_steps(),
        _bad_record(),
        *_checkpoints(tmp_path_factory.mktemp("run")),
        *_clash(tmp_path_factory.mktemp("locked")),
        *_processes(tmp_path_factory.mktemp("pair")),
        Account(({"step": 60.0, "data": 30.0}, {"step": 60.0}, {})).sentence(),
    ]


def refused(*bindings: str, config: str = "gpt_quickstart") -> list[str]:
    """The lines of a rejection, by the loading or by the check for 8 CPU devices."""
    with pytest.raises(UserError) as raised:
        preflight.check(load_config(config, bindings), device_count=8, platform="cpu")
    return str(raised.value).splitlines()


def _bindings() -> list[str]:
    wrong = ["GPTT.num_layers = 2", "GPT.num_layer = 2", "GPT.num_layers = '2'", "lr = 2",
             "Llama.num_layers = 2", "GPT.num_layers is 2", "GPT.num_layers = two"]  # fmt: skip
    return [*(refused(one)[0] for one in wrong), *refused(config="gpt_quickstar")]


def _sizes(folder: Path) -> list[str]:
    (folder / "long.txt").write_text("to be or not to be\n" * 1000)
    return [
        *refused("Mesh.fsdp = 3"),
        *refused("Mesh.fsdp = -1", "Mesh.tensor = 3"),
        *refused("Train.global_batch_size = 18"),
        *refused("GPT.num_heads = 2", "Mesh.fsdp = 2", "Mesh.tensor = 4"),
        *refused("TextData.sequence_length = 512"),
        *refused("GPT.vocab_size = 200"),
        *refused("Attention.kernel = 'cudnn'")[:1],
        *refused("Finetune.unfreeze = {'layers/*': 5}", "Optimizer.name = 'schedule_free'"),
    ]


def _bad_steps() -> list[str]:
    not_finite = what_is_bad({"loss": float("nan")})
    no_norm = what_is_bad({"loss": 2.0, "grad_norm": float("inf")})
    return [
        str(guard.BadStepError(7, not_finite)),
        str(guard.BadStepError(7, no_norm, policy="skip", in_a_row=10)),
        str(guard.Rewind(7, what_is_bad({"loss": 9.0, "loss_threshold": 3.0}))),
    ]


def _bad_record() -> str:
    with pytest.raises(BadRecordError) as raised:
        BadRecords(0).add(BadRecord("training", 3, "cut short"), OSError("cut short"))
    return str(raised.value)


def _checkpoints(folder: Path) -> list[str]:
    said: list[str] = []
    checkpoints = Checkpoints(folder, Checkpoint(), report=said.append)
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.arange(8)}, {})
    checkpoints.wait()
    older, newer = (
        next((folder / "checkpoints" / step / "state").rglob("_METADATA")) for step in "12"
    )
    newer.write_text("{}")
    again = Checkpoints(folder, Checkpoint(), report=said.append)
    with pytest.raises(CheckpointError) as raised:
        again.verify(2)
    whole = older.read_bytes()
    older.write_text("{}")
    looking = Checkpoints(folder, Checkpoint(), read_only=True)
    with pytest.raises(CheckpointError) as lost:
        looking.newest_good()
    older.write_bytes(whole)
    assert again.newest_good() == 1
    for one in (checkpoints, again, looking):
        one.close()
    return [str(raised.value), str(lost.value), *said]


def _clash(folder: Path) -> list[str]:
    with RunLock.acquire(folder), pytest.raises(UserError) as raised:
        RunLock.acquire(folder)
    file = folder / "file"
    file.touch()
    config = load_config("gpt_quickstart")
    with pytest.raises(UserError) as in_the_way, begin(config, file, Flags(), report=print):
        pass
    theirs = folder / "theirs"
    (theirs / "checkpoints" / "1000").mkdir(parents=True)
    with pytest.raises(UserError) as another_s, begin(config, theirs, Flags(), report=print):
        pass
    refused = [str(error.value) for error in (raised, in_the_way, another_s)]
    return [*refused, str(Superseded(folder, 1, 2))]


def _processes(folder: Path) -> list[str]:
    said = []
    token = RunToken({}, folder / "token")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = Cluster(kind="flags", coordinator=address, num_processes=2, process_id=0)
        with pytest.raises(UserError) as raised:
            rendezvous(cluster, {}, token=token, timeout_seconds=0.2)
        said.append(str(raised.value))
    with pytest.raises(ClusterError) as missing:
        rendezvous(cluster, {}, token=token, timeout_seconds=0.2, report=said.append)
    with pytest.raises(UserError) as weak:
        RunToken({"JAXTRAIN_TOKEN": "secret"}, folder / "token")
    RejectedClients(said.append).note("10.0.0.7", "closed its connection")
    tokens = [token.absent(address, 1), token.differs(address, 1), weak.value]
    return [*said, str(missing.value), *map(str, tokens)]


# -- the page -------------------------------------------------------------------------------------


def test_every_message_of_the_page_is_printed_or_stands_in_the_source(heard):
    sources = templates()
    unknown = [
        quote
        for quote in QUOTES
        if not any(re.fullmatch(pattern(quote.split("...")), one, re.S) for one in heard)
        and not stands_in(quote, sources)
    ]
    assert unknown == []
    assert len(QUOTES) > 40


def test_every_message_that_was_provoked_stands_on_the_page(heard):
    quotes = [pattern(quote.split("...")) for quote in QUOTES]
    missing = [one for one in heard if not any(re.fullmatch(q, one, re.S) for q in quotes)]
    assert missing == []
    assert len(heard) > 20


def test_a_message_that_nobody_prints_is_found():
    sources = templates()
    assert stands_in("--workdir ...: there is no complete checkpoint in it", sources)
    assert not stands_in("--workdir ...: there is no complete checkpoint there", sources)
    assert not stands_in("the checkpoint of step ... in ... is broken", sources)
    assert not stands_in("...", sources)


def test_the_exit_statuses_are_those_of_the_program(tmp_path, capsys):
    rows = dict(re.findall(r"^\| (\d+) \| ([^|]*) \|", PAGE, re.M))
    assert rows.keys() == {"0", "1", "2", "75"}
    missing = tmp_path / "no run"
    assert main(["eval", "--workdir", str(missing)]) == 2
    said = capsys.readouterr().err.removeprefix("jaxtrain: ").strip()
    assert said == f"--workdir {missing}: no run there (no config.gin)"
