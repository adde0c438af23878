"""Communication-reduced data parallelism: other ways for the replicas along `data` to agree."""
