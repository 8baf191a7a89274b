"""The command line: `prism VERB ...`, the same as `python -m launcher`."""
