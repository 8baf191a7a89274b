"""What every process of tests.harness.run_on needs, imported once in the server they are forked from."""

import gc
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"
# One compile thread: inductor would otherwise start a pool of processes as it is imported.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import safetensors.torch  # noqa: F401
import torch.utils.tensorboard.writer  # noqa: F401

import prism_lm.model.lm
import prism_lm.train.loop  # noqa: F401
from data_pipeline.streaming_parts import importing_parts

with importing_parts():
    from streaming.base.stream import Stream  # noqa: F401

# Of a million objects that stay to the end: DeepSpeed collects garbage many times an engine, 0.3 s each with them.
gc.collect()
gc.freeze()
