"""The list of shipped configs."""

from rich.console import Console

from jaxtrain.config.shipped import shipped_headers
from jaxtrain.run.show.progress import say
from jaxtrain.run.status import DONE


def show_configs(console: Console) -> int:
    """Prints a line for each shipped config: its name, what it trains and what it is meant for."""
    headers = shipped_headers()
    longest = max(len(header.name) for header in headers)
    for header in headers:
        line = f"{header.name:{longest}}  {header.trains}; for {header.hardware}"
        say(console, line)
    return DONE
