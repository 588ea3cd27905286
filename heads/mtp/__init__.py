"""Multi-token prediction, with modules of its own or those of the target's checkpoint."""
