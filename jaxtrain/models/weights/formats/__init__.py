"""File formats and quantized layouts of published weights."""
