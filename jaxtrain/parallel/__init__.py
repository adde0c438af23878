"""Device meshes and shardings: axis rules from logical axes to mesh axes."""
