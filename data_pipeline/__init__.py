"""Text to tokens to MDS shards to batches."""
