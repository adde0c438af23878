"""Tables of the keys of foreign formats: what is in none, and values that nothing implements."""

import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.config.key_table import Nested, Only, check_keys, ignore_keys, only, read_keys
from jaxtrain.config.key_table import validate_keys as validate

TABLE = {
    **read_keys("width", "heads"),
    **ignore_keys("it names the author", "author"),
    "bias": only(False),
    "groups": Only((1,), default=8, reason="groups share nothing"),
    "scaling": Nested({**read_keys("factor"), "kind": only("linear", "none")}),
}


@pytest.mark.parametrize(
    "content",
    [
        {"groups": 1},
        {"groups": 1.0, "width": "anything", "author": ["anyone"], "bias": None},
        {"groups": 1, "scaling": {"factor": 2, "kind": "none"}},
        {"groups": 1, "scaling": [{"factor": 2}, {}]},
        {"groups": 1, "scaling": None},
    ],
)
def test_known_keys_and_allowed_values_pass(content):
    assert list(check_keys(content, TABLE)) == []
    validate(content, TABLE, where="file")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"groups": 1, "head": 3},
         "head = 3 is an unknown key (the nearest is 'heads'); remove it"),
        ({"groups": 1, "bias": True}, "bias = True; it must be False"),
        ({"groups": 1, "bias": 0}, "bias = 0; it must be False"),
        ({"groups": True}, "groups = True; it must be 1 (groups share nothing)"),
        ({}, "groups = 8 by default; it must be 1 (groups share nothing)"),
        ({"groups": 1, "scaling": {"type": 1}}, "scaling.type = 1 is an unknown key"),
        ({"groups": 1, "scaling": {"kind": "cubic"}},
         "scaling.kind = 'cubic'; it must be 'linear' or 'none'"),
        ({"groups": 1, "scaling": "linear"}, "scaling = 'linear'; it must be an object"),
        ({"groups": 1, "x" * 9: "y" * 200}, "'" + "y" * 76 + "... is an unknown key"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(content, said):
    with pytest.raises(UserError) as error:
        validate(content, TABLE, where="file")
    (headline, line) = str(error.value).splitlines()
    assert headline == "file has what is not supported here:"
    assert said in line


def test_everything_is_reported_together():
    found = list(check_keys({"a": 1, "bias": True}, TABLE))
    assert len(found) == 3
