"""Self-contained HTML reports: escaped elements, tables, charts, and the page around them."""
