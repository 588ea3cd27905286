"""DFlash and DSpark: a block of drafts in one pass."""
