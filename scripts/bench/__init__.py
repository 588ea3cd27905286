"""Benchmarks and proofs that take longer than a test; each writes its figures, with their conditions, into results/."""
