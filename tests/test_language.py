"""Words, names and files follow docs/style.md: the number of exceptions can only shrink."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prose import findings, modules, pages, subject_rule

ROOT = Path(__file__).parent.parent
CODE_MAP = (ROOT / "docs" / "code_map.md").read_text()

# Places that still use a word of the former dialect (`python tests/prose.py` lists them). Lower the
# figure when you reword some; it never rises.
MOST_IN_DOCS = 0
MOST_IN_THE_PACKAGE = 0
# Nouns that a participle describes, as in "padded logits": they name what a lookup returns.
NOUN_PHRASES = {
    "_added_token", "averaged_params", "blocked_attention", "closed_form_bubble",
    "closed_form_peak", "closed_form_ticks", "compiled_parts", "concatenated_operands",
    "_dilated_parts", "executed_flops", "exposed_seconds", "_fixed_parts", "frozen_shardings",
    "gated_mlp", "_gathered_spec", "_grouped_kernel_of", "grouped_query", "handled_signals",
    "hidden_states", "hidden_tokens",
    "installed_version", "_labelled_data", "masked_checksum", "_moved_bytes",
    "_needed_equations", "padded_bytes", "padded_logits", "predicted_loss",
    "published_defaults", "published_folder", "_ragged_dot", "reduced_bytes",
    "replicated_fraction", "reserved_tokens", "_scattered_dimension", "sealed_steps",
    "_seen_tokens", "shared_mesh", "shipped_headers", "stacked_bars", "stored_leaf",
    "stored_reference", "_strided_parts", "_summed_axes", "_updated_operand", "weighted_sum",
    "_written_bytes",
}  # fmt: skip

QUESTIONS = re.findall(r"^\| (.+\?) \| (.+?) \| \[`.+?`\]\(\.\./(.+?)\) \|$", CODE_MAP, re.M)

_IRREGULAR = {
    "told", "begun", "kept", "shown", "drawn", "written", "known", "seen", "given", "taken",
    "made", "found", "held", "sent", "brought", "left", "laid", "built", "meant", "said",
    "spread", "lent", "lost", "chosen", "gone", "done", "hidden", "frozen", "apart",
    "again", "whole", "together", "around", "beside", "inside",
}  # fmt: skip
_VERBS = {"embed", "feed", "need", "speed"}
# Names that no function, method or class may have: each has a term of the field.
FORBIDDEN = {
    "told_apart": "partition",
    "stranger": "unauthenticated client",
    "begin_anew": "restart",
    "few_bits_of": "quantize",
}
# Words that no name of the package may contain, and what to write instead.
FORBIDDEN_WORDS = {
    "told": "message, verdict or status", "said": "message or reported", "asked": "requested",
    "say": "report or print", "tell": "report or predict", "tells": "head or objective",
    "apart": "separate", "beside": "next to, or extra", "stands": "is", "anew": "again",
    "mended": "repaired", "stranger": "unauthenticated client",
    "place": "position, index, slot or path", "places": "positions, indices or slots",
    "refusal": "error", "refusals": "errors", "refuse": "reject", "refused": "rejected",
}  # fmt: skip


def test_the_prose_of_the_docs_uses_fewer_words_of_the_dialect():
    assert sum(1 for page in pages() for _ in findings(page)) <= MOST_IN_DOCS


def test_the_prose_of_the_package_uses_fewer_words_of_the_dialect():
    assert sum(1 for module in modules() for _ in findings(module)) <= MOST_IN_THE_PACKAGE


def test_a_word_of_the_dialect_is_found_in_docs_docstrings_comments_and_messages(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("prose.ROOT", tmp_path)
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("A mistake.\n\n```\nrefused\n```\n\n`require_at_least` is\nrefused.\n")
    module.write_text(
        '"""Weights in few bits."""\nx = 1  # mended\nrefused = "it is refused"\ny = "told"\n'
    )
    assert [(one.line, one.words) for one in findings(page)] == [(1, "mistake"), (8, "refused")]
    found = {(one.line, one.words) for one in findings(module)}
    assert found == {(1, "few bits"), (2, "mended"), (3, "refused")}


def _functions() -> Iterator[tuple[str, str]]:
    """Files and names of functions and methods; properties may be participles."""
    for module in modules():
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.FunctionDef):
                decorators = {ast.unparse(one) for one in node.decorator_list}
                if not decorators & {"property", "functools.cached_property"}:
                    yield module.name, node.name


def _is_participle(name: str) -> bool:
    if name in NOUN_PHRASES:
        return False
    first = name.strip("_").split("_")[0]
    return first in _IRREGULAR or (
        re.search(r"[a-z]{2}ed$", first) is not None and first not in _VERBS
    )


def test_no_function_is_named_by_a_participle():
    assert [found for found in _functions() if _is_participle(found[1])] == []


def test_no_function_has_a_forbidden_name():
    names = [(file, name) for file, name in _functions() if name.strip("_") in FORBIDDEN]
    assert names == []


def _names() -> Iterator[tuple[str, str]]:
    """Files and names of locals, parameters, attributes, fields, functions and classes."""
    for module in modules():
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Name | ast.Attribute):
                if isinstance(node.ctx, ast.Store):
                    yield module.name, node.id if isinstance(node, ast.Name) else node.attr
            elif isinstance(node, ast.arg):
                yield module.name, node.arg
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield module.name, node.name


def _words_of(name: str) -> set[str]:
    """Words of a name; "in place" is a term of its own."""
    snake = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    return set(snake.replace("in_place", "inplace").split("_"))


def test_no_name_contains_a_forbidden_word():
    assert [one for one in _names() if _words_of(one[1]) & FORBIDDEN_WORDS.keys()] == []


def test_a_forbidden_word_is_found_in_names_of_every_kind():
    assert _words_of("TellsTokens") == {"tells", "tokens"}
    assert _words_of("_told_KT") & FORBIDDEN_WORDS.keys() == {"told"}
    assert not _words_of("untold") & FORBIDDEN_WORDS.keys()


def test_there_are_40_questions_with_an_answer():
    assert len(QUESTIONS) == 40
    assert len({question for question, _, _ in QUESTIONS}) == 40


@pytest.mark.parametrize(("question", "term", "path"), QUESTIONS, ids=[q for q, _, _ in QUESTIONS])
def test_the_usual_term_finds_the_file(question, term, path):
    """In the file's name, or in the first paragraph of its docstring."""
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    first, file = docstring.partition("\n\n")[0], path.replace("_", " ")
    places = f"{first} {file}".lower()
    assert term.lower() in places, question


@pytest.mark.parametrize(
    ("subject", "accepted"),
    [
        ("planning: count scores of the xla kernel", True),
        ("docs, tests: split pages", True),
        ("Bytes of a number in eight bits: nobody asked", False),
        (f"planning: {'x' * 63}", False),
        ("x" * 72, False),
    ],
)
def test_the_commit_hook_reads_subjects(subject, accepted):
    found = subject_rule().search(f"{subject}\n\nA body.\n")
    assert (found is not None) == accepted
