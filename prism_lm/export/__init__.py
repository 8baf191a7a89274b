"""The model in the formats of others: a Hugging Face folder, and weights that others have saved."""
