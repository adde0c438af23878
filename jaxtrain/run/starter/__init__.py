"""Starter project that `jaxtrain init` writes: config, model, Slurm script and README."""
