"""File formats of text: Parquet, Arrow, CSV, JSON lines, array records, token files."""
