"""Memory, traffic and time of a train step on a target machine, predicted without the machine."""
