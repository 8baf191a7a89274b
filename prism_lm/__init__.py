"""PRISM language models: model, parallelism, checkpoints, evaluation and training."""
