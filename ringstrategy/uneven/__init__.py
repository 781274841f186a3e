"""Ranks whose train dataloaders have different numbers of batches."""
