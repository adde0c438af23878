"""One architecture a file: a frozen dataclass of sizes and a module that is only mathematics."""
