"""Attention kernels behind one signature, and context parallelism."""
