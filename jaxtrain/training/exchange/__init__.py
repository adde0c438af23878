"""Communication-efficient data parallelism over the mesh axis `data`."""
