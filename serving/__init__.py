"""Engines that serve: what they do with a pair, beside what was measured, and how that changes over time."""
