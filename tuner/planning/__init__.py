"""Plans: which launch of which layout fits the memory, and is fastest by the model."""
