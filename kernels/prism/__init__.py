"""The PRISM recurrence: a linear state with one forget term and exact rank-L writes.

- `reference.py` `prism_scan_reference`: the loop over tokens, the definition.
- `chunk_reference.py` `prism_scan_chunked`: the chunk form in plain torch, with its own backward.
- `chunk.py` `prism_scan`: the chunk form in Triton, forward and backward. Its kernels are in `chunk_fwd.py`,
  `chunk_bwd.py` (queries and states) and `chunk_bwd_writes.py` (values, solver, keys, step sizes and decays), what they
  share in `tiles.py`, their launches in `launch.py`.
- `state_passing.py`: rows cut in shards, as affine maps of the state, their folds, and what a scan asks of a group.
- `sharded_reference.py` `prism_scan_chunked_sharded`, `sharded.py` `prism_scan_sharded`: the scans on one shard.
- `step_reference.py` `prism_step_reference`: one decode token in plain torch.
- `step.py` `prism_step`: the same as one Triton kernel, without gradients.
- `activation.py` `Activation`: the solver's activations by name.
"""
