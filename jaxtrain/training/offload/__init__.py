"""State that lies in the memory of the hosts between steps and is streamed to the devices."""
