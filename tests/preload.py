"""What every process of tests.harness.run_on needs, imported once in the server they are forked from."""

import gc
import importlib
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"
# One compile thread: inductor would otherwise start a pool of processes as it is imported.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

from data_pipeline.streaming_parts import importing_parts
from prism_lm.model.operators import build_plain_operators
from prism_lm.train.engine import import_deepspeed

# What a training imports on its way.
LATE = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_experts",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "kernels.prism.sharded_reference",
    "prism_lm.model.lm",
    "prism_lm.parallel.sequence",
    "prism_lm.train.loop",
    "safetensors.torch",
    "torch._dynamo",
    "torch.utils.serialization.config",
    "torch.utils.tensorboard.writer",
)

# DeepSpeed tries out, once in a process, which of its own operators a compiler here would build.
import_deepspeed()
build_plain_operators()
for module in LATE:
    importlib.import_module(module)
with importing_parts():
    importlib.import_module("streaming.base.stream")

# Of a million objects that stay to the end: DeepSpeed collects garbage many times an engine, 0.3 s each with them.
gc.collect()
gc.freeze()
