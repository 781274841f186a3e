"""The strategies that the Trainer sees."""
