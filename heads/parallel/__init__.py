"""P-EAGLE and PARD: all drafts of a round in one pass, by mask tokens."""
