"""A run's token: where it comes from, who can read it, and that nobody says it."""

import os
import stat

import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.authentication import RunToken

GIVEN = "given-" + "7a" * 20


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run" / "attempts" / "token"


def test_process_0_makes_it_once_for_its_own_user_alone_and_the_others_find_it(file):
    before = os.umask(0)
    try:
        made = RunToken({}, file).make()
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(made) == 64
    assert file.read_bytes() == made + b"\n"
    assert RunToken({}, file).find() == made
    assert RunToken({}, file).make() == made
    assert [one.name for one in file.parent.iterdir()] == ["token"]


def test_no_two_runs_have_one_token(tmp_path):
    made = {RunToken({}, tmp_path / f"{number}").make() for number in range(20)}
    assert len(made) == 20


def test_the_variable_comes_first_and_leaves_no_file(file):
    given = RunToken({"JAXTRAIN_TOKEN": f" {GIVEN}\n"}, file)
    assert given.make() == given.find() == GIVEN.encode()
    assert not file.exists()
    other = RunToken({}, file).make()
    assert other != GIVEN.encode()
    assert given.make() == given.find() == GIVEN.encode()


@pytest.mark.parametrize("value", ["", "secret", "a b" * 20, "x" * 1025, "é" * 40, "x" * 40 + "\0"])
def test_a_variable_that_is_no_token_is_refused_without_saying_it(file, value):
    with pytest.raises(UserError, match="a token has 32 to 1024, none of them blank; make") as told:
        RunToken({"JAXTRAIN_TOKEN": value}, file)
    assert f"JAXTRAIN_TOKEN is set to {len(value)} characters" in str(told.value)
    assert not value or value not in str(told.value)


@pytest.mark.parametrize("content", [b"", b"short\n", b"x" * 5000, b"\xff" * 64])
def test_a_file_with_something_else_in_it_is_made_anew(file, content):
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    file.chmod(0o600)
    assert RunToken({}, file).find() is None
    made = RunToken({}, file).make()
    assert RunToken({}, file).find() == made


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o666])
def test_a_token_that_others_could_read_or_write_is_made_anew(file, mode):
    first = RunToken({}, file).make()
    file.chmod(mode)
    second = RunToken({}, file).make()
    assert second != first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_link_is_not_followed_and_a_pipe_not_waited_for(file, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(GIVEN)
    elsewhere.chmod(0o600)
    file.parent.mkdir(parents=True)
    file.symlink_to(elsewhere)
    assert RunToken({}, file).find() is None
    assert RunToken({}, file).make() != GIVEN.encode()
    assert elsewhere.read_text() == GIVEN
    file.unlink()
    os.mkfifo(file, 0o600)
    assert RunToken({}, file).find() is None
    assert RunToken({}, file).make() == RunToken({}, file).find()


def test_a_file_system_that_keeps_no_modes_is_told_of_once_and_does(file, monkeypatch):
    """As a bucket that is mounted, or a share of Windows."""
    real = os.fstat

    def open_to_all(handle):
        facts = list(real(handle))
        facts[0] |= 0o077
        return os.stat_result(facts)

    monkeypatch.setattr(os, "fstat", open_to_all)
    said = []
    made = RunToken({}, file, report=said.append).make()
    assert RunToken({}, file).find() == made
    (line,) = said
    assert "can be read by others" in line
    assert "set JAXTRAIN_TOKEN" in line
    assert made.decode() not in line


@pytest.fixture
def no_root():
    """Root may read every file: where it runs the tests, one is read by a user without rights."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65_534)  # nobody's
    yield
    if before == 0:
        os.seteuid(before)


def test_a_file_of_another_user_is_one_sentence(file, request):
    RunToken({}, file).make()
    file.chmod(0)
    request.getfixturevalue("no_root")
    with pytest.raises(UserError, match="belongs to another user than this process"):
        RunToken({}, file).find()
