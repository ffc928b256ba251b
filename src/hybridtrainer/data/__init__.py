"""Built-in data sets and the loader."""
