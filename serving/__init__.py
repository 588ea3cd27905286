"""Engines that serve a pair: their acceptance, compared with the measurement, and watched over time."""
