"""Drafters without weights, and drafters that combine others: n-grams, suffixes, lookahead, fusion, cascade."""
