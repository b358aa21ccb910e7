"""One question a file. Run with `python -m benchmarks.<name>`; each prints one JSON line per measurement."""
