"""One question a file: `python -m benchmarks.<question> --json FILE` prints what it finds and writes every run."""
