"""Metrics of a run: the log, its files on disk, TensorBoard, the best evaluation."""
