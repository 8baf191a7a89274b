"""The model and its cost, from a ModelConfig alone; knows no ranks."""
