"""`python -m jaxtrain` and the program `jaxtrain`: supervisors start without loading JAX."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Imported here: loading JAX takes seconds, and a supervisor watches for weeks without it.
    if words[:1] == ["supervise"]:
        from jaxtrain.attempts import supervise

        return supervise.main(words[1:])
    from jaxtrain import commands

    return commands.main(words)


if __name__ == "__main__":
    sys.exit(main())
