"""EAGLE and EAGLE-3: heads that feed on their own output."""
