"""What a train step would need on machines that are not there: memory, traffic and time."""
