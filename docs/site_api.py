"""Pages of the documentation site for what `jaxtrain` exports and what extensions implement."""

import ast
from pathlib import Path

API_INDEX = "api/index.md"

# What a file of your own implements or makes: the page -> its classes, or a whole module.
_INTERFACES = {
    "Model": ["jaxtrain.models.model"],
    "Layers": [
        "jaxtrain.nn.transformer.decoder.Layer",
        "jaxtrain.nn.transformer.language_model.Transformer",
        "jaxtrain.nn.predictor.Predictor", "jaxtrain.nn.transformer.language_model.PairModule",
    ],
    "Dataset": [
        "jaxtrain.training.settings.Data", "jaxtrain.training.settings.TextSource",
        "jaxtrain.data.source.Dataset", "jaxtrain.data.source.Examples",
        "jaxtrain.data.source.WholeBatches", "jaxtrain.data.tokenization.tokenizer.Tokenizer",
    ],
    "Objective": ["jaxtrain.training.objectives.objective.Objective"],
    "Optimizer rule": ["jaxtrain.training.optimizers.rule"],
    "Attention kernel": [
        "jaxtrain.nn.attention.kernel_registry.Kernel",
        "jaxtrain.nn.attention.kernel_registry.Request",
    ],
    "Remat policy": ["jaxtrain.nn.remat.Policy"],
    "Target": ["jaxtrain.parallel.chips.Chip"],
    "Tracker": ["jaxtrain.run.metrics.tracking.Service"],
}  # fmt: skip


def exports(root: Path) -> dict[str, str]:
    """Return each name of `jaxtrain.__all__` -> the module that defines it; nothing is imported."""
    tree = ast.parse((root / "jaxtrain" / "__init__.py").read_text())
    homes = {
        alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxtrain.")
        for alias in node.names
    }
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {name: homes[name] for name in names}


def interface_pages() -> dict[str, str]:
    """Return each interface's title -> its page."""
    return {name: f"api/interfaces/{name.lower().replace(' ', '_')}.md" for name in _INTERFACES}


def _options(name: str) -> str:
    """Return the options of an entry: a module has the page's heading."""
    is_class = name.rpartition(".")[2][0].isupper()
    shown = "heading_level: 2" if is_class else "show_root_heading: false"
    return f"    options:\n      {shown}\n"


def api_pages(root: Path) -> dict[str, str]:
    """Return every page of the API -> its Markdown; docstrings are read when it is built."""
    homes, own = exports(root), interface_pages()
    pages = {f"api/{name}.md": f"::: {home}.{name}\n" for name, home in homes.items()}
    for name, objects in _INTERFACES.items():
        body = "\n".join(f"::: {one}\n{_options(one)}" for one in objects)
        pages[own[name]] = f"# {name}\n\n{body}"
    lines = ["# API reference", "", "What `from jaxtrain import ...` offers:", ""]
    lines += [f"- [`{name}`]({name}.md), from `{home}`" for name, home in homes.items()]
    lines += [
        "",
        "## Interfaces",
        "",
        "What a model, a dataset or an optimizer of yours implements:",
        "",
    ]
    lines += [f"- [{name}]({page.removeprefix('api/')})" for name, page in own.items()]
    pages[API_INDEX] = "\n".join([*lines, ""])
    return pages
