"""Pieces that drafter architectures share: decoder layers, attention in training, passes in decoding, kernels."""
